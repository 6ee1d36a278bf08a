"""The examples run as their users run them: as scripts, each in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.syncers import running_syncer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = ("lightning_lm", "transformers_lm", "plain_loop")
SECONDS = 150


def start(folder: Path, script: str, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, EXAMPLES / f"{script}.py", *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_demo(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    return start(folder, "demo", "--out", folder / "demo", *arguments)


def test_a_lightning_a_hugging_face_and_a_plain_script_train_one_model(tmp_path: Path) -> None:
    with running_syncer(learners=3, sync_every=4, fragments=4) as syncer:
        jobs = {}
        for seed, script in enumerate(SCRIPTS):
            flags = ("--name", script, "--steps", 20, "--seed", seed)
            report = ("--report", tmp_path / f"{script}.jsonl")
            jobs[script] = start(tmp_path, script, syncer.address, *flags, *report)
        outputs = {script: job.communicate(timeout=SECONDS)[0] for script, job in jobs.items()}

        status = syncer.status()

    for script, job in jobs.items():
        assert job.returncode == 0, f"{script}:\n{outputs[script]}"
    assert status["clock"] >= 20
    assert status["fates"]["merged"] > 0
    assert status["fates"]["rejected"] == {}
    assert not any(status["refused"].values())
    for script in SCRIPTS:
        lines = (tmp_path / f"{script}.jsonl").read_text().splitlines()
        assert max(json.loads(line)["step"] for line in lines) == 20


def test_the_demo_finishes_and_leaves_its_files(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    demo = start_demo(tmp_path, "--steps", 24)

    output, _ = demo.communicate(timeout=SECONDS)

    folder = tmp_path / "demo"
    assert (folder / "result.json").exists(), output
    result = json.loads((folder / "result.json").read_text())
    good = all(
        result["held_out_loss"]["global"] < alone
        for alone in result["held_out_loss"]["alone"].values()
    )
    assert len(result["held_out_loss"]["alone"]) == 4
    assert demo.returncode == (0 if good else 1), output
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    model = GPT2LMHeadModel.from_pretrained(folder)
    assert model.config.n_embd == 64
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_process_that_fails_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--syncer-flags=--outer-lr banana")

    output, _ = demo.communicate(timeout=SECONDS)

    assert demo.returncode == 1
    assert "syncer ended with exit code 2" in output
    assert "banana" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path, number: int) -> None:
    demo = start_demo(tmp_path)
    assert demo.stdout is not None
    while "syncer at" not in demo.stdout.readline():
        assert demo.poll() is None
    children = psutil.Process(demo.pid).children()

    demo.send_signal(number)
    demo.communicate(timeout=SECONDS)

    assert demo.returncode == 130
    assert children
    assert not any(child.is_running() for child in children)

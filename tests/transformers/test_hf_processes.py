"""Trainers in processes of their own: several learners, several ranks, and a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_tiny as tiny

from tests.syncers import running_syncer
from tests.waiting import until

TRAIN = """
import json, sys
from pathlib import Path
from safetensors.torch import save_file
import hf_tiny as tiny
from diloco_transformers import DiLoCoCallback

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
for run, address, steps in (("lockstep", sys.argv[3], 12), ("free", sys.argv[4], 60)):
    callback = DiLoCoCallback(address, name=f"learner{seed}", data_seed=seed)
    recorder = tiny.Recorder("on_step_begin")
    trainer = tiny.trainer_of(
        folder / str(seed), steps, [recorder, callback], model=tiny.tiny_model(seed), seed=seed,
        train=tiny.rows(64, seed),
    )
    trainer.train()
    save_file(recorder.seen[0], folder / f"{run}{seed}.first")
    save_file(tiny.weights(trainer.model), folder / f"{run}{seed}.last")
    (folder / f"{run}{seed}.json").write_text(json.dumps(callback.learner.metrics()))
"""

RANK = """
import hashlib, json, os, sys
from pathlib import Path
import torch
import hf_tiny as tiny
from diloco_transformers import DiLoCoCallback
from safetensors.torch import save_file
from transformers import TrainerCallback

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])

class Digests(TrainerCallback):
    def __init__(self):
        self.seen = []
    def on_step_begin(self, args, state, control, model=None, **_):
        flat = torch.cat([w.flatten() for w in tiny.weights(model).values()])
        self.seen.append(hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    on_train_end = on_step_begin

for run, address, steps, times in (("own", sys.argv[2], 14, 2), ("run", sys.argv[3], 1000, 1)):
    callback, digests = DiLoCoCallback(address, name="island"), Digests()
    trainer = tiny.trainer_of(
        folder / run, steps, [digests, callback], ddp_backend="gloo",
        save_strategy="steps", save_steps=100_000,
    )
    for _ in range(times):
        trainer.train()
    found = {
        "digests": digests.seen, "step": trainer.state.global_step,
        "metrics": callback.learner.metrics(), "parallel": str(trainer.args.parallel_mode),
    }
    (folder / f"{run}{rank}.json").write_text(json.dumps(found))
    save_file(tiny.weights(trainer.model), folder / f"{run}{rank}.last")
torch.distributed.destroy_process_group()
"""

CRASH = """
import sys
from pathlib import Path
import hf_tiny as tiny
from diloco_transformers import DiLoCoCallback
from transformers import TrainerCallback

class Fails(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 3:
            raise ArithmeticError("on purpose")

callbacks = [DiLoCoCallback(sys.argv[2], name="doomed"), Fails()]
tiny.trainer_of(Path(sys.argv[1]), 10, callbacks).train()
"""


def started(folder: Path, script: str, *arguments: Any, ranks: int = 0) -> subprocess.Popen[str]:
    file = folder / f"script{len(list(folder.glob('script*')))}.py"
    file.write_text(script)
    launcher: Sequence[str] = ()
    if ranks:
        # --standalone meets on a port that is free.
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return subprocess.Popen(
        [sys.executable, *launcher, str(file), str(folder), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    )


def finished(*processes: subprocess.Popen[str], code: int = 0) -> list[str]:
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == code, output
    return outputs


def told(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}.json").read_text()) for name in names]


def test_two_trainers_train_one_model(tmp_path: Path) -> None:
    locked, free = tmp_path / "locked.safetensors", tmp_path / "free.safetensors"
    lockstep = running_syncer(
        preset="diloco", sync_every=4, learners=2, config={"export": str(locked)}
    )
    decoupled = running_syncer(
        sync_every=4, fragments=2, overlap=2, quorum=2, config={"export": str(free)}
    )
    with lockstep as one, decoupled as other:
        addresses = (one.address, other.address)
        finished(*(started(tmp_path, TRAIN, seed, *addresses) for seed in (1, 2)))
        status = other.status()

    # In lockstep they begin and end with the same weights, which the syncer keeps.
    for moment in ("first", "last"):
        here, there = (tiny.stored(tmp_path / f"lockstep{seed}.{moment}") for seed in (1, 2))
        assert tiny.same(here, there)
    assert tiny.same(tiny.stored(locked), there)

    # Otherwise nobody waits: who leaves last leaves with what the syncer keeps.
    lasts = [tiny.stored(tmp_path / f"free{seed}.last") for seed in (1, 2)]
    assert any(tiny.same(tiny.stored(free), last) for last in lasts)
    assert status["fates"]["merged"] >= 4
    for metrics in told(tmp_path, "free1", "free2"):
        assert metrics["diloco/steps"] == 60
        assert metrics["diloco/pushes_merged"] >= 1


def test_the_ranks_of_torchrun_are_one_learner_and_stay_equal(tmp_path: Path) -> None:
    own, run = tmp_path / "own.safetensors", tmp_path / "run.safetensors"
    endless = running_syncer(sync_every=4, fragments=2, overlap=2, config={"export": str(own)})
    ending = running_syncer(
        sync_every=4, fragments=2, overlap=2, config={"export": str(run), "steps": 10}
    )
    with endless as one, ending as other:
        finished(started(tmp_path, RANK, one.address, other.address, ranks=2))
        merged = [syncer.status()["fates"]["merged"] for syncer in (one, other)]
    assert min(merged) >= 2
    for name, exported in (("own", own), ("run", run)):
        leader, follower = told(tmp_path, f"{name}0", f"{name}1")
        assert "DISTRIBUTED" in leader["parallel"]
        assert leader["digests"] == follower["digests"]
        assert len(set(leader["digests"])) > 10
        for rank in range(2):
            assert tiny.same(tiny.stored(exported), tiny.stored(tmp_path / f"{name}{rank}.last"))
        checkpoint = tmp_path / name / f"checkpoint-{leader['step']}"
        assert tiny.same(tiny.stored(exported), tiny.stored(checkpoint / "model.safetensors"))

    (leader,) = told(tmp_path, "own0")
    assert len(leader["digests"]) == 2 * 15  # trained twice
    assert leader["metrics"]["diloco/steps"] == 14
    assert leader["metrics"]["diloco/tokens"] == 2 * 14 * tiny.TOKENS

    # The run's last step ends all ranks at the same step.
    leader, follower = told(tmp_path, "run0", "run1")
    assert 10 <= leader["step"] == follower["step"] < 1000


def test_a_training_that_fails_ends_its_process_and_is_soon_forgotten(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, lease=2.0) as syncer:
        (output,) = finished(started(tmp_path, CRASH, syncer.address), code=1)
        assert "ArithmeticError: on purpose" in output
        until(lambda: not syncer.status()["learners"])

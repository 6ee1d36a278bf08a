"""A learner of two processes: one speaks, both apply, and they never differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from litmodels import EVERY_STEP

from tests.syncers import global_model, running_syncer
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def run_job(folder: Path, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "DILOCO_SYNCER": address,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'lightning'}",
    }
    script = str(ROOT / "tests" / "lightning" / "ddp_job.py")
    return subprocess.run(
        [sys.executable, script, str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_both_ranks_hold_the_same_merged_weights_after_every_batch(
    start_method: str, tmp_path: Path
) -> None:
    with running_syncer(**EVERY_STEP) as syncer:
        done = run_job(tmp_path, syncer.address, start_method)
        assert done.returncode == 0, done.stderr
        found = global_model(syncer)
        assert syncer.status()["clock"] == 8
    zero, one = results(tmp_path)
    assert zero["weights"] == one["weights"]
    assert len(zero["weights"]) == 8
    assert zero["final"] == one["final"]
    assert zero["final"] == {k: t.flatten().tolist() for k, t in found.items()}
    assert (zero["state"]["steps"], zero["state"]["tokens"]) == (8, 64)  # of both ranks


def test_without_lockstep_both_ranks_apply_at_the_same_step_and_stop_at_the_same_step(
    tmp_path: Path,
) -> None:
    with running_syncer(sync_every=3, fragments=3, config={"steps": 100}) as syncer:
        done = run_job(tmp_path, syncer.address, "fork", "endless")
        assert done.returncode == 0, done.stderr
        assert syncer.status()["clock"] >= 100
    zero, one = results(tmp_path)
    assert zero["weights"] == one["weights"]
    assert zero["final"] == one["final"]
    assert zero["state"]["steps"] >= 90  # the clock is Lamport's: it may run ahead of the steps


def test_an_exception_on_one_rank_ends_both_and_the_learner_leaves(tmp_path: Path) -> None:
    with running_syncer() as syncer:
        done = run_job(tmp_path, syncer.address, "popen", "fail")
        assert done.returncode != 0
        assert "of the user" in done.stderr
        until(lambda: not syncer.status()["learners"], 5, "the learner left")


def test_a_wrong_address_is_told_and_no_rank_waits_for_ever(tmp_path: Path) -> None:
    done = run_job(tmp_path, "nonsense", "fork")
    assert done.returncode != 0
    assert "The address 'nonsense' has no scheme" in done.stderr

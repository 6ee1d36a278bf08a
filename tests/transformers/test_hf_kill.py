"""The syncer is killed in the middle of a training: it does not stop, and ends in time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hf_tiny as tiny

from tests.end_to_end.processes import ROOT, Daemon, Process

#: Kills the syncer at its own step 20 or soon after, trains on, and tells how that went.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import hf_tiny as tiny
from diloco_transformers import DiLoCoCallback
from transformers import TrainerCallback

ON = 100  # steps after the kill

class Watch(TrainerCallback):
    killed, began, longest, boundary, over = 0, 0.0, 0.0, 0.0, 0.0

    def on_step_end(self, args, state, control, **_):
        now, metrics = time.monotonic(), callback.learner.metrics()
        if not self.killed:
            if state.global_step >= 20 and metrics["diloco/pushes_merged"] >= 2:
                os.kill(int(sys.argv[3]), signal.SIGKILL)
                self.killed, self.boundary = state.global_step, metrics["diloco/boundary_seconds"]
        else:
            self.longest = max(self.longest, now - self.began)
            if state.global_step >= self.killed + ON and not callback.learner.connected:
                self.boundary = metrics["diloco/boundary_seconds"] - self.boundary
                control.should_training_stop, self.over = True, now
        self.began = now

watch, callback = Watch(), DiLoCoCallback(sys.argv[2], close_timeout=1.0)
# In front, so that ours is told of the last step as by any user's callback that stops a training.
trainer = tiny.trainer_of(Path(sys.argv[1]), 100_000, [watch, callback])
trainer.train()
took, step = time.monotonic() - watch.over, trainer.state.global_step
trainer.save_model(str(Path(sys.argv[1]) / "saved"))
print("told " + json.dumps({
    "after": step - watch.killed, "longest": watch.longest, "boundary": watch.boundary,
    "close": took, "counted": callback.learner.metrics()["diloco/steps"] == step,
}))
"""


def test_a_training_whose_syncer_is_killed_stops_for_no_step_and_ends_in_time_with_a_warning(
    tmp_path: Path,
) -> None:
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    with (
        Daemon("--sync-every", "4", "--fragments", "2", "--overlap", "1") as daemon,
        Process(
            "-c", SCRIPT, str(tmp_path), daemon.address, str(daemon.pid), env={"PYTHONPATH": paths}
        ) as job,
    ):
        assert job.wait(120) == 0, job.err
        assert daemon.wait() == -9
        told, err = json.loads(job.out.rpartition("told ")[2]), job.err
    assert told["after"] >= 100
    assert told["counted"], "every step was counted"
    assert told["longest"] < 1.0
    assert told["boundary"] < 0.5
    assert told["close"] < 1.0 + 4.0  # close_timeout, and what the Trainer itself does at the end
    assert err.count("lost the syncer") == 1
    assert err.count("left without a closing round") == 1
    assert "is not in the global model" in err
    assert "Traceback" not in err
    # What the user has then is the learner's own model, whole.
    saved = tiny.stored(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() >= tiny.weights(tiny.tiny_model()).keys()

"""The syncer is killed while a fit is running: training does not stop, and ends in time."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.end_to_end.processes import ROOT, Daemon, Process

#: Kills the syncer at its own step 20 or soon after, trains on, and tells how that went.
SCRIPT = """
import json, os, signal, sys, time
import lightning.pytorch as pl
from diloco_lightning import DiLoCoStrategy
from litmodels import Regression, Spy, batches, trainer

ON = 200  # steps after the kill
steps, killed, began, longest, boundary, over = 0, 0, 0.0, 0.0, 0.0, 0.0

def watch(t, module):
    global steps, killed, began, longest, boundary, over
    learner, now, steps = strategy.callback.learner, time.monotonic(), steps + 1
    metrics = learner.metrics()
    if not killed:
        if steps >= 20 and metrics["diloco/pushes_merged"] >= 2:
            os.kill(int(sys.argv[2]), signal.SIGKILL)
            killed, boundary = steps, metrics["diloco/boundary_seconds"]
    else:
        longest = max(longest, now - began)
        if steps >= killed + ON and not learner.connected:
            boundary = metrics["diloco/boundary_seconds"] - boundary
            t.should_stop, over = True, now
    began = now

class Slow(Regression):
    def training_step(self, batch, batch_idx):
        time.sleep(0.001)  # what a step of a real model takes
        return super().training_step(batch, batch_idx)

strategy = DiLoCoStrategy(sys.argv[1], close_timeout=1.0)
t = trainer(Spy(watch), strategy=strategy, max_epochs=-1)
t.fit(Slow(), batches())
print(json.dumps({
    "after": t.global_step - killed, "longest": longest, "boundary": boundary,
    "close": time.monotonic() - over, "state": strategy.callback.state_dict()["steps"] == steps,
}))
"""


def test_a_fit_whose_syncer_is_killed_stops_for_no_step_and_ends_in_time_with_a_warning() -> None:
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    with (
        Daemon("--sync-every", "4", "--fragments", "2", "--overlap", "1") as daemon,
        Process("-c", SCRIPT, daemon.address, str(daemon.pid), env={"PYTHONPATH": paths}) as job,
    ):
        assert job.wait(90) == 0, job.err
        assert daemon.wait() == -9
        told, err = json.loads(job.out), job.err
    assert told["after"] >= 200
    assert told["state"], "every step was counted"
    assert told["longest"] < 1.0
    assert told["boundary"] < 0.5
    assert told["close"] < 1.0 + 3.0  # close_timeout, and what Lightning itself does at the end
    assert err.count("lost the syncer") == 1
    assert err.count("left without a closing round") == 1
    assert "is not in the global model" in err
    assert "Traceback" not in err

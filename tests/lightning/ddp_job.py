"""A script, not a test: one learner of two processes. Takes folder, start method, extras."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from diloco_lightning import DiLoCoDDPStrategy
from litmodels import QUIET, Regression, Spy, batches, weights


class Recorder:
    """The weights of this rank after every batch, and what the callback counted, as JSON."""

    def __init__(self) -> None:
        self.weights: list[dict[str, list[float]]] = []

    def note(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.weights.append({k: t.flatten().tolist() for k, t in weights(module).items()})


class Job(Regression):
    folder = Path()
    recorder = Recorder()
    callback: Any = None
    fails_at = -1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if batch_idx == self.fails_at and self.global_rank == 0:
            raise ZeroDivisionError("of the user")
        return super().training_step(batch, batch_idx)

    def on_fit_end(self) -> None:  # also in forked processes, whose end the script does not see
        result = {
            "weights": self.recorder.weights,
            "final": {k: t.flatten().tolist() for k, t in weights(self).items()},
            "state": self.callback.state_dict(),
        }
        (self.folder / f"rank{self.global_rank}.json").write_text(json.dumps(result))


def main(folder: str, start_method: str, *extra: str) -> None:
    strategy = DiLoCoDDPStrategy(start_method=start_method, connect_timeout=30.0)
    torch.manual_seed(0)
    job, recorder = Job(), Recorder()
    job.folder, job.recorder, job.callback = Path(folder), recorder, strategy.callback
    if "fail" in extra:
        job.fails_at = 2
    options = QUIET | {"devices": 2, "max_epochs": 1000 if "endless" in extra else 1}
    trainer = pl.Trainer(strategy=strategy, callbacks=[Spy(recorder.note)], **options)
    trainer.fit(job, batches(16))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])

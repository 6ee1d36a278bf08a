"""A Trainer that joins begins with the optimizer state and the schedule of one that trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from diloco_lightning import DiLoCoCallback
from lightning.pytorch.callbacks import ModelCheckpoint
from litmodels import Regression, Spy, batches, trainer

from diloco_plugin.syncer import Syncer
from tests.syncers import running_syncer
from tests.waiting import until

CONFIGURATION: dict[str, Any] = {"sync_every": 500, "fragments": 2}


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Began(pl.Callback):
    """What a fit began with."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (optimizer,) = trainer.optimizers
        self.steps = [int(entry["step"]) for entry in optimizer.state.values()]
        self.lr = optimizer.param_groups[0]["lr"]
        self.position = trainer.lr_scheduler_configs[0].scheduler.last_epoch


@contextmanager
def donor(syncer: Syncer) -> Iterator[None]:
    """A Trainer in a thread that goes on until the block ends."""
    batch = [0]

    def note(t: pl.Trainer, module: pl.LightningModule) -> None:
        batch[0] += 1
        time.sleep(0.01)  # a step that is no shorter than its snapshot
        t.should_stop = t.should_stop or over.is_set()

    over = threading.Event()
    one = trainer(DiLoCoCallback(syncer.address, name="donor"), Spy(note), max_epochs=-1)
    thread = threading.Thread(target=lambda: one.fit(Scheduled(), batches(4)), daemon=True)
    thread.start()
    try:
        until(lambda: batch[0] > 60, 30, "the donor trains")
        yield
    finally:
        over.set()
        thread.join(30)


def joined(syncer: Syncer, ckpt: str | None = None, steps: int = 1, **options: Any) -> Began:
    began = Began()
    callback = DiLoCoCallback(syncer.address, name="joiner", **options)
    t = trainer(callback, began, max_epochs=-1, max_steps=steps)
    t.fit(Scheduled(), batches(4), ckpt_path=ckpt)
    return began


def test_a_joining_trainer_takes_moments_and_the_position_of_the_schedule() -> None:
    with running_syncer(**CONFIGURATION) as syncer, donor(syncer):
        began = joined(syncer)
    (step,) = set(began.steps)
    assert step > 60
    assert abs(began.position - step) <= 1  # the scheduler steps a moment after the optimizer
    assert began.lr == pytest.approx(0.05 * 0.9 ** (began.position // 10))


def test_state_fresh_takes_nothing() -> None:
    with running_syncer(**CONFIGURATION) as syncer, donor(syncer):
        began = joined(syncer, state="fresh")
    assert (began.steps, began.lr, began.position) == ([], 0.05, 0)


@pytest.mark.parametrize(("steps", "wins"), [(1_000_000, True), (20, False)])
def test_a_resumed_checkpoint_wins_if_it_is_newer(
    steps: int, wins: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Counting(pl.Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            for entry in checkpoint["optimizer_states"][0]["state"].values():
                entry["step"].fill_(steps)

    saving = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=20)
    trainer(saving, Counting(), max_epochs=-1, max_steps=20, enable_checkpointing=True).fit(
        Scheduled(), batches(4)
    )
    path = tmp_path / "last.ckpt"
    caplog.set_level(logging.INFO, "diloco.learner")
    with running_syncer(**CONFIGURATION) as syncer, donor(syncer):
        began = joined(syncer, str(path), 21)
    if wins:
        assert (set(began.steps), began.position) == ({steps}, 20)
        assert f"this learner's own, of step {steps}" in caplog.text
    else:
        assert min(began.steps) > 60
        assert began.position > 60

"""A Trainer that joins begins with the optimizer state and the schedule of one that trains."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hf_tiny as tiny
import pytest
import torch
from diloco_transformers import DiLoCoCallback
from transformers import TrainerCallback, get_linear_schedule_with_warmup

import diloco_plugin
from diloco_plugin.syncer import Syncer
from tests.syncers import running_syncer
from tests.waiting import until

CONFIGURATION: dict[str, Any] = {"sync_every": 500, "fragments": 2}
TOTAL = 100_000


class Began(TrainerCallback):
    """What a training began with."""

    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any, lr_scheduler: Any, **_: Any
    ) -> None:
        if not hasattr(self, "steps"):
            states = optimizer.state.values()
            self.steps = [int(entry["step"]) for entry in states]
            self.position = lr_scheduler.last_epoch
            self.lr = optimizer.param_groups[0]["lr"]
            control.should_training_stop = True


@contextmanager
def donor(syncer: Syncer) -> Iterator[None]:
    """A plain loop in a thread, since two Trainers of one process share Accelerate's state."""
    over, steps = threading.Event(), [0]

    def train() -> None:
        model = tiny.tiny_model()
        groups = [  # as the Trainer makes them: with weight decay, and without
            {"params": [p for p in model.parameters() if (p.ndim > 1) is decays]}
            for decays in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, TOTAL)
        batch = {key: value[None] for key, value in tiny.rows(1)[0].items()}
        with diloco_plugin.attach(
            model, optimizer, syncer.address, name="donor", scheduler=scheduler
        ):
            while not over.is_set():
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
                scheduler.step()
                steps[0] += 1
                time.sleep(0.01)  # a step that is no shorter than its snapshot

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        until(lambda: steps[0] > 30, 60, "the donor trains")
        yield
    finally:
        over.set()
        thread.join(30)


def joined(syncer: Syncer, folder: Path, resume: str | None = None, **options: Any) -> Began:
    began = Began()
    callbacks = [DiLoCoCallback(syncer.address, name="joiner", **options), began]
    one = tiny.trainer_of(folder / "joiner", TOTAL, callbacks, logging_strategy="no")
    one.train(resume_from_checkpoint=resume)
    return began


def test_a_joining_trainer_takes_moments_and_the_position_of_the_schedule(tmp_path: Path) -> None:
    with running_syncer(**CONFIGURATION) as syncer, donor(syncer):
        began = joined(syncer, tmp_path)
    (step,) = set(began.steps)
    assert step > 30
    assert abs(began.position - step) <= 1  # the scheduler steps a moment after the optimizer
    assert began.lr == pytest.approx(1e-2 * (1 - began.position / TOTAL))


def test_state_fresh_takes_nothing(tmp_path: Path) -> None:
    with running_syncer(**CONFIGURATION) as syncer, donor(syncer):
        began = joined(syncer, tmp_path, state="fresh")
    assert (began.steps, began.position) == ([], 0)


@pytest.mark.parametrize("newer", [True, False])
def test_a_resumed_checkpoint_wins_if_it_is_newer(
    newer: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = 10
    plain = tiny.trainer_of(tmp_path, steps, [], save_strategy="steps", save_steps=steps)
    plain.train()
    checkpoint = tmp_path / f"checkpoint-{steps}"
    if newer:  # for an optimizer without counts of its own, the Trainer's says it
        state = checkpoint / "trainer_state.json"
        state.write_text(state.read_text().replace('"global_step": 10', '"global_step": 90000'))
    caplog.set_level(logging.INFO, "diloco.learner")
    with running_syncer(**CONFIGURATION) as syncer, donor(syncer):
        began = joined(syncer, tmp_path, str(checkpoint), run="main")
    if newer:
        assert set(began.steps) == {steps}
        assert "this learner's own, of step 90000" in caplog.text
    else:
        assert min(began.steps) > 30
        assert began.position > 30

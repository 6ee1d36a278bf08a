"""Checkpoints, resuming, and callbacks that keep averages of the weights."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from diloco_lightning import DiLoCoCallback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from litmodels import EVERY_STEP, Regression, Spy, batches, same, trainer, weights
from torch import Tensor, nn

from tests.syncers import global_model, running_syncer
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def saving(folder: Path, **kwargs: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="last", every_n_train_steps=6, **kwargs)


def fit(*callbacks: pl.Callback, steps: int, ckpt: str | None = None) -> pl.Trainer:
    checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    t = trainer(*callbacks, max_epochs=-1, max_steps=steps, enable_checkpointing=checkpoints)
    t.fit(Regression(), batches(20), ckpt_path=ckpt)
    return t


def test_a_resumed_learner_counts_on(tmp_path: Path) -> None:
    with running_syncer() as syncer:
        fit(DiLoCoCallback(syncer.address), saving(tmp_path), steps=6)
        again = DiLoCoCallback(syncer.address)
        t = fit(again, saving(tmp_path), steps=16, ckpt=str(tmp_path / "last.ckpt"))
    assert t.global_step == 16
    state = again.state_dict()
    assert (state["steps"], state["tokens"], state["run"]) == (16, 64, "main")


def test_a_checkpoint_without_a_learner_can_be_resumed_with_one_and_the_reverse(
    tmp_path: Path,
) -> None:
    with running_syncer() as syncer:
        fit(saving(tmp_path / "plain"), steps=6)
        callback = DiLoCoCallback(syncer.address)
        checkpoint = str(tmp_path / "plain" / "last.ckpt")
        t = fit(callback, saving(tmp_path / "learner"), steps=12, ckpt=checkpoint)
        assert (t.global_step, callback.state_dict()["steps"]) == (12, 6)
    checkpoint = str(tmp_path / "learner" / "last.ckpt")
    assert fit(saving(tmp_path / "plain-again"), steps=18, ckpt=checkpoint).global_step == 18


def test_a_resumed_learner_takes_the_global_model_not_the_old_weights(tmp_path: Path) -> None:
    seen: list[dict[str, Tensor]] = []

    class Recording(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(weights(pl_module))

    with running_syncer() as syncer:
        fit(DiLoCoCallback(syncer.address), saving(tmp_path), steps=6)
        fit(DiLoCoCallback(syncer.address), steps=10)  # the run goes on without it
        now = global_model(syncer)
        checkpoint = str(tmp_path / "last.ckpt")
        fit(DiLoCoCallback(syncer.address), Recording(), steps=7, ckpt=checkpoint)
    assert same(seen[0], now)


def test_a_checkpoint_and_a_validation_after_the_end_hold_the_global_weights(
    tmp_path: Path,
) -> None:
    validated: list[dict[str, Tensor]] = []

    class Recording(pl.Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            validated.append(weights(pl_module))

    with running_syncer(sync_every=100, fragments=2) as syncer:
        t = fit(DiLoCoCallback(syncer.address), Recording(), steps=6)
        t.save_checkpoint(tmp_path / "end.ckpt")
        t.validate(t.lightning_module, batches(1), verbose=False)
        saved = Regression.load_from_checkpoint(tmp_path / "end.ckpt")
        assert same(weights(saved), global_model(syncer))
        assert same(validated[-1], global_model(syncer))


@pytest.mark.parametrize("first", [True, False])
def test_an_average_of_weights_sees_merged_ones_in_the_same_batch(first: bool) -> None:
    # An average that forgets everything is the weights themselves.
    average = EMAWeightAveraging(decay=0.0)
    distances: list[float] = []

    def compare(t: pl.Trainer, module: pl.LightningModule) -> None:
        averaged = dict(average._average_model.module.named_parameters())
        merged = global_model(syncer)
        distances.append(max(float((merged[k] - averaged[k].detach()).abs().max()) for k in merged))

    with running_syncer(**EVERY_STEP) as syncer:
        callback = DiLoCoCallback(syncer.address)
        order = [average, callback] if first else [callback, average]
        trainer(*order, Spy(compare)).fit(Regression(), batches())
    assert distances == [0.0] * 8


@pytest.mark.parametrize("first", [True, False])
def test_the_average_is_what_is_left_and_was_never_sent(first: bool) -> None:
    average = EMAWeightAveraging(decay=0.9)
    model = Regression()
    with running_syncer(sync_every=100, fragments=1) as syncer:
        callback = DiLoCoCallback(syncer.address)
        trained: list[dict[str, Tensor]] = []
        spy = Spy(lambda t, m: trained.append(weights(m)))
        order = [average, callback] if first else [callback, average]
        trainer(*order, spy).fit(model, batches())
        found = global_model(syncer)
    averaged = {k: p.detach() for k, p in average._average_model.module.named_parameters()}
    assert same(weights(model), averaged)
    # One learner, one closing round: the global model is what it had trained, give or take fp32.
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, trained[-1][name])


def test_stochastic_averaging_with_batch_norm_sends_nothing_of_its_extra_epoch() -> None:
    model = Regression(net=nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    trained: dict[int, dict[str, Tensor]] = {}

    def note(t: pl.Trainer, module: pl.LightningModule) -> None:
        trained[t.current_epoch] = weights(module)

    with running_syncer(sync_every=100, fragments=1) as syncer:
        callback = DiLoCoCallback(syncer.address)
        average = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        trainer(average, callback, Spy(note), max_epochs=3).fit(model, batches())
        found = global_model(syncer)
    assert callback.state_dict()["steps"] == 3 * 8
    assert 3 in trained, "the extra epoch"
    for name, tensor in trained[2].items():
        torch.testing.assert_close(tensor, found[name])


def test_a_process_that_fails_in_training_exits_and_its_learner_leaves(tmp_path: Path) -> None:
    script = """
import sys, torch
from diloco_lightning import DiLoCoStrategy
from litmodels import Regression, batches, trainer
class Failing(Regression):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise ZeroDivisionError("of the user")
        return super().training_step(batch, batch_idx)
trainer(strategy=DiLoCoStrategy(sys.argv[1])).fit(Failing(), batches())
"""
    paths = f"{ROOT}:{ROOT / 'tests' / 'lightning'}"
    with running_syncer(lease=60.0) as syncer:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", script, syncer.address],
            env={"PYTHONPATH": paths, "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert "ZeroDivisionError: of the user" in done.stderr
        until(lambda: not syncer.status()["learners"], 10, "the learner left")
        assert time.monotonic() - began < 50, "long before its lease ended"

"""What counts as a step and as a token in a Trainer, and what is remembered of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_tiny as tiny
import pytest
import torch
from diloco_transformers import DiLoCoCallback
from transformers import Trainer, TrainerCallback

from diloco_plugin.learner import Learner
from diloco_plugin.syncer import Syncer
from tests.syncers import running_syncer


@pytest.fixture
def syncer() -> Iterator[Syncer]:
    with running_syncer(sync_every=4, fragments=2) as running:
        yield running


def counted(callback: DiLoCoCallback) -> tuple[float, float]:
    assert callback.learner is not None
    metrics = callback.learner.metrics()
    return metrics["diloco/steps"], metrics["diloco/tokens"]


class Overflows(TrainerCallback):
    """Makes gradients infinite at some steps, as fp16 does."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if state.global_step in self.steps:
            next(model.parameters()).grad.fill_(float("inf"))


class ScalingTrainer(Trainer):
    """Trains as with fp16 on a GPU: Accelerate's optimizer steps through a GradScaler."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_steps_that_amp_skips_do_not_count(tmp_path: Path, syncer: Syncer, optim: str) -> None:
    callback = DiLoCoCallback(syncer.address)
    trainer = tiny.trainer_of(
        tmp_path, 6, [callback, Overflows(1, 3)], kind=ScalingTrainer, optim=optim
    )
    trainer.train()
    assert trainer.state.global_step == 6
    assert counted(callback) == (4, 4 * tiny.TOKENS)


def test_the_default_optimizer_of_the_trainer_is_the_fused_one(tmp_path: Path) -> None:
    """Were it not, the test above would have to name another one."""
    assert tiny.arguments(tmp_path, 1).optim == "adamw_torch_fused"


def test_accumulated_batches_are_one_step_ragged_epochs_included(
    tmp_path: Path, syncer: Syncer
) -> None:
    callback = DiLoCoCallback(syncer.address)
    trainer = tiny.trainer_of(
        tmp_path,
        -1,
        [callback],
        train=tiny.rows(7 * tiny.BATCH),
        num_train_epochs=2,
        gradient_accumulation_steps=3,
    )
    trainer.train()
    # 7 batches are 3 + 3 + 1, twice.
    assert trainer.state.global_step == 6
    assert counted(callback) == (6, 14 * tiny.TOKENS)


def test_padding_is_no_work(tmp_path: Path, syncer: Syncer) -> None:
    mask = torch.tensor([1] * 5 + [0] * 3)
    padded = [row | {"attention_mask": mask} for row in tiny.rows(16)]
    callback = DiLoCoCallback(syncer.address)
    tiny.trainer_of(tmp_path, 3, [callback], train=padded).train()
    assert counted(callback) == (3, 3 * tiny.BATCH * 5)


def test_the_users_own_unit_of_work_counts(tmp_path: Path, syncer: Syncer) -> None:
    callback = DiLoCoCallback(syncer.address, tokens=lambda batch: len(batch["input_ids"]))
    tiny.trainer_of(tmp_path, 3, [callback]).train()
    assert counted(callback) == (3, 3 * tiny.BATCH)


def test_gradient_checkpointing_counts_once(tmp_path: Path, syncer: Syncer) -> None:
    callback = DiLoCoCallback(syncer.address)
    tiny.trainer_of(tmp_path, 3, [callback], gradient_checkpointing=True).train()
    assert counted(callback) == (3, 3 * tiny.TOKENS)


def test_evaluations_send_nothing_and_count_nothing(tmp_path: Path, syncer: Syncer) -> None:
    callback = DiLoCoCallback(syncer.address)
    merged: list[int] = []

    class Evaluates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            merged.append(syncer.status()["fates"]["merged"])

    trainer = tiny.trainer_of(
        tmp_path,
        2,
        [callback, Evaluates()],
        evaluate=tiny.rows(32),
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
    )
    trainer.evaluate()
    assert callback.learner is None
    assert syncer.status()["learners"] == []
    trainer.train()
    trainer.evaluate()
    assert counted(callback) == (2, 2 * tiny.TOKENS)
    assert merged[0] == 0


def test_two_trainings_of_one_trainer_count_every_step_once(tmp_path: Path, syncer: Syncer) -> None:
    callback = DiLoCoCallback(syncer.address, name="again")
    trainer = tiny.trainer_of(tmp_path, 4, [callback])
    trainer.train()
    first = callback.learner
    trainer.train()
    assert callback.learner is not first
    assert counted(callback) == (4, 4 * tiny.TOKENS)


class OutOfMemory(TrainerCallback):
    """Fails with batches that are too large, as a GPU would."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_step_begin(args, state, control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.train_batch_size > 4 and state.global_step == 2:
            raise RuntimeError("CUDA out of memory.")


def test_a_batch_size_that_is_searched_for_counts_the_last_try_only(
    tmp_path: Path, syncer: Syncer
) -> None:
    callback = DiLoCoCallback(syncer.address, name="searching")
    trainer = tiny.trainer_of(
        tmp_path,
        3,
        [callback, OutOfMemory()],
        auto_find_batch_size=True,
        per_device_train_batch_size=6,
    )
    trainer.train()
    assert trainer.state.train_batch_size < 5
    assert counted(callback) == (3, 3 * trainer.state.train_batch_size * tiny.LENGTH)
    assert len(syncer.status()["learners"]) == 0


class Fails(TrainerCallback):
    """Fails once."""

    def __init__(self) -> None:
        self.failed = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and not self.failed:
            self.failed = True
            raise ArithmeticError("on purpose")


def test_a_training_that_failed_can_be_tried_again(tmp_path: Path, syncer: Syncer) -> None:
    callback = DiLoCoCallback(syncer.address, name="stubborn")
    trainer = tiny.trainer_of(tmp_path, 4, [callback, Fails()])
    with pytest.raises(ArithmeticError):
        trainer.train()
    failed = callback.learner
    assert isinstance(failed, Learner)
    assert failed.alive  # nobody told us
    trainer.train()
    assert not failed.alive
    assert counted(callback) == (4, 4 * tiny.TOKENS)


def test_a_model_made_anew_for_every_trial_joins_every_time(tmp_path: Path, syncer: Syncer) -> None:
    callback = DiLoCoCallback(syncer.address, name="searcher")
    trainer = Trainer(
        model_init=lambda: tiny.tiny_model(),
        args=tiny.arguments(tmp_path, 2),
        train_dataset=tiny.rows(16),
        callbacks=[callback],
    )
    for trial in (1e-3, 1e-2):
        trainer.args.learning_rate = trial
        trainer.train()
        assert counted(callback) == (2, 2 * tiny.TOKENS)


def remembered(checkpoint: Path) -> dict[str, Any]:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return dict(state["stateful_callbacks"]["diloco"])


@pytest.mark.parametrize("restore", [False, True])
def test_a_resumed_training_goes_on_counting(tmp_path: Path, syncer: Syncer, restore: bool) -> None:
    first = tiny.trainer_of(
        tmp_path, 3, [DiLoCoCallback(syncer.address)], save_strategy="steps", save_steps=3
    )
    first.train()
    assert remembered(tmp_path / "checkpoint-3")["steps"] == 3
    callback = DiLoCoCallback(syncer.address)
    second = tiny.trainer_of(
        tmp_path,
        5,
        [callback],
        save_strategy="steps",
        save_steps=5,
        restore_callback_states_from_checkpoint=restore,
    )
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert callback in second.callback_handler.callbacks
    assert counted(callback) == (5, 5 * tiny.TOKENS)
    assert remembered(tmp_path / "checkpoint-5")["tokens"] == 5 * tiny.TOKENS


def test_a_checkpoint_without_us_can_be_resumed_with_us_and_back(
    tmp_path: Path, syncer: Syncer
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    tiny.trainer_of(tmp_path, 1, [], **saving).train()
    callback = DiLoCoCallback(syncer.address)
    resumed = tiny.trainer_of(tmp_path, 3, [callback], **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert counted(callback) == (2, 2 * tiny.TOKENS)
    alone = tiny.trainer_of(tmp_path, 5, [], **saving)
    alone.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert alone.state.global_step == 5


def test_a_resumed_learner_takes_the_global_model_not_that_of_its_checkpoint(
    tmp_path: Path, syncer: Syncer
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    tiny.trainer_of(tmp_path, 2, [DiLoCoCallback(syncer.address)], **saving).train()
    other = tiny.trainer_of(tmp_path / "other", 6, [DiLoCoCallback(syncer.address)])
    other.train()
    recorder = tiny.Recorder("on_step_begin")
    resumed = tiny.trainer_of(tmp_path, 3, [recorder, DiLoCoCallback(syncer.address)])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert tiny.same(tiny.weights(other.model), recorder.seen[0])

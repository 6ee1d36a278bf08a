"""A stock Trainer with the callback takes part in a run: joining, merging, leaving."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import hf_tiny as tiny
import pytest
import torch
from diloco_transformers import DiLoCoCallback
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from diloco_plugin.errors import RefusedError, UnreachableError
from tests.keyring import Keyring
from tests.syncers import running_syncer


def exporting(folder: Path, **config: Any) -> dict[str, Any]:
    return {"export": str(folder / "global.safetensors"), **config}


def test_a_trainer_gives_its_progress_and_ends_with_the_global_model(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, overlap=2, config=exporting(tmp_path)) as syncer:
        callback = DiLoCoCallback(syncer.address, name="hf")
        trainer = tiny.trainer_of(tmp_path, 30, [callback])
        trainer.train()
        status = syncer.status()
    assert status["fates"]["merged"] >= 2
    assert callback.learner is not None
    assert not callback.learner.alive
    metrics = callback.learner.metrics()
    assert metrics["diloco/steps"] == 30
    assert metrics["diloco/tokens"] == 30 * tiny.TOKENS
    assert tiny.same(tiny.weights(trainer.model), tiny.stored(tmp_path / "global.safetensors"))


def test_the_address_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_syncer(sync_every=4, fragments=2) as syncer:
        monkeypatch.setenv("DILOCO_SYNCER", syncer.address)
        tiny.trainer_of(tmp_path, 3, [DiLoCoCallback]).train()
        assert syncer.status()["fates"]["merged"] >= 1


def test_a_trainer_with_keys_joins_a_syncer_that_lets_in_known_keys_only(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys")
    keys = str(ring.learner("berlin"))
    with running_syncer(sync_every=4, fragments=2, config={"keys": str(ring.syncer)}) as syncer:
        callback = DiLoCoCallback(syncer.address, name="berlin", keys=keys)
        tiny.trainer_of(tmp_path, 3, [callback]).train()
        assert syncer.status()["fates"]["merged"] >= 1


def test_learners_from_other_seeds_hold_the_global_model_before_their_first_step(
    tmp_path: Path,
) -> None:
    with running_syncer(sync_every=4, fragments=2) as syncer:
        first = tiny.trainer_of(tmp_path, 5, [DiLoCoCallback(syncer.address)])
        first.train()
        recorder = tiny.Recorder("on_step_begin")
        second = tiny.trainer_of(
            tmp_path,
            1,
            [recorder, DiLoCoCallback(syncer.address)],
            model=tiny.tiny_model(seed=1),
        )
        second.train()
    assert tiny.same(tiny.weights(first.model), recorder.seen[0])


def test_a_tied_head_travels_once_and_stays_tied(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, config=exporting(tmp_path)) as syncer:
        model = tiny.tiny_model()
        tiny.trainer_of(tmp_path, 6, [DiLoCoCallback(syncer.address)], model=model).train()
    exported = tiny.stored(tmp_path / "global.safetensors")
    assert "lm_head.weight" not in exported
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model.lm_head.weight.detach(), exported["transformer.wte.weight"])


def test_the_exported_model_loads_with_from_pretrained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out" / "model.safetensors"
    with running_syncer(sync_every=4, fragments=2, config={"export": str(out)}) as syncer:
        trainer = tiny.trainer_of(tmp_path, 3, [DiLoCoCallback(syncer.address)])
        trainer.train()
    config = json.loads((out.parent / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    loaded = AutoModelForCausalLM.from_pretrained(out.parent)
    assert tiny.same(tiny.weights(trainer.model), tiny.weights(loaded))


def test_a_run_may_start_from_a_model_that_save_pretrained_wrote(tmp_path: Path) -> None:
    start = tiny.tiny_model(seed=5)
    start.save_pretrained(tmp_path / "start")
    config = {"init": str(tmp_path / "start")}
    with running_syncer(sync_every=4, fragments=2, config=config) as syncer:
        recorder = tiny.Recorder("on_step_begin")
        tiny.trainer_of(tmp_path, 1, [recorder, DiLoCoCallback(syncer.address)]).train()
    assert tiny.same(tiny.weights(start), recorder.seen[0])


def test_the_checkpoint_of_the_last_step_holds_the_final_global_model(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, config=exporting(tmp_path)) as syncer:
        trainer = tiny.trainer_of(
            tmp_path, 7, [DiLoCoCallback(syncer.address)], save_strategy="steps", save_steps=5
        )
        trainer.train()
    final = tiny.stored(tmp_path / "global.safetensors")
    assert tiny.same(final, tiny.stored(tmp_path / "checkpoint-7" / "model.safetensors"))
    assert not tiny.same(final, tiny.stored(tmp_path / "checkpoint-5" / "model.safetensors"))


def test_the_last_evaluation_sees_the_final_global_model(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, config=exporting(tmp_path)) as syncer:
        recorder = tiny.Recorder("on_evaluate")
        trainer = tiny.trainer_of(
            tmp_path,
            6,
            [recorder, DiLoCoCallback(syncer.address)],
            evaluate=tiny.rows(4, seed=9),
            num_train_epochs=3,
            eval_strategy="steps",
            eval_steps=4,
        )
        trainer.train()
    assert len(recorder.seen) == 2
    assert tiny.same(recorder.seen[-1], tiny.stored(tmp_path / "global.safetensors"))


def test_the_best_model_is_not_overwritten_at_the_end(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, config=exporting(tmp_path)) as syncer:
        callback = DiLoCoCallback(syncer.address)
        trainer = tiny.trainer_of(
            tmp_path,
            8,
            [callback],
            evaluate=tiny.rows(4, seed=9),
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,  # the worst: that of the first evaluation
        )
        trainer.train()
    best = Path(str(trainer.state.best_model_checkpoint))
    assert best.name == "checkpoint-2"
    here = tiny.weights(trainer.model)
    assert tiny.same(here, tiny.stored(best / "model.safetensors"))
    assert not tiny.same(here, tiny.stored(tmp_path / "global.safetensors"))


class StopsAfterUs(TrainerCallback):
    """Stops the training in one event, behind the callback under test."""

    def __init__(self, event: str, step: int) -> None:
        def stop(args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_training_stop or (
                state.global_step >= step
            )

        setattr(self, event, stop)


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_evaluate", "on_log"])
@pytest.mark.parametrize("logging_steps", [1, 100])
def test_a_training_stopped_behind_our_back_ends_with_the_global_model(
    tmp_path: Path, event: str, logging_steps: int
) -> None:
    with running_syncer(sync_every=4, fragments=2, config=exporting(tmp_path)) as syncer:
        trainer = tiny.trainer_of(
            tmp_path,
            20,
            [DiLoCoCallback(syncer.address), StopsAfterUs(event, 3)],
            train=tiny.rows(10),
            evaluate=tiny.rows(2),
            eval_strategy="epoch",
            logging_steps=logging_steps,
        )
        trainer.train()
    assert trainer.state.global_step < 20 or event == "on_log"
    assert tiny.same(tiny.weights(trainer.model), tiny.stored(tmp_path / "global.safetensors"))


class Chatty(Trainer):
    """Logs in the middle of a forward pass, as trainers of TRL do."""

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, *more, **named)
        self.log({"chat": 1.0})
        return loss


def test_a_log_in_the_middle_of_the_last_step_breaks_no_graph(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, config=exporting(tmp_path)) as syncer:
        callbacks = [StopsAfterUs("on_step_begin", 3), DiLoCoCallback(syncer.address)]
        trainer = tiny.trainer_of(tmp_path, 9, callbacks, kind=Chatty)
        trainer.train()
    assert trainer.state.global_step == 4
    assert tiny.same(tiny.weights(trainer.model), tiny.stored(tmp_path / "global.safetensors"))


def test_early_stopping_leaves_the_best_model_in_place(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2) as syncer:
        callback = DiLoCoCallback(syncer.address)
        trainer = tiny.trainer_of(
            tmp_path,
            20,
            [callback, EarlyStoppingCallback(1)],
            evaluate=tiny.rows(4, seed=9),
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,
        )
        trainer.train()
        assert trainer.state.global_step == 4
        best = Path(str(trainer.state.best_model_checkpoint)) / "model.safetensors"
        assert tiny.same(tiny.weights(trainer.model), tiny.stored(best))
        assert callback.learner is not None
        assert not callback.learner.alive
        assert syncer.status()["fates"]["merged"] >= 1


class EndsEpochs(TrainerCallback):
    """Ends every epoch after its first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = True


def test_epochs_that_end_before_max_steps_lose_nothing(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, config=exporting(tmp_path)) as syncer:
        callbacks = [DiLoCoCallback(syncer.address), EndsEpochs()]
        trainer = tiny.trainer_of(tmp_path, -1, callbacks, num_train_epochs=3)
        trainer.train()
    # Nobody ever said that the training stops.
    assert trainer.state.global_step == 3
    assert not trainer.control.should_training_stop
    assert tiny.same(tiny.weights(trainer.model), tiny.stored(tmp_path / "global.safetensors"))


def test_the_end_of_the_run_ends_the_training_and_saves(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, config={"steps": 12}) as syncer:
        callback = DiLoCoCallback(syncer.address)
        trainer = tiny.trainer_of(
            tmp_path, 4000, [callback], save_strategy="steps", save_steps=10_000
        )
        trainer.train()
    step = trainer.state.global_step
    assert 12 <= step < 4000
    saved = tiny.stored(tmp_path / f"checkpoint-{step}" / "model.safetensors")
    assert tiny.same(tiny.weights(trainer.model), saved)


def test_numbers_are_in_the_log_history_and_in_the_result(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2) as syncer:
        trainer = tiny.trainer_of(
            tmp_path,
            4,
            [DiLoCoCallback(syncer.address)],
            evaluate=tiny.rows(2),
            eval_strategy="steps",
            eval_steps=2,
        )
        result = trainer.train()
    steps = [e["diloco/steps"] for e in trainer.state.log_history if "loss" in e]
    assert steps == [1, 2, 3, 4]
    assert result.metrics["diloco/tokens"] == 4 * tiny.TOKENS
    evaluations = [e for e in trainer.state.log_history if "eval_loss" in e]
    assert evaluations
    assert not any(key.startswith("diloco/") for e in evaluations for key in e)


class Reporter(TrainerCallback):
    """Sees what W&B would see."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def test_installed_in_front_its_numbers_reach_reporters(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2, config=exporting(tmp_path)) as syncer:
        reporter = Reporter()
        trainer = tiny.trainer_of(tmp_path, 3, [reporter])
        callback = DiLoCoCallback(syncer.address).install(trainer)
        assert callback.install(trainer) is callback
        assert trainer.callback_handler.callbacks.count(callback) == 1
        assert trainer.callback_handler.callbacks.index(callback) == 1
        trainer.train()
    assert [logs["diloco/steps"] for logs in reporter.logs if "loss" in logs] == [1, 2, 3]
    assert tiny.same(tiny.weights(trainer.model), tiny.stored(tmp_path / "global.safetensors"))


def test_two_learners_that_draw_the_same_batches_are_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="diloco")

    class Joined(TrainerCallback):
        """Lets a second learner with the same default seed train while the first one does."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                other = DiLoCoCallback(syncer.address, name="other")
                tiny.trainer_of(tmp_path / "other", 1, [other]).train()

    with running_syncer(sync_every=4, fragments=2) as syncer:
        tiny.trainer_of(tmp_path, 2, [DiLoCoCallback(syncer.address, name="one"), Joined()]).train()
        assert "seed" in caplog.text
        caplog.clear()
        one = DiLoCoCallback(syncer.address, name="three", data_seed=7)
        tiny.trainer_of(tmp_path, 2, [one, Joined()]).train()
        assert "seed" not in caplog.text


def test_without_a_syncer_training_is_refused_or_goes_on_alone(tmp_path: Path) -> None:
    nowhere = "tcp://127.0.0.1:9"
    trainer = tiny.trainer_of(tmp_path, 2, [DiLoCoCallback(nowhere, connect_timeout=0.2)])
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9"):
        trainer.train()
    alone = DiLoCoCallback(nowhere, require_syncer=False, close_timeout=0.1)
    trainer = tiny.trainer_of(tmp_path, 2, [alone])
    trainer.train()
    assert trainer.state.global_step == 2


def test_another_model_is_refused_at_the_door(tmp_path: Path) -> None:
    with running_syncer(sync_every=4, fragments=2) as syncer:
        tiny.trainer_of(tmp_path, 2, [DiLoCoCallback(syncer.address)]).train()
        other = tiny.tiny_model(n_embd=24)
        trainer = tiny.trainer_of(tmp_path, 2, [DiLoCoCallback(syncer.address)], model=other)
        with pytest.raises(RefusedError) as refusal:
            trainer.train()
    assert refusal.value.code == "layout"

"""`Trainer.fit` as a learner: what is applied, what is left behind, and when nothing happens."""

from __future__ import annotations

import csv
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from diloco_lightning import DiLoCoCallback
from litmodels import (
    EVERY_STEP,
    QUIET,
    Regression,
    Spy,
    batches,
    same,
    trainer,
    weights,
)
from torch import Tensor, nn

import diloco_plugin
from diloco_plugin.errors import UnreachableError, UnsupportedError
from tests.syncers import global_model, running_syncer
from tests.waiting import until

NOBODY = "tcp://127.0.0.1:9"


def io_threads() -> int:
    return sum(thread.name == "diloco-io" for thread in threading.enumerate())


def members(syncer: Any) -> list[str]:
    return [learner["name"] for learner in syncer.status()["learners"]]


# ---- from the first step to the last ----


def test_a_fit_ends_with_the_global_model_in_the_module() -> None:
    model = Regression()
    with running_syncer() as syncer:
        trainer(DiLoCoCallback(syncer.address)).fit(model, batches())
        assert same(weights(model), global_model(syncer))
    assert io_threads() == 0


def test_the_progress_after_the_last_round_is_given_too() -> None:
    # 8 steps, rounds every 100: without a closing round nothing would ever have been sent.
    model = Regression()
    start = weights(model)
    with running_syncer(sync_every=100, fragments=2) as syncer:
        trainer(DiLoCoCallback(syncer.address)).fit(model, batches())
        assert not same(start, global_model(syncer))
        assert same(weights(model), global_model(syncer))


def test_learners_from_different_seeds_hold_the_same_model_before_their_first_step() -> None:
    seen: list[dict[str, Tensor]] = []

    class Recording(Regression):
        def on_train_start(self) -> None:
            seen.append(weights(self))

    with running_syncer(sync_every=100, fragments=2) as syncer:
        for seed in (1, 2):
            torch.manual_seed(seed)
            callback = DiLoCoCallback(syncer.address, name=f"seed-{seed}")
            trainer(callback, max_steps=1).fit(Recording(lr=0.0), batches())
    assert same(seen[0], seen[1])


def test_everybody_after_the_callback_sees_merged_weights_wherever_it_was_in_the_list() -> None:
    with running_syncer(**EVERY_STEP) as syncer:
        seen: list[bool] = []
        spy = Spy(lambda t, m: seen.append(same(weights(m), global_model(syncer))))
        trainer(spy, DiLoCoCallback(syncer.address)).fit(Regression(), batches(4))
    assert seen == [True] * 4


def test_a_merge_is_a_real_outer_step() -> None:
    # Outer SGD with lr 0.5 keeps half of every inner step.
    torch.manual_seed(0)
    joined, alone = Regression(), Regression()
    alone.load_state_dict(joined.state_dict())
    start = weights(joined)
    with running_syncer(**EVERY_STEP) as syncer:
        seen: list[dict[str, Tensor]] = []
        spy = Spy(lambda t, m: seen.append(weights(m)))
        trainer(DiLoCoCallback(syncer.address), spy).fit(joined, batches(1))
    trainer().fit(alone, batches(1))
    for name, merged in seen[0].items():
        torch.testing.assert_close(merged, (start[name] + weights(alone)[name]) / 2)


def test_the_trainer_stops_when_the_run_is_complete() -> None:
    with running_syncer(config={"steps": 5}, **EVERY_STEP) as syncer:
        callback = DiLoCoCallback(syncer.address)
        t = trainer(callback, max_epochs=1000)
        t.fit(Regression(), batches())
    assert t.should_stop
    assert 5 <= t.global_step < 50


# ---- where nothing may happen ----


def test_validation_test_and_prediction_never_connect() -> None:
    t, model = trainer(DiLoCoCallback(NOBODY)), Regression()
    t.validate(model, batches(2), verbose=False)
    t.test(model, batches(2), verbose=False)
    t.predict(model, batches(2))
    assert io_threads() == 0


def test_fast_dev_run_never_connects_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diloco.lightning"):
        trainer(DiLoCoCallback(NOBODY), fast_dev_run=3).fit(Regression(), batches())
    said = [record.message for record in caplog.records if record.name.startswith("diloco")]
    assert said == [f"fast_dev_run: this training does not join {NOBODY}."]


def test_the_sanity_check_comes_before_the_learner() -> None:
    joined: dict[bool, bool] = {}

    class Checked(Regression):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            joined[self.trainer.sanity_checking] = callback.learner is not None

    with running_syncer() as syncer:
        callback = DiLoCoCallback(syncer.address)
        trainer(callback).fit(Checked(), batches(), batches(2))
    assert joined == {True: False, False: True}


@pytest.mark.parametrize("finder", ["lr", "batch_size"])
def test_the_tuner_sends_nothing(finder: str, tmp_path: Any) -> None:
    class Sized(Regression):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return batches(8, self.batch_size)

        val_dataloader = train_dataloader

    tuner = {
        "lr": lambda: pl.callbacks.LearningRateFinder(num_training_steps=10),
        "batch_size": lambda: pl.callbacks.BatchSizeFinder(max_trials=2, steps_per_trial=2),
    }[finder]()
    with running_syncer(**EVERY_STEP) as syncer:
        callback = DiLoCoCallback(syncer.address)
        t = trainer(tuner, callback, default_root_dir=tmp_path)
        t.fit(Sized())
        assert callback.state_dict()["steps"] == t.global_step == 8
        assert syncer.status()["clock"] == 8


# ---- the end, in other ways ----


def test_an_exception_leaves_at_once_and_is_not_hidden() -> None:
    class Failing(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            if batch_idx == 3:
                raise ZeroDivisionError("of the user")
            return super().training_step(batch, batch_idx)

    with running_syncer() as syncer:
        with pytest.raises(ZeroDivisionError, match="of the user"):
            trainer(DiLoCoCallback(syncer.address)).fit(Failing(), batches())
        assert io_threads() == 0
        until(lambda: not members(syncer), 5, "the learner left")


def test_without_a_syncer_fit_says_so_soon() -> None:
    with pytest.raises(UnreachableError, match="no syncer answered"):
        trainer(DiLoCoCallback(NOBODY, connect_timeout=0.2)).fit(Regression(), batches())
    assert io_threads() == 0


def test_without_a_syncer_a_learner_may_train_alone() -> None:
    callback = DiLoCoCallback(NOBODY, require_syncer=False, close_timeout=0.1)
    model = Regression()
    start = weights(model)
    trainer(callback).fit(model, batches())
    assert not same(start, weights(model))


# ---- names ----


def test_one_submodule_shares_a_run_with_a_loop_that_knows_only_that() -> None:
    class Wrapped(pl.LightningModule):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.model = inner
            self.head = nn.Linear(1, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.head(self.model(batch)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    plain, inner = nn.Linear(8, 1), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with (
        running_syncer() as syncer,
        diloco_plugin.attach(plain, optimizer, syncer.address, name="plain"),
    ):
        plain(torch.ones(2, 8)).mean().backward()
        optimizer.step()
        trainer(DiLoCoCallback(syncer.address, module="model")).fit(Wrapped(inner), batches())
        assert global_model(syncer).keys() == {"weight", "bias"}
        assert same(weights(inner), global_model(syncer))


@pytest.mark.parametrize("where", ["outside", "configure_model"])
def test_a_compiled_module_keeps_its_names_and_sees_merges(where: str) -> None:
    class Compiling(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch).square().mean()  # dynamo chokes on self.log

        def configure_model(self) -> None:
            if where == "configure_model":
                self.net.compile(backend="eager")
                self.extra = torch.compile(self.net[0], backend="eager")
                self.net[0] = self.extra

    model: Any = Compiling()
    names = set(weights(model))
    fitted = torch.compile(model, backend="eager") if where == "outside" else model
    with running_syncer(**EVERY_STEP) as syncer:
        trainer(DiLoCoCallback(syncer.address)).fit(fitted, batches(4))
        found = global_model(syncer)
    assert {name.replace("extra.", "net.0.") for name in found} == names
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, found[name.replace("_orig_mod.", "")])


def test_a_trainer_and_a_plain_loop_train_one_model_statistics_of_batch_norm_included() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))

    def plain_loop(address: str) -> nn.Module:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with diloco_plugin.attach(model, optimizer, address, name="plain") as learner:
            model.train()
            for batch in batches():
                optimizer.zero_grad()
                model(batch + 5.0).square().mean().backward()  # other data: other statistics
                optimizer.step()
            assert learner.connected
        return model

    model = Regression(net=net())
    both = {**EVERY_STEP, "learners": 2}
    with running_syncer(**both) as syncer, ThreadPoolExecutor() as pool:
        other = pool.submit(plain_loop, syncer.address)
        trainer(DiLoCoCallback(syncer.address, module="net")).fit(model, batches())
        twin, found = other.result(30), global_model(syncer)
    for name, tensor in found.items():
        assert torch.equal(model.net.state_dict()[name], tensor), name
        assert torch.equal(twin.state_dict()[name], tensor), name
    # Momentum 0.1 over 8 steps reaches 0.57 of the way: about half of that of the other one's 5.
    assert 1.0 < float(found["0.running_mean"].mean()) < 2.0
    assert model.net[0].num_batches_tracked == 8


def test_tied_weights_go_once_and_stay_tied() -> None:
    class Tied(Regression):
        def __init__(self) -> None:
            super().__init__(net=nn.Linear(8, 8))
            self.head = nn.Linear(8, 8)
            self.head.weight = self.net.weight

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.head(self.net(batch)).square().mean()

    model = Tied()
    with running_syncer(**EVERY_STEP) as syncer:
        trainer(DiLoCoCallback(syncer.address)).fit(model, batches())
        assert same(weights(model), global_model(syncer))
    assert model.head.weight is model.net.weight


# ---- refusals ----


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"])
def test_strategies_whose_ranks_hold_no_whole_weights_are_refused_with_the_reason(
    name: str,
) -> None:
    strategy = type(name, (pl.strategies.SingleDeviceStrategy,), {})()
    with pytest.raises(UnsupportedError, match=f"{name} cannot be synced: .* strategy='diloco"):
        trainer(DiLoCoCallback(NOBODY), strategy=strategy).fit(Regression(), batches())


def test_an_optimizer_with_master_weights_is_refused_before_anything_connects() -> None:
    class Mastered(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.master_weights = [torch.zeros(1)]
            return optimizer

    with pytest.raises(UnsupportedError, match="master_weights"):
        trainer(DiLoCoCallback(NOBODY)).fit(Mastered(), batches())
    assert io_threads() == 0


# ---- reports ----


def logged(tmp_path: Any) -> list[dict[str, str]]:
    with open(tmp_path / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_reach_the_users_logger_as_often_as_it_logs(tmp_path: Any) -> None:
    logger = pl.loggers.CSVLogger(tmp_path, name="", version="")
    with running_syncer(**EVERY_STEP) as syncer:
        trainer(DiLoCoCallback(syncer.address), logger=logger, log_every_n_steps=2).fit(
            Regression(), batches()
        )
    rows = logged(tmp_path)
    assert [float(row["diloco/steps"]) for row in rows] == [2, 4, 6, 8]
    assert all(float(row["diloco/connected"]) == 1 for row in rows)


def test_metrics_can_be_switched_off(tmp_path: Any) -> None:
    logger = pl.loggers.CSVLogger(tmp_path, name="", version="")
    with running_syncer(**EVERY_STEP) as syncer:
        callback = DiLoCoCallback(syncer.address, log_metrics=False)
        trainer(callback, logger=logger, log_every_n_steps=2).fit(Regression(), batches())
    assert not any(key.startswith("diloco") for key in logged(tmp_path)[0])


def test_the_seed_of_seed_everything_is_told_to_the_syncer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"PL_GLOBAL_SEED": "11"})
    assert DiLoCoCallback(NOBODY)._seed() == 11
    assert DiLoCoCallback(NOBODY, data_seed=3)._seed() == 3


def test_a_trainer_of_the_other_class_tree_takes_the_callback() -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Twin(other.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    model = Twin()
    with running_syncer(**EVERY_STEP) as syncer:
        callback = DiLoCoCallback(syncer.address)
        other.Trainer(callbacks=[callback], max_epochs=1, **QUIET).fit(model, batches())
        assert same(weights(model), global_model(syncer))
    assert callback.state_dict()["steps"] == 8

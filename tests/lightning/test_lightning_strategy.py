"""The strategies: a device strategy of Lightning with the callback in front, and nothing else."""

from __future__ import annotations

import copy
import inspect
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import diloco_lightning
import lightning.pytorch as pl
import pytest
import torch
from diloco_lightning import DiLoCoCallback, DiLoCoDDPStrategy, DiLoCoStrategy
from diloco_lightning.strategy import DiLoCoMixin
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from litmodels import EVERY_STEP, QUIET, Regression, batches, same, trainer, weights

from tests.keyring import Keyring
from tests.syncers import global_model, running_syncer

ADDRESS = "tcp://127.0.0.1:9"


def test_the_strategy_alone_makes_a_fit_a_learner() -> None:
    model = Regression()
    with running_syncer(**EVERY_STEP) as syncer:
        strategy = DiLoCoStrategy(syncer.address)
        trainer(strategy=strategy).fit(model, batches())
        assert same(weights(model), global_model(syncer))
    assert strategy.callback.state_dict()["steps"] == 8


def test_the_name_is_enough_with_the_address_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Regression()
    with running_syncer(**EVERY_STEP) as syncer:
        monkeypatch.setenv("DILOCO_SYNCER", syncer.address)
        trainer(strategy="diloco").fit(model, batches())
        assert same(weights(model), global_model(syncer))


def test_a_fit_with_keys_joins_a_syncer_that_lets_in_known_keys_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_NAME", "berlin")
    ring = Keyring(tmp_path)
    keys = str(ring.learner("berlin"))
    model = Regression()
    with running_syncer(config={"keys": str(ring.syncer)}, **EVERY_STEP) as syncer:
        strategy = DiLoCoStrategy(syncer.address, keys=keys)
        trainer(strategy=strategy).fit(model, batches())
        assert same(weights(model), global_model(syncer))
    assert strategy.callback.state_dict()["name"] == "berlin"


def test_both_names_are_registered_and_may_be_registered_again() -> None:
    diloco_lightning.register()
    assert StrategyRegistry["diloco"]["strategy"] is DiLoCoStrategy
    assert StrategyRegistry["diloco_ddp"]["strategy"] is DiLoCoDDPStrategy


def callbacks_after_fit(t: pl.Trainer, model: pl.LightningModule) -> list[Any]:
    t.fit(model, batches(1))
    return t.callbacks


def test_the_callback_is_injected_once_and_first_however_often_fit_is_called() -> None:
    class WithCallbacks(Regression):
        def configure_callbacks(self) -> Any:
            return [pl.callbacks.Timer()]

    with running_syncer() as syncer:
        strategy = DiLoCoStrategy(syncer.address)
        t = trainer(pl.callbacks.Timer(), strategy=strategy)
        for _ in range(2):
            found = callbacks_after_fit(t, WithCallbacks())
            assert found[0] is strategy.callback
            assert sum(isinstance(callback, DiLoCoCallback) for callback in found) == 1


def test_a_callback_that_the_user_gave_is_not_doubled() -> None:
    with running_syncer() as syncer:
        mine = DiLoCoCallback(syncer.address)
        t = trainer(pl.callbacks.Timer(), mine, strategy=DiLoCoStrategy(ADDRESS))
        found = callbacks_after_fit(t, Regression())
    assert [c for c in found if isinstance(c, DiLoCoCallback)] == [mine]
    assert found[0] is mine


@pytest.mark.parametrize("given", [torch.device("cuda", 1), torch.device("mps")])
def test_the_device_is_the_accelerators(given: torch.device) -> None:
    strategy = DiLoCoStrategy(ADDRESS)
    assert strategy.parallel_devices is None
    strategy.parallel_devices = [given]
    assert strategy.root_device == given


def test_a_device_that_was_asked_for_stays() -> None:
    strategy = DiLoCoStrategy(ADDRESS, device="cuda:1")
    strategy.parallel_devices = [torch.device("cuda", 0)]
    assert strategy.root_device == torch.device("cuda", 1)


def test_several_devices_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(MisconfigurationException, match=r"devices=1, or .* strategy='diloco_ddp'"):
        trainer(strategy=DiLoCoStrategy(ADDRESS), devices=2)


@pytest.mark.parametrize("cls", [DiLoCoStrategy, DiLoCoDDPStrategy])
def test_a_strategy_survives_spawn_and_hides_no_signature(cls: Any) -> None:
    strategy = cls(ADDRESS, module="net", connect_timeout=3.0)
    assert ForkingPickler.dumps(strategy)  # what spawn does
    twin = copy.deepcopy(strategy)
    assert (twin.callback.syncer, twin.callback.module) == (ADDRESS, "net")
    assert cls.__new__ is object.__new__


def test_strategy_and_callback_take_the_same_arguments() -> None:
    mixin = dict(inspect.signature(DiLoCoMixin.__init__).parameters)
    del mixin["kwargs"]
    assert mixin == dict(inspect.signature(DiLoCoCallback.__init__).parameters)


# ---- the command line ----


@pytest.fixture(autouse=True)
def _no_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])


def cli(*arguments: str) -> Any:
    given = [f"--trainer.{key}={str(value).lower()}" for key, value in QUIET.items()]
    return LightningCLI(Regression, args=[*given, *arguments], run=False, save_config_callback=None)


def test_a_yaml_file_configures_the_strategy_and_what_is_beneath_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        """
trainer:
  strategy:
    class_path: diloco_lightning.DiLoCoDDPStrategy
    init_args:
      syncer: tcp://10.0.0.1:5555
      module: net
      close_timeout: 5
      find_unused_parameters: true
      process_group_backend: gloo
"""
    )
    strategy = cli(f"--config={tmp_path / 'config.yaml'}").trainer.strategy
    assert isinstance(strategy, DiLoCoDDPStrategy)
    assert strategy.callback.syncer == "tcp://10.0.0.1:5555"
    assert strategy.callback.module == "net"
    assert strategy.callback.close_timeout == 5
    assert strategy.process_group_backend == "gloo"


def test_a_yaml_file_with_nothing_but_the_name_trains_as_a_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("trainer:\n  strategy: diloco\n  max_epochs: 1\n")
    with running_syncer(**EVERY_STEP) as syncer:
        monkeypatch.setenv("DILOCO_SYNCER", syncer.address)
        made = cli(f"--config={tmp_path / 'config.yaml'}")
        made.trainer.fit(made.model, batches())
        assert same(weights(made.model), global_model(syncer))
    assert made.trainer.strategy.callback.state_dict()["steps"] == 8


def test_flags_configure_it_as_well_and_the_name_will_do() -> None:
    strategy = cli(
        "--trainer.strategy=diloco_lightning.DiLoCoStrategy",
        "--trainer.strategy.syncer=tcp://10.0.0.1:5555",
        "--trainer.strategy.require_syncer=false",
    ).trainer.strategy
    assert strategy.callback.syncer == "tcp://10.0.0.1:5555"
    assert strategy.callback.require_syncer is False
    assert isinstance(cli("--trainer.strategy=diloco").trainer.strategy, DiLoCoStrategy)


def test_the_callback_can_be_configured_beside_any_strategy() -> None:
    t = cli(
        "--trainer.callbacks+=diloco_lightning.DiLoCoCallback",
        "--trainer.callbacks.syncer=tcp://10.0.0.1:5555",
    ).trainer
    (callback,) = [c for c in t.callbacks if isinstance(c, DiLoCoCallback)]
    assert callback.syncer == "tcp://10.0.0.1:5555"


def test_a_misspelt_key_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--trainer.strategy=diloco_lightning.DiLoCoStrategy", "--trainer.strategy.synser=x")
    assert "synser" in capsys.readouterr().err

"""`DiLoCoStrategy` and `DiLoCoDDPStrategy`: a strategy of Lightning, and `DiLoCoCallback` with it.

Static classes, not a wrapper around any strategy: Lightning asks isinstance in some twenty places,
and its command line reads the signature of `__init__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from diloco_lightning.callback import DiLoCoCallback


class DiLoCoMixin:
    """Puts a `DiLoCoCallback` in front of the Trainer's callbacks, if there is none.

    Made from the strategy's arguments, available as `callback`. See `DiLoCoStrategy`.
    """

    def __init__(
        self,
        syncer: str | None = None,
        *,
        name: str | None = None,
        keys: str | None = None,
        run: str = "",
        module: str | None = None,
        tokens: Callable[[Any], int] | None = None,
        require_syncer: bool = True,
        connect_timeout: float = 60.0,
        close_timeout: float | None = None,
        data_seed: int | None = None,
        state: str = "peer",
        log_metrics: bool = True,
        **kwargs: Any,
    ) -> None:
        """Connects to nothing: training does, when it starts.

        Args:
            syncer: `tcp://host:port` of the syncer; default: the environment variable
                `DILOCO_SYNCER`.
            name: of this learner; a learner that returns under its name finds its place again.
                Default: the environment variable `DILOCO_NAME`, else host name and process id.
            keys: folder of keys (`diloco keygen`), or "insecure-plaintext"; default: the
                environment variable `DILOCO_KEYS`, else `~/.config/diloco`.
            run: refuse to join any other run than this one.
            module: sync only this submodule, under names relative to it.
            tokens: units of work in a batch; default: ones in `attention_mask`, else size of
                `input_ids`, else samples.
            require_syncer: False trains alone until the syncer appears.
            connect_timeout: seconds to wait for the syncer and its model.
            close_timeout: seconds that leaving waits while nothing moves; default: what the syncer
                says (30).
            data_seed: seed of the data order; the syncer warns when two learners have the same.
            state: where the state of the optimizers comes from when this learner joins: "peer",
                from the learner that is furthest, or "fresh".
            log_metrics: log numbers named `diloco/...` to the Trainer's loggers.
            **kwargs: what the strategy beneath takes.
        """
        super().__init__(**kwargs)
        self.callback = DiLoCoCallback(
            syncer,
            name=name,
            keys=keys,
            run=run,
            module=module,
            tokens=tokens,
            require_syncer=require_syncer,
            connect_timeout=connect_timeout,
            close_timeout=close_timeout,
            data_seed=data_seed,
            state=state,
            log_metrics=log_metrics,
        )

    def connect(self, model: LightningModule) -> None:
        """Inject the callback, before the model's own callbacks and before any restore."""
        callbacks = model.trainer.callbacks
        if not any(isinstance(callback, DiLoCoCallback) for callback in callbacks):
            callbacks.insert(0, self.callback)
        super().connect(model)  # type: ignore[misc]


class DiLoCoStrategy(DiLoCoMixin, SingleDeviceStrategy):  # type: ignore[misc]
    """Trains on one device, as a learner of a run. The Trainer's `accelerator` says on which.

    `Trainer(strategy=DiLoCoStrategy("tcp://syncer:5555"))`, or `strategy="diloco"` with the address
    in `DILOCO_SYNCER`. All behavior is that of `DiLoCoCallback`.
    """

    strategy_name = "diloco"
    _root_device: torch.device

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """Always None, so that the Trainer sets it: else a strategy object stays on the CPU."""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise MisconfigurationException(
                f"DiLoCoStrategy trains on one device, but the Trainer has {len(devices)}. Set"
                " devices=1, or make them one learner with strategy='diloco_ddp'; any other"
                " strategy takes callbacks=[DiLoCoCallback(...)]."
            )
        if devices and self._root_device.type == "cpu":  # a device that was asked for stays
            self._root_device = torch.device(devices[0])


class DiLoCoDDPStrategy(DiLoCoMixin, DDPStrategy):  # type: ignore[misc]
    """Trains on several devices with DDP, which together are one learner of a run.

    Rank 0 speaks to the syncer; all ranks apply a merge after the same step. Takes what
    `DDPStrategy` takes. See `DiLoCoStrategy`.
    """

    strategy_name = "diloco_ddp"


def register() -> None:
    """Make `Trainer(strategy="diloco")` and `"diloco_ddp"` known. Harmless when repeated."""
    for strategy, description in (
        (DiLoCoStrategy, "One device, as a learner of a DiLoCo run"),
        (DiLoCoDDPStrategy, "Several devices with DDP, as one learner of a DiLoCo run"),
    ):
        StrategyRegistry.register(
            strategy.strategy_name, strategy, description=description, override=True
        )

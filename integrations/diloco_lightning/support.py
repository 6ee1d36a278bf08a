"""What of Lightning can be synced, and what cannot: questions by name, for both class trees.

`lightning.pytorch` and `pytorch_lightning` are disjoint: isinstance with one says nothing about the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco_plugin.errors import UnsupportedError

_SHARDED = (
    "its ranks hold shards of a parameter, and only whole tensors are synced so far. Use"
    " strategy='diloco' on one device or 'diloco_ddp' on several"
)
_XLA = "writing into parameters between steps is not tested on XLA devices. Use CPU or GPU"
_REFUSED = {
    "DeepSpeedStrategy": "DeepSpeed's engine steps for each micro-batch, and its own fp32 copy of"
    " the weights undoes a merge. Use strategy='diloco_ddp'",
    "FSDPStrategy": _SHARDED,
    "ModelParallelStrategy": _SHARDED,
    "XLAStrategy": _XLA,
    "XLAFSDPStrategy": _SHARDED,
    "SingleDeviceXLAStrategy": _XLA,
}


def refuse_strategy(strategy: Any) -> None:
    """Refuse strategies under which a merge is wrong or impossible.

    Raises:
        UnsupportedError: the strategy and the reason.
    """
    for base in type(strategy).__mro__:
        reason = _REFUSED.get(base.__name__)
        if reason is not None:
            raise UnsupportedError(f"{type(strategy).__name__} cannot be synced: {reason}.")


def steppable(optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers that can step: Lightning puts a mock in the place of none at all."""
    return [o for o in optimizers if type(o).__name__ != "_MockOptimizer"]


def averages_from_here(trainer: Any) -> bool:
    """Whether stochastic weight averaging is about to swap its average into the model.

    With BatchNorm it adds an epoch in which the model only collects statistics, though its
    optimizer is still called.
    """
    return any(
        getattr(callback, "swa_end", None) == trainer.current_epoch - 1
        and any(base.__name__ == "StochasticWeightAveraging" for base in type(callback).__mro__)
        for callback in trainer.callbacks
    )

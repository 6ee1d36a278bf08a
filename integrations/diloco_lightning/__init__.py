"""Lightning trainers as learners: a strategy, or a callback beside any other strategy.

    trainer = L.Trainer(strategy=DiLoCoStrategy("tcp://syncer:5555"), ...)

Importing this package also makes the names `strategy="diloco"` and `"diloco_ddp"` known.
"""

from __future__ import annotations

from diloco_lightning.callback import DiLoCoCallback
from diloco_lightning.strategy import DiLoCoDDPStrategy, DiLoCoStrategy, register

register()

__all__ = ["DiLoCoCallback", "DiLoCoDDPStrategy", "DiLoCoStrategy"]

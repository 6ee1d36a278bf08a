"""Tiny models and Trainers for the tests of the Lightning adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
#: Every step is a whole round of the whole model, applied at once: nothing is left to timing.
EVERY_STEP: dict[str, Any] = {
    "lockstep": True,
    "learners": 1,
    "sync_every": 1,
    "fragments": 1,
    "overlap": 0,
    "outer_lr": 0.5,
    "outer_momentum": 0.0,
    "outer_nesterov": False,
}


class Regression(pl.LightningModule):
    """Eight numbers in, their sum out."""

    def __init__(self, lr: float = 0.05, net: nn.Module | None = None) -> None:
        super().__init__()
        self.lr = lr
        self.net = net or nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = (self(batch).squeeze(-1) - batch.sum(-1)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self(batch).mean())

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def batches(count: int = 8, size: int = 4) -> DataLoader[Tensor]:
    data = torch.randn(count * size, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(list(data), batch_size=size)


def trainer(*callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    return pl.Trainer(callbacks=list(callbacks), **({"max_epochs": 1} | QUIET | kwargs))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Spy(pl.Callback):
    """Calls `at_batch_end(trainer, module)` after every batch."""

    def __init__(self, at_batch_end: Callable[[pl.Trainer, pl.LightningModule], None]) -> None:
        self._at_batch_end = at_batch_end

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._at_batch_end(trainer, pl_module)

"""What counts as a step and as a token, whatever a Trainer's own counter says."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from diloco_lightning import DiLoCoCallback
from lightning.pytorch.plugins import MixedPrecision
from litmodels import EVERY_STEP, Regression, batches, same, trainer, weights
from torch import Tensor, nn

from tests.syncers import global_model, running_syncer


def steps_of(
    model: pl.LightningModule, count: int = 8, **kwargs: Any
) -> tuple[dict[str, Any], pl.Trainer]:
    """Fit with a whole round at each step; what the callback counted."""
    with running_syncer(**EVERY_STEP) as syncer:
        callback = DiLoCoCallback(syncer.address)
        t = trainer(callback, **kwargs)
        t.fit(model, batches(count))
        assert same(weights(model), {k: global_model(syncer)[k] for k in weights(model)})
        assert syncer.status()["clock"] == callback.state_dict()["steps"]
        return callback.state_dict(), t


def test_one_step_a_batch_and_one_token_a_sample() -> None:
    state, _ = steps_of(Regression())
    assert (state["steps"], state["tokens"]) == (8, 32)


def test_accumulated_batches_are_one_step_and_a_ragged_epoch_steps_too() -> None:
    state, _ = steps_of(Regression(), accumulate_grad_batches=3, max_epochs=2)
    assert (state["steps"], state["tokens"]) == (6, 64)


def test_training_step_may_return_none() -> None:
    class Picky(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    state, _ = steps_of(Picky())
    assert state["steps"] == 8  # torch's optimizers step without gradients: a step of nothing


def test_lbfgs_steps_once_however_often_it_evaluates() -> None:
    class Quasi(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=5)

    state, _ = steps_of(Quasi())
    assert state["steps"] == 8


class Gan(Regression):
    """Two optimizers by hand, and the graph of D's loss is alive while G steps."""

    raw = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        g, d = self.optimizers(use_pl_optimizer=not self.raw)  # type: ignore[misc]
        fake = self.net(batch) * batch
        d_loss = self.critic(fake.detach()).mean() - self.critic(batch).mean()
        g_loss = -self.critic(fake).mean() + 0.0 * fake.square().mean()
        g.zero_grad()
        d.zero_grad()
        gradients = torch.autograd.grad(g_loss, list(self.net.parameters()))
        for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        g.step()
        if batch_idx % 2 == 0:
            self.manual_backward(d_loss)
            d.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net.parameters(), lr=0.01),
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
        ]


@pytest.mark.parametrize("raw", [False, True])
def test_two_optimizers_make_one_step_a_batch_and_no_graph_is_torn(raw: bool) -> None:
    model = Gan()
    model.raw = raw
    state, t = steps_of(model)
    assert state["steps"] == 8
    assert t.global_step == (0 if raw else 12)


def test_optimizers_that_lightning_never_sees_count_too() -> None:
    class Own(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.mine = torch.optim.SGD(self.parameters(), lr=0.05)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.mine.zero_grad()
            (self(batch).squeeze(-1) - batch.sum(-1)).square().mean().backward()
            self.mine.step()

        def configure_optimizers(self) -> None:
            return None

    state, _ = steps_of(Own())
    assert state["steps"] == 8


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_amp_skips_do_not_count_and_neither_do_their_tokens(fused: bool) -> None:
    class Overflowing(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            assert loss is not None
            return loss * float("inf") if batch_idx in (2, 5) else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=fused)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    state, t = steps_of(Overflowing(), plugins=[precision])
    assert t.global_step == 8
    assert (state["steps"], state["tokens"]) == (6, 24)


def test_an_optimizer_whose_steps_no_hook_sees_is_noticed_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hookless:
        """All that Lightning asks of an optimizer, and nothing of torch's."""

        def __init__(self, parameters: Any) -> None:
            self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 0.01}]
            self.defaults: dict[str, Any] = {}
            self.state: dict[Any, Any] = {}

        def step(self, closure: Any = None) -> Any:
            loss = closure()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter -= 0.01 * parameter.grad
            return loss

        def zero_grad(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = None

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Odd(Regression):
        def configure_optimizers(self) -> Any:
            return Hookless(self.parameters())

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad()

    with caplog.at_level(logging.WARNING, "diloco.learner"):
        state, _ = steps_of(Odd(), count=30)
    assert state["steps"] == 11
    assert sum("no hook of an optimizer" in record.message for record in caplog.records) == 1


def test_the_users_tokens_win_and_masks_count_ones() -> None:
    class Words(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch["input_ids"].float()).mean()

    row = {"input_ids": torch.arange(8), "attention_mask": torch.tensor([1] * 5 + [0] * 3)}
    loader = torch.utils.data.DataLoader([row] * 8, batch_size=2)
    counted = []
    with running_syncer() as syncer:
        for tokens in (None, lambda batch: 7):
            callback = DiLoCoCallback(syncer.address, tokens=tokens)
            trainer(callback).fit(Words(), loader)
            counted.append(callback.state_dict()["tokens"])
    assert counted == [4 * 10, 4 * 7]


def test_a_second_fit_counts_on_and_no_hook_of_the_first_one_is_left() -> None:
    optimizer: list[Any] = []

    class Caching(Regression):
        def configure_optimizers(self) -> Any:
            if not optimizer:
                optimizer.append(super().configure_optimizers())
            return optimizer[0]

    model = Caching()
    with running_syncer(**EVERY_STEP) as syncer:
        callback = DiLoCoCallback(syncer.address)
        t = trainer(callback)
        t.fit(model, batches())
        t.fit_loop.max_epochs = 2
        t.fit(model, batches())
        assert callback.state_dict()["steps"] == 16
        assert same(weights(model), global_model(syncer))
    assert not optimizer[0]._optimizer_step_post_hooks
    assert not optimizer[0]._optimizer_step_pre_hooks

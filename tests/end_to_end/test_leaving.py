"""The end of a learner: what it still has counts once, and it leaves with the global model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import diloco_plugin
from diloco_plugin.syncer.model import GlobalModel
from diloco_plugin.tensors.layout import Layout, views
from diloco_plugin.wire import messages as msg
from tests.end_to_end.fleet import (
    batches,
    run_all,
    sgd,
    small_model,
    train_step,
    train_until,
)
from tests.end_to_end.forged import Forged, one_weight
from tests.syncers import global_model, running_syncer, wait_until_live
from tests.waiting import until

SIZE = 50


def test_who_leaves_after_the_end_of_the_run_is_not_told_that_its_syncer_was_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small_model()
    optimizer = sgd(model)
    values = {"sync_every": 2, "fragments": 1, "overlap": 0, "lease": 1.0, "close_timeout": 0.1}
    with running_syncer(**values, config={"steps": 4}) as syncer:
        learner = diloco_plugin.attach(model, optimizer, syncer.address, name="a")
        train_until(model, optimizer, lambda: syncer._carrier.stopped)
        until(lambda: not learner.connected)
        learner.close()
    assert "without a closing round: the run had ended (the run has reached its last" in caplog.text
    assert "has stopped" not in caplog.text


def test_closing_rounds_move_the_model_by_the_mean_of_what_was_left() -> None:
    """And they leave the momentum alone."""
    lr, mu = 0.7, 0.9
    ones = torch.ones(SIZE)
    with running_syncer(
        sync_every=1, fragments=1, overlap=0, quorum=4, outer_lr=lr, outer_momentum=mu
    ) as syncer:
        team = [Forged(syncer.address, f"learner-{m}", one_weight(SIZE)) for m in range(4)]
        theta, buffer = torch.zeros(SIZE), torch.zeros(SIZE)

        def everybody_pushes(clock: int) -> None:
            for learner in team:
                learner.progress(clock)
            pulls = [learner.pulled() for learner in team]
            for learner, pull in zip(team, pulls, strict=True):
                learner.offer(pull)
                learner.serve("push", 0, pull.round, ones, 0)
            for learner in team:
                assert learner.hear(msg.Fate).fate == "merged"
                learner.fetch(0)

        def outer_step(gradient: Tensor) -> None:
            nonlocal theta, buffer
            buffer = mu * buffer + gradient
            theta = theta - lr * (gradient + mu * buffer)

        try:
            for learner in team:
                learner.join()
                if learner is team[0]:
                    learner.seed([torch.zeros(SIZE)])
                else:
                    learner.take()
            wait_until_live(syncer, 4)
            for clock in (1, 2, 3):
                everybody_pushes(clock)
                outer_step(ones)
            assert torch.allclose(global_model(syncer)["w"], theta, rtol=1e-5)
            # the first one finishes: everybody gives what it has, and that is all that is left
            left = [0.1, 0.2, 0.3, 0.4]
            team[0].say(msg.CloseRequest(epoch=team[0].epoch, fragments=(0,)))
            pulls = [learner.pulled(closing=True) for learner in team]
            for learner, pull, size in zip(team, pulls, left, strict=True):
                learner.offer(pull)
                learner.serve("push", 0, pull.round, size * ones, 0)
            for learner in team:
                assert learner.hear(msg.Fate).fate == "merged"
                learner.fetch(0)
            theta = theta - 0.25 * ones
            assert torch.allclose(global_model(syncer)["w"], theta, rtol=1e-5)
            # the others finish after it, with nothing more to give: nothing moves
            after = global_model(syncer)["w"]
            team.pop(0).__exit__(None, None, None)
            for learner in team[:2]:
                learner.say(msg.CloseRequest(epoch=learner.epoch, fragments=(0,)))
                for other in team:
                    other.offer(other.pulled(closing=True), nothing="no steps")
            everybody_pushes(4)  # a round later shows that the momentum is what it was
            assert not torch.equal(global_model(syncer)["w"], after)
            outer_step(ones)
            assert torch.allclose(global_model(syncer)["w"], theta, rtol=1e-5)
        finally:
            for learner in team:
                learner.close()


class Recorder:
    """Every version of every fragment, and what closing rounds did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.versions: dict[tuple[int, int], Tensor] = {}
        self.closing: list[tuple[float, float]] = []  # how far it moved, what was left at most
        #: of every push: the round it was folded into, its fragment, tokens and steps
        self.pushes: list[tuple[int, int, int, int]] = []
        #: version that a round brought about
        self.became: dict[int, int] = {}
        self._given: dict[int, list[float]] = {}
        encode, fold, merge = GlobalModel._encode, GlobalModel.fold, GlobalModel.merge

        def new_encode(model: GlobalModel, fragment: int, version: int, *, exact: bool) -> None:
            self.versions[fragment, version] = model.theta[fragment].clone()
            encode(model, fragment, version, exact=exact)

        def new_fold(model: GlobalModel, round_: int, *args: Any, **kwargs: Any) -> None:
            self._given.setdefault(round_, []).append(float(args[1].norm()))
            self.pushes.append((round_, args[0], kwargs["tokens"], kwargs["steps"]))
            fold(model, round_, *args, **kwargs)

        def new_merge(
            model: GlobalModel, round_: int, fragment: int, version: int, **kw: Any
        ) -> bool:
            before = model.theta[fragment].clone()
            ok = merge(model, round_, fragment, version, **kw)
            self.became[round_] = version
            if kw["closing"]:
                moved = float((model.theta[fragment] - before).norm())
                self.closing.append((moved, max(self._given.get(round_, [0.0]))))
            return ok

        monkeypatch.setattr(GlobalModel, "_encode", new_encode)
        monkeypatch.setattr(GlobalModel, "fold", new_fold)
        monkeypatch.setattr(GlobalModel, "merge", new_merge)

    def check(self, held: dict[str, Tensor], layout: Layout, unit: int) -> None:
        """What a leaver holds is, of every fragment, one version of the global model to the bit,
        and none from before its own last push: `unit` is what it alone calls a step's tokens.
        """
        for fragment in layout.fragments:
            flat = torch.empty(fragment.elements)
            for slot, view in zip(fragment.slots, views(flat, fragment), strict=True):
                view.copy_(held[slot.spec.name])
            here = [
                version
                for (index, version), theta in self.versions.items()
                if index == fragment.index and torch.equal(flat, theta)
            ]
            assert here, f"fragment {fragment.index} was never like that"
            own = [
                self.became[round_]
                for round_, index, tokens, steps in self.pushes
                if index == fragment.index and tokens == unit * steps
            ]
            assert max(here) >= max(own, default=0), f"fragment {fragment.index} is old"


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_four_learners_that_finish_in_turn_leave_with_the_global_model_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    seen = Recorder(monkeypatch)

    def job(m: int, address: str) -> dict[str, Tensor]:
        model = small_model(0)
        optimizer = sgd(model)
        with diloco_plugin.attach(
            model, optimizer, address, name=f"learner-{m}", tokens=lambda _: 10 + m
        ):
            for batch in batches(m, 40 + 20 * m):
                train_step(model, optimizer, batch)
        return {name: t.detach().clone() for name, t in model.named_parameters()}

    with running_syncer(
        sync_every=8, fragments=2, codec=codec, outer_lr=0.7, outer_momentum=0.9
    ) as syncer:
        left_with = run_all([lambda m=m: job(m, syncer.address) for m in range(4)])
        final = global_model(syncer)
        layout = syncer._merging.the_model.layout
    for moved, given in seen.closing:
        assert moved <= given * (1 + 1e-5)
    for m, held in enumerate(left_with):
        seen.check(held, layout, 10 + m)
    assert any(
        all(torch.equal(held[name], value) for name, value in final.items()) for held in left_with
    )


def test_learners_that_take_7_20_and_33_steps_each_leave_with_the_model_of_their_last_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what they did in a window that was not full counts, each step once."""
    seen, taken = Recorder(monkeypatch), (7, 20, 33)

    def job(m: int, address: str) -> dict[str, Tensor]:
        model = small_model(0)
        optimizer = sgd(model)
        with diloco_plugin.attach(
            model, optimizer, address, name=f"learner-{m}", tokens=lambda _: 10 + m
        ) as learner:
            for batch in batches(m, taken[m]):
                train_step(model, optimizer, batch)
        assert learner.metrics()["diloco/steps"] == taken[m]
        assert learner.metrics()["diloco/pushes_merged"] >= 1
        return {name: t.detach().clone() for name, t in model.named_parameters()}

    with running_syncer(sync_every=24, fragments=4) as syncer:
        left_with = run_all([lambda m=m: job(m, syncer.address) for m in range(3)])
        final = global_model(syncer)
        layout = syncer._merging.the_model.layout
    for m, held in enumerate(left_with):
        seen.check(held, layout, 10 + m)
        for fragment in layout.fragments:
            given = [
                steps
                for _, index, tokens, steps in seen.pushes
                if index == fragment.index and tokens == (10 + m) * steps
            ]
            assert sum(given) <= taken[m]
    assert all(tokens % steps == 0 for _, _, tokens, steps in seen.pushes)
    assert any(steps % 24 for _, _, _, steps in seen.pushes)
    # Who leaves last leaves with what the syncer keeps.
    assert any(all(torch.equal(held[n], value) for n, value in final.items()) for held in left_with)

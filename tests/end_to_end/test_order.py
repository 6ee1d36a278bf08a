"""The merged result does not depend on who comes first, beyond fp32 rounding."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from diloco_plugin.core.parameters import Parameters
from diloco_plugin.syncer import Syncer
from diloco_plugin.syncer.model import GlobalModel
from diloco_plugin.tensors.layout import TensorSpec, build_layout
from diloco_plugin.wire import messages as msg
from tests.end_to_end.forged import Forged, one_weight
from tests.syncers import global_model, running_syncer, wait_until_live
from tests.waiting import until

#: fp32 has 24 bits; sums of four terms of about the same size lose two of them.
TOLERANCE = 4 * 2.0**-23
WORK = [(64, 4), (1000, 2), (3, 1), (500, 24)]  # tokens, steps


def pushes(elements: int) -> list[Tensor]:
    """Four pseudo-gradients of very different sizes."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(elements, generator=generator) * scale for scale in (1.0, 1e-4, 30.0, 1e-2)]


@pytest.mark.parametrize("merge", ["rda", "direct"])
@pytest.mark.parametrize("closing", [False, True])
def test_all_24_orders_of_four_pushes_give_one_result(merge: str, closing: bool) -> None:
    specs = [
        TensorSpec("a", (40, 30), "float32", "weight", ""),
        TensorSpec("b", (50,), "float32", "embedding", ""),
        TensorSpec("c", (7,), "float32", "buffer", ""),
    ]
    layout = build_layout(specs, 1)
    elements = layout.fragments[0].elements
    deltas = pushes(elements)
    results = []
    for order in itertools.permutations(range(4)):
        model = GlobalModel(layout, Parameters(fragments=1, merge=merge))
        for round_ in range(2):  # the second one has momentum
            for m in order:
                size = model.measure(0, deltas[m])
                tokens, steps = WORK[m]
                model.fold(round_, 0, deltas[m], size, tokens=tokens, steps=steps, closing=closing)
            assert model.merge(round_, 0, round_ + 1, closing=closing)
        results.append(model.theta[0].clone())
    scale = float(results[0].abs().max())
    assert scale > 0
    for result in results[1:]:
        assert float((result - results[0]).abs().max()) <= TOLERANCE * scale


def folded(syncer: Syncer, round_: int) -> int:
    merge = syncer._merging.the_model._rounds.get(round_)
    return merge.pushes if merge is not None else 0


def merge_over_sockets(order: tuple[int, ...]) -> Tensor:
    size = 200
    deltas = pushes(size)
    specs = one_weight(size)
    with running_syncer(sync_every=1, fragments=1, overlap=0, quorum=4) as syncer:
        team = [Forged(syncer.address, f"learner-{m}", specs) for m in range(4)]
        try:
            for learner in team:
                learner.join()
                if learner is team[0]:
                    learner.seed([torch.zeros(size)])
                else:
                    learner.take()
            wait_until_live(syncer, 4)
            for learner in team:
                learner.progress(1)
            pulls = [learner.pulled() for learner in team]
            for m in order:
                tokens, steps = WORK[m]
                team[m].offer(pulls[m], tokens=tokens, steps=steps)
                team[m].serve("push", 0, pulls[m].round, deltas[m], 0)
                here = order.index(m) + 1
                until(lambda n=here, r=pulls[m].round: n == 4 or folded(syncer, r) == n)
            for m in range(4):
                assert team[m].hear(msg.Fate).fate == "merged"
            return global_model(syncer)["w"]
        finally:
            for learner in team:
                learner.close()


def test_the_order_of_arrival_over_sockets_does_not_matter() -> None:
    first, second = (merge_over_sockets(order) for order in ((0, 1, 2, 3), (3, 1, 0, 2)))
    assert float(first.abs().max()) > 0
    assert float((first - second).abs().max()) <= TOLERANCE * float(first.abs().max())

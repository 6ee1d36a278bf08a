from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from diloco_plugin.tensors import merge
from diloco_plugin.tensors.blocks import BLOCK
from diloco_plugin.tensors.layout import BUFFER, Fragment
from diloco_plugin.tensors.merge import RoundMerge, measure

from . import reference

#: Rounding of fp32 sums over a handful of learners, relative to the norm of the result.
FP32 = 2e-6


def fold_all(
    fragment: Fragment, pushes: list[reference.Push], method: str, into: Tensor | None = None
) -> Tensor:
    merging = RoundMerge(fragment, method, into)
    for delta, weight in pushes:
        merging.fold(delta, weight, measure(delta, fragment))
    return merging.gradient()


def some_pushes(fragment: Fragment, count: int, scale: float = 1e-2) -> list[reference.Push]:
    return [
        (torch.randn(fragment.elements) * scale * (m + 1), merge.weight(1000 * (m + 1), 3 + m))
        for m in range(count)
    ]


class TestRoundMerge:
    @pytest.mark.parametrize("method", ["rda", "direct"])
    @pytest.mark.parametrize("learners", [1, 2, 8])
    def test_equals_the_formula(self, method: str, learners: int) -> None:
        fragment = reference.mixed_fragment()
        pushes = some_pushes(fragment, learners)
        found = fold_all(fragment, pushes, method)
        assert reference.relative_error(found, reference.merged(fragment, pushes, method)) < FP32

    @given(
        st.lists(
            st.tuples(
                st.integers(0, 2**31),
                st.floats(1e-12, 1e12),
                st.integers(1, 10**9),
                st.integers(1, 1000),
            ),
            min_size=1,
            max_size=6,
        ),
        st.sampled_from(["rda", "direct"]),
    )
    def test_equals_the_formula_for_any_scales_and_weights(
        self, learners: list[tuple[int, float, int, int]], method: str
    ) -> None:
        fragment = reference.mixed_fragment()
        pushes = []
        for seed, scale, tokens, steps in learners:
            noise = torch.randn(fragment.elements, generator=torch.Generator().manual_seed(seed))
            pushes.append((noise * scale, merge.weight(tokens, steps)))
        found = fold_all(fragment, pushes, method)
        expected = reference.merged(fragment, pushes, method)
        # Noise of a large push stays when it cancels, so errors are relative to the largest one.
        weights = sum(weight for _, weight in pushes)
        scale = max(float(d.double().norm()) * w / weights for d, w in pushes)
        assert float((found - expected).norm()) <= 1e-5 * max(scale, float(expected.norm()))

    @pytest.mark.parametrize("method", ["rda", "direct"])
    def test_does_not_depend_on_the_order_of_arrival(self, method: str) -> None:
        fragment = reference.mixed_fragment()
        pushes = some_pushes(fragment, 4)
        expected = reference.merged(fragment, pushes, method)
        for order in itertools.permutations(pushes):
            found = fold_all(fragment, list(order), method)
            assert reference.relative_error(found, expected) < FP32

    def test_keeps_the_norm_of_orthogonal_pushes_where_a_mean_would_shrink_it(self) -> None:
        fragment = reference.layout_of(reference.spec("a", 64)).fragments[0]
        pushes = [(torch.eye(64)[m] * 3.0, 1.0) for m in range(16)]
        assert float(fold_all(fragment, pushes, "rda").norm()) == pytest.approx(3.0)
        assert float(fold_all(fragment, pushes, "direct").norm()) == pytest.approx(3.0 / 4.0)

    def test_averages_embeddings_and_buffers_directly_under_rda(self) -> None:
        fragment = reference.mixed_fragment()
        pushes = some_pushes(fragment, 3)
        radial, mean = (fold_all(fragment, pushes, method) for method in ("rda", "direct"))
        for slot in fragment.slots:
            same = torch.equal(radial[slot.start : slot.stop], mean[slot.start : slot.stop])
            assert same == (slot.spec.name in "bd")

    def test_a_tensor_that_did_not_move_counts_with_its_weight_only(self) -> None:
        fragment = reference.layout_of(reference.spec("a", 8)).fragments[0]
        moved = torch.full((8,), 2.0)
        found = fold_all(fragment, [(torch.zeros(8), 3.0), (moved, 1.0)], "rda")
        assert torch.allclose(found, moved / 4)
        assert not fold_all(fragment, [(torch.zeros(8), 3.0)], "rda").any()

    def test_pushes_that_cancel_out_merge_to_zero_and_not_to_their_rounding(self) -> None:
        fragment = reference.layout_of(reference.spec("a", 1000)).fragments[0]
        delta = torch.randn(1000)
        found = fold_all(fragment, [(delta, 1.0), (delta * -0.3, 1.0)], "rda")
        assert not found.any()

    def test_one_push_alone_is_taken_as_it_is(self) -> None:
        fragment = reference.mixed_fragment()
        delta = torch.randn(fragment.elements)
        assert torch.equal(fold_all(fragment, [(delta, 7.3e13)], "direct"), delta)
        assert torch.allclose(fold_all(fragment, [(delta, 7.3e13)], "rda"), delta, rtol=1e-6)

    @pytest.mark.parametrize("scale", [1e-42, 1e-33, 1e30])
    @pytest.mark.parametrize("method", ["rda", "direct"])
    def test_works_at_the_ends_of_fp32(self, scale: float, method: str) -> None:
        fragment = reference.mixed_fragment()
        pushes = [(torch.randn(fragment.elements) * scale, weight) for weight in (1e3, 1e7, 4.0)]
        found = fold_all(fragment, pushes, method)
        expected = reference.merged(fragment, pushes, method)
        step = 2.0**-149  # of denormals
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=2 * step)

    @pytest.mark.parametrize("scale", [1e-42, 1.0])
    def test_works_over_many_blocks(self, scale: float) -> None:
        fragment = reference.layout_of(reference.spec("a", 2 * BLOCK + 3)).fragments[0]
        pushes = some_pushes(fragment, 2, scale)
        found = fold_all(fragment, pushes, "rda")
        expected = reference.merged(fragment, pushes, "rda")
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=scale * 1e-6 + 2.0**-148)

    def test_uses_the_given_memory_and_leaves_the_push_alone(self) -> None:
        fragment = reference.mixed_fragment()
        into = torch.full((fragment.elements,), math.nan)
        pushes = some_pushes(fragment, 3)
        before = [delta.clone() for delta, _ in pushes]
        found = fold_all(fragment, pushes, "rda", into)
        assert found is into
        assert torch.isfinite(found).all()
        assert all(torch.equal(a, b) for a, (b, _) in zip(before, pushes, strict=True))

    def test_counts_pushes_and_weight(self) -> None:
        fragment = reference.mixed_fragment()
        merging = RoundMerge(fragment, "rda")
        for delta, weight in some_pushes(fragment, 3):
            merging.fold(delta, weight, measure(delta, fragment))
        assert merging.pushes == 3
        assert merging.weight == sum(weight for _, weight in some_pushes(fragment, 3))

    def test_refuses_what_the_guards_should_have_refused(self) -> None:
        fragment = reference.mixed_fragment()
        merging = RoundMerge(fragment, "rda")
        bad = torch.full((fragment.elements,), math.inf)
        good = torch.ones(fragment.elements)
        with pytest.raises(ValueError, match="finite"):
            merging.fold(bad, 1.0, measure(bad, fragment))
        with pytest.raises(ValueError, match="positive"):
            merging.fold(good, 0.0, measure(good, fragment))
        with pytest.raises(ValueError, match="83 elements"):
            merging.fold(good[1:], 1.0, measure(good, fragment))
        with pytest.raises(ValueError, match="without pushes"):
            merging.gradient()
        merging.fold(good, 1.0, measure(good, fragment))
        merging.gradient()
        with pytest.raises(ValueError, match="closed"):
            merging.fold(good, 1.0, measure(good, fragment))
        with pytest.raises(ValueError, match="unknown"):
            RoundMerge(fragment, "median")


class TestMeasure:
    def test_is_exact_over_millions_of_elements(self) -> None:
        fragment = reference.layout_of(reference.spec("a", 2_000_000)).fragments[0]
        delta = torch.randn(2_000_000)
        expected = float(delta.double().norm())
        found = measure(delta, fragment)
        assert found.norms == (found.total,)
        assert abs(found.total / expected - 1) < 1e-6

    def test_gives_one_norm_for_each_slot(self) -> None:
        fragment = reference.mixed_fragment()
        delta = torch.randn(fragment.elements)
        found = measure(delta, fragment)
        for slot, norm in zip(fragment.slots, found.norms, strict=True):
            assert norm == pytest.approx(reference.norm(delta[slot.start : slot.stop]), rel=1e-6)
        assert found.total == pytest.approx(reference.norm(delta), rel=1e-6)
        assert found.finite

    @pytest.mark.parametrize("value", [1e30, 3.4e38, 1e-30, 1e-44, 0.0])
    def test_a_finite_value_is_finite_however_large_its_square(self, value: float) -> None:
        fragment = reference.mixed_fragment()
        delta = torch.full((fragment.elements,), value)
        found = measure(delta, fragment)
        assert found.finite
        assert found.total == pytest.approx(reference.norm(delta), rel=1e-6)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("place", [0, 40, 82])
    def test_one_value_that_is_not_finite_shows(self, value: float, place: int) -> None:
        fragment = reference.mixed_fragment()
        delta = torch.randn(fragment.elements)
        delta[place] = value
        found = measure(delta, fragment)
        assert not found.finite
        assert sum(math.isfinite(norm) for norm in found.norms) == len(fragment.slots) - 1

    def test_the_last_element_of_many_blocks_counts(self) -> None:
        fragment = reference.layout_of(reference.spec("a", 2 * BLOCK + 1)).fragments[0]
        delta = torch.zeros(fragment.elements)
        delta[-1] = 2.0
        assert measure(delta, fragment).total == 2.0
        delta[-1] = math.nan
        assert not measure(delta, fragment).finite

    def test_infinities_of_both_signs_and_nan_together_show(self) -> None:
        fragment = reference.layout_of(reference.spec("a", 3)).fragments[0]
        assert not measure(torch.tensor([math.inf, -math.inf, math.nan]), fragment).finite


class TestWeight:
    def test_is_quantity_times_quality(self) -> None:
        assert merge.weight(1000, 10) == 1000**2 / 10

    @pytest.mark.parametrize(("tokens", "steps"), [(0, 1), (1, 0)])
    def test_there_is_none_without_work(self, tokens: int, steps: int) -> None:
        with pytest.raises(ValueError, match="no weight"):
            merge.weight(tokens, steps)


def test_a_fragment_of_buffers_only_is_averaged() -> None:
    fragment = reference.layout_of(reference.spec("a", 4, kind=BUFFER)).fragments[0]
    pushes = [(torch.full((4,), 1.0), 1.0), (torch.full((4,), 4.0), 2.0)]
    assert torch.allclose(fold_all(fragment, pushes, "rda"), torch.full((4,), 3.0))

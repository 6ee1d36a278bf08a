from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_plugin.errors import LayoutError
from diloco_plugin.tensors.layout import (
    BUFFER,
    EMBEDDING,
    KINDS,
    WEIGHT,
    TensorSpec,
    build_layout,
    check_specs,
    differences,
    dtype_class,
    views,
)

from .reference import spec

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
rows = st.tuples(shapes, st.sampled_from(KINDS))


def model_of(rows: list[tuple[tuple[int, ...], str]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", shape, "float32", kind) for i, (shape, kind) in enumerate(rows)]


models = (
    st.lists(rows, min_size=1, max_size=40)
    .map(model_of)
    .filter(lambda specs: any(spec.numel for spec in specs))
)


class TestBuildLayout:
    @given(models, st.integers(1, 30))
    def test_every_element_has_exactly_one_place(self, specs: list[TensorSpec], count: int) -> None:
        layout = build_layout(specs, count)
        names = [slot.spec.name for fragment in layout.fragments for slot in fragment.slots]
        assert sorted(names) == sorted(spec.name for spec in specs if spec.numel)
        for index, fragment in enumerate(layout.fragments):
            assert fragment.index == index
            stops = [slot.stop for slot in fragment.slots]
            assert [slot.start for slot in fragment.slots] == [0, *stops[:-1]]
            assert stops[-1] == fragment.elements
            assert all(slot.stop - slot.start == slot.spec.numel for slot in fragment.slots)
        assert layout.elements == sum(spec.numel for spec in specs)

    @given(models, st.integers(1, 30))
    def test_buffers_come_last(self, specs: list[TensorSpec], count: int) -> None:
        for fragment in build_layout(specs, count).fragments:
            for slot in fragment.slots:
                assert (slot.spec.kind == BUFFER) == (slot.start >= fragment.optimized)

    @given(models, st.integers(1, 30))
    def test_there_are_as_many_as_asked_for_and_none_is_empty(
        self, specs: list[TensorSpec], count: int
    ) -> None:
        layout = build_layout(specs, count)
        assert len(layout.fragments) == min(count, sum(spec.numel > 0 for spec in specs))
        assert all(fragment.elements for fragment in layout.fragments)

    @given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
    def test_the_largest_is_at_most_four_thirds_of_the_best_possible(
        self, sizes: list[int], count: int
    ) -> None:
        layout = build_layout([spec(f"t{i}", size) for i, size in enumerate(sizes)], count)
        best = sum(sizes)
        for places in itertools.product(range(count), repeat=len(sizes)):
            loads = [0] * count
            for size, place in zip(sizes, places, strict=True):
                loads[place] += size
            best = min(best, max(loads))
        assert 3 * max(fragment.elements for fragment in layout.fragments) <= 4 * best

    @given(models, st.integers(1, 30), st.randoms(use_true_random=False))
    def test_does_not_depend_on_the_order_of_the_description(
        self, specs: list[TensorSpec], count: int, rng: random.Random
    ) -> None:
        shuffled = list(specs)
        rng.shuffle(shuffled)
        assert build_layout(shuffled, count) == build_layout(specs, count)

    def test_is_the_same_in_every_version(self) -> None:
        # Learner and syncer may run different releases: this may only change with the protocol.
        specs = [spec("a", 3), spec("b", 2, 2, kind=EMBEDDING), spec("c", 1, kind=BUFFER)]
        assert build_layout(specs, 2).fingerprint == (
            "63d4fc5dcdc852aef13757bb8341fb27b28cfb22c3068ab5df08bf7828ada66b"
        )

    @pytest.mark.parametrize(
        "change",
        [
            {"name": "z"},
            {"shape": (4, 1)},
            {"kind": EMBEDDING},
            {"alias_of": "b"},
        ],
    )
    def test_the_fingerprint_sees_every_difference(self, change: dict[str, object]) -> None:
        fields = {"name": "a", "shape": (2, 2), "dtype": "float32", "kind": WEIGHT}
        base = [TensorSpec(**fields), spec("b", 2, 2)]  # type: ignore[arg-type]
        other = [TensorSpec(**{**fields, **change}), spec("b", 2, 2)]  # type: ignore[arg-type]
        assert build_layout(base, 2).fingerprint != build_layout(other, 2).fingerprint
        assert build_layout(base, 2).fingerprint != build_layout(base, 1).fingerprint

    def test_learners_in_bf16_and_fp32_share_a_run(self) -> None:
        one, other = [spec("a", 3)], [spec("a", 3, dtype="bfloat16")]
        assert dtype_class("float32") == dtype_class("bfloat16") == "float"
        assert build_layout(one, 1).fingerprint == build_layout(other, 1).fingerprint
        assert differences(one, other) == []

    def test_aliases_take_no_place(self) -> None:
        specs = [spec("a", 3), TensorSpec("b", (3,), "float32", WEIGHT, "a")]
        assert build_layout(specs, 8).elements == 3

    def test_a_scalar_has_one_element(self) -> None:
        (fragment,) = build_layout([spec("a")], 1).fragments
        assert views(torch.ones(1), fragment)[0].shape == ()

    @pytest.mark.parametrize("count", [0, -1])
    def test_there_is_no_layout_without_fragments(self, count: int) -> None:
        with pytest.raises(LayoutError, match="at least 1"):
            build_layout([spec("a", 3)], count)


class TestViews:
    def test_share_storage_with_the_flat_tensor(self) -> None:
        (fragment,) = build_layout([spec("a", 2, 3), spec("b", 4)], 1).fragments
        flat = torch.zeros(10)
        a, b = views(flat, fragment)
        a.fill_(1.0)
        b.fill_(2.0)
        assert a.shape == (2, 3)
        assert flat.tolist() == [1.0] * 6 + [2.0] * 4

    def test_refuse_another_size(self) -> None:
        (fragment,) = build_layout([spec("a", 2, 3)], 1).fragments
        with pytest.raises(ValueError, match="6 elements"):
            views(torch.zeros(7), fragment)


class TestCheckSpecs:
    def test_accepts_a_model(self) -> None:
        check_specs([spec("a", 3), TensorSpec("b", (3,), "float32", WEIGHT, "a"), spec("c", 0)])

    @pytest.mark.parametrize(
        ("specs", "message"),
        [
            ([], "0 elements"),
            ([spec("a", 0)], "0 elements"),
            ([spec("a", 2**20, 2**21)], "elements in total"),
            ([spec("a", *([2**53] * 16))], "elements in total"),
            ([spec("a", -1)], "not possible"),
            ([spec("a", -2, -2)], "not possible"),
            ([spec("a", *([1] * 17))], "at most 16"),
            ([spec("", 1)], "0 characters"),
            ([spec("a" * 513, 1)], "513 characters"),
            ([spec("a", 1), spec("a", 1)], "twice"),
            ([spec("a", 1, kind="magic")], "'magic' is unknown"),
            ([spec("a", 1, dtype="int8")], "a: dtype 'int8'"),
            ([TensorSpec("a", (1,), "float32", WEIGHT, "b"), spec("c", 1)], "tied to b"),
            ([TensorSpec("a", (1,), "float32", WEIGHT, "a"), spec("c", 1)], "tied to a"),
            ([TensorSpec("a", (1,), "float32", WEIGHT, "b"), spec("b", 2)], "differs"),
        ],
    )
    def test_refuses_what_makes_no_sense(self, specs: list[TensorSpec], message: str) -> None:
        with pytest.raises(LayoutError, match=message):
            check_specs(specs)
        with pytest.raises(LayoutError, match=message):
            build_layout(specs, 1)


class TestDifferences:
    RUN = (spec("head.weight", 256, 64), spec("norm.weight", 64), spec("wte.weight", 9, 2))

    def learner(self, **change: TensorSpec | None) -> list[TensorSpec]:
        specs = {s.name: s for s in self.RUN}
        for name, changed in change.items():
            specs[f"{name}.weight"] = changed  # type: ignore[assignment]
        return [s for s in specs.values() if s is not None]

    def test_there_are_none_between_equal_models(self) -> None:
        assert differences(self.RUN, self.learner()) == []

    def test_a_shape_is_named_with_both_sides(self) -> None:
        learner = self.learner(head=spec("head.weight", 257, 64))
        assert differences(self.RUN, learner) == [
            "head.weight: the run has shape (256, 64), this learner has (257, 64)"
        ]

    def test_missing_and_extra_tensors_are_named(self) -> None:
        assert differences(self.RUN, self.learner(norm=None)) == [
            "the run has 3 tensors, this learner has 2",
            "norm.weight: the run has it, this learner does not (missing, or frozen)",
        ]
        assert differences(self.RUN, self.learner(lora=spec("lora.weight", 1))) == [
            "the run has 3 tensors, this learner has 4",
            "lora.weight: this learner has it, the run does not",
        ]

    def test_ties_and_kinds_are_named(self) -> None:
        tied = TensorSpec("wte.weight", (9, 2), "float32", EMBEDDING, "head.weight")
        assert differences(self.RUN, self.learner(wte=tied)) == [
            "wte.weight: in the run it is not tied, in this learner it is tied to head.weight",
            "wte.weight: the run merges it as weight, this learner marks it as embedding",
        ]

    def test_a_dtype_that_does_not_exist_is_a_difference_and_no_error(self) -> None:
        name, *_ = (s.name for s in self.RUN)
        strange = [replace(s, dtype="f") if s.name == name else s for s in self.RUN]
        (found,) = differences(self.RUN, strange)
        assert found.endswith("this learner has f")

    def test_only_the_first_are_told_and_the_rest_counted(self) -> None:
        run = [spec(f"t{i:02}", 1) for i in range(20)]
        learner = [spec(f"t{i:02}", 2) for i in range(20)]
        found = differences(run, learner, limit=3)
        assert len(found) == 4
        assert found[0].startswith("t00: ")
        assert found[-1] == "... and 17 more differences."

    def test_a_model_inside_another_one_is_recognized(self) -> None:
        deeper = [spec(f"model.{s.name}", *s.shape) for s in self.RUN]
        assert 'attach with module="model"' in differences(self.RUN, deeper)[0]
        assert 'attach with module="model"' in differences(deeper, self.RUN)[0]

    def test_there_is_an_end_to_everything(self) -> None:
        assert differences([], []) == []
        assert differences([], self.RUN)[0] == "the run has 0 tensors, this learner has 3"

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_plugin.errors import ConfigError
from diloco_plugin.tensors.codec import codec

AWKWARD = [0.0, -0.0, 1e-45, -1e-40, 1e30, -3.4028235e38, math.inf, -math.inf, math.nan, 1 / 3]


def round_trip(name: str, src: torch.Tensor) -> torch.Tensor:
    chosen = codec(name)
    wire = torch.empty(chosen.nbytes(src.numel()), dtype=torch.uint8)
    chosen.encode(src, wire)
    out = torch.full_like(src, 123.0)
    chosen.decode(wire, out)
    return out


@pytest.mark.parametrize("values", [[], [0.1], AWKWARD])
def test_fp32_gives_back_every_bit(values: list[float]) -> None:
    src = torch.tensor(values, dtype=torch.float32)
    found = round_trip("fp32", src)
    assert codec("fp32").lossless
    assert torch.equal(found.view(torch.int32), src.view(torch.int32))


@pytest.mark.parametrize("values", [[], [0.1], AWKWARD])
def test_bf16_gives_back_what_a_cast_gives(values: list[float]) -> None:
    src = torch.tensor(values, dtype=torch.float32)
    found = round_trip("bf16", src)
    assert not codec("bf16").lossless
    assert torch.equal(found.nan_to_num(7.0), src.bfloat16().float().nan_to_num(7.0))
    assert torch.equal(found.isnan(), src.isnan())


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), max_size=300))
def test_bf16_is_within_one_part_in_256(values: list[float]) -> None:
    src = torch.tensor(values, dtype=torch.float32)
    normal = src.abs() >= 2.0**-126
    found = round_trip("bf16", src)
    assert torch.allclose(found[normal], src[normal], rtol=2.0**-8, atol=0.0)
    assert torch.allclose(found[~normal], src[~normal], rtol=0.0, atol=2.0**-126)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_encodes_into_a_part_of_a_larger_buffer(name: str) -> None:
    chosen = codec(name)
    size = chosen.nbytes(8)
    wire = torch.zeros(3 * size, dtype=torch.uint8)
    src = torch.arange(8.0)
    chosen.encode(src, wire[size : 2 * size])
    assert not wire[:size].any()
    assert not wire[2 * size :].any()
    out = torch.empty(8)
    chosen.decode(wire[size : 2 * size], out)
    assert torch.equal(out, src)


def test_sizes_are_known_beforehand() -> None:
    assert codec("fp32").nbytes(262_144) == 1_048_576
    assert codec("bf16").nbytes(262_144) == 524_288
    assert codec("bf16").nbytes(0) == 0


def test_names_are_those_of_the_configuration() -> None:
    assert [codec(name).name for name in ("fp32", "bf16")] == ["fp32", "bf16"]


@pytest.mark.parametrize(("name", "near"), [("bfloat16", "bf16"), ("FP32", "fp32"), ("", "fp32")])
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {near}"):
        codec(name)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_wrong_sizes_and_dtypes_are_refused(name: str) -> None:
    chosen = codec(name)
    wire = torch.empty(chosen.nbytes(4), dtype=torch.uint8)
    with pytest.raises(ValueError, match="bytes"):
        chosen.encode(torch.zeros(5), wire)
    with pytest.raises(ValueError, match="bytes"):
        chosen.encode(torch.zeros(2, 2), wire)
    with pytest.raises(ValueError, match="float32"):
        chosen.encode(torch.zeros(4, dtype=torch.float64), wire)
    with pytest.raises(ValueError, match="uint8"):
        chosen.decode(wire.view(torch.int8), torch.zeros(4))
    odd = torch.empty(wire.numel() + 1, dtype=torch.uint8)[1:]
    with pytest.raises(ValueError, match="multiple"):
        chosen.decode(odd, torch.zeros(4))

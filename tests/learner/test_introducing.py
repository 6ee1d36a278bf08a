"""What no syncer would read is refused where it is said."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from diloco_plugin import data
from diloco_plugin.core import actions as act
from diloco_plugin.errors import ConfigError, LayoutError
from diloco_plugin.learner.introducing import Introduction, checked
from diloco_plugin.tensors.layout import TensorSpec
from diloco_plugin.wire.framing import decode_to_syncer, encode
from diloco_plugin.wire.messages import MODEL_CONFIG_BYTES_MAX

GOOD = Introduction(
    run="",
    name="a",
    incarnation="0" * 32,
    specs=(TensorSpec("w", (3,), "float32", "weight", ""),),
    data_seed=None,
    model_config="",
    version="1",
)


@pytest.mark.parametrize("name", ["a", "gpu box 7", "Zürich-1", "n" * 128])
def test_a_name_that_can_be_printed_is_taken(name: str) -> None:
    assert checked(replace(GOOD, name=name)).name == name


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "n" * 129}, "use 1 to 128 printable characters"),
        ({"name": "a\nb"}, "use 1 to 128 printable characters"),
        ({"name": "\x1b[31m"}, "use 1 to 128 printable characters"),
        ({"name": "\udc80"}, "use 1 to 128 printable characters"),
        ({"run": "a b"}, "run='a b' is not a name"),
        ({"run": "r" * 129}, "is not a name"),
        ({"data_seed": 2**65}, "does not fit into 64 bits"),
        ({"specs": (replace(GOOD.specs[0], name="w" * 600),)}, "Correct the name of the tensor"),
    ],
)
def test_what_no_syncer_would_read_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        checked(replace(GOOD, **fields))


def test_a_name_from_the_environment_is_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_NAME", "a\tb")
    with pytest.raises(ConfigError, match="from DILOCO_NAME"):
        checked(replace(GOOD, name="a\tb"))


def test_a_name_is_checked_before_the_data_is_divided() -> None:
    with pytest.raises(ConfigError, match="printable"):
        data.shard([1, 2], "tcp://127.0.0.1:1", name="a\nb")


def test_too_large_a_model_is_refused_with_what_to_do() -> None:
    specs = tuple(replace(GOOD.specs[0], name=f"{i:0100d}") for i in range(40_000))
    with pytest.raises(LayoutError, match=r"Hello is too large.*freeze those"):
        checked(replace(GOOD, specs=specs))


def test_what_was_checked_fits_with_the_versions_that_are_held_later() -> None:
    specs = tuple(replace(GOOD.specs[0], name=f"{i}") for i in range(5000))
    hello = checked(replace(GOOD, specs=specs)).hello(
        act.SayHello(epoch=2**53, versions=(2**53,) * 4096, clock=2**53)
    )
    assert decode_to_syncer(encode(hello)) == hello


def test_too_long_a_configuration_is_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fits = replace(GOOD, model_config="x" * MODEL_CONFIG_BYTES_MAX)
    assert checked(fits) == fits
    with caplog.at_level(logging.WARNING, "diloco.learner"):
        assert checked(replace(GOOD, model_config="é" * MODEL_CONFIG_BYTES_MAX)) == GOOD
    assert caplog.text.count("config.json") == 1

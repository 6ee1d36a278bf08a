from __future__ import annotations

import io
import json
import sys
import typing
import zipfile
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from diloco_plugin.errors import WireError
from diloco_plugin.wire import messages as m
from diloco_plugin.wire.framing import (
    BULK_BYTES_MAX,
    PARAMETERS_MAX,
    STATUS_DEPTH_MAX,
    decode_bulk,
    decode_model,
    decode_to_learner,
    decode_to_syncer,
    encode,
    encode_model,
    model_length,
)

REASONS = {"oversize", "truncated", "garbage", "unknown", "invalid"}
DECODERS = {
    decode_to_syncer: typing.get_args(m.ToSyncer),
    decode_to_learner: typing.get_args(m.ToLearner),
    decode_bulk: typing.get_args(m.Bulk),
}
EVERY_DECODER = pytest.mark.parametrize("decode", DECODERS, ids=lambda d: d.__name__)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | text
)  # fmt: skip
tables = st.dictionaries(text, scalars, max_size=4)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "parameters": st.dictionaries(text, scalars | tables, max_size=8),
    "body": st.dictionaries(
        text,
        st.recursive(
            scalars,
            lambda t: st.lists(t, max_size=3) | st.dictionaries(text, t, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ).filter(lambda body: depth(body) <= STATUS_DEPTH_MAX),
    "incarnation": st.text("0123456789abcdef", min_size=32, max_size=32),
    "data_seed": st.none() | st.integers(0, 2**63),
}


def depth(tree: object) -> int:
    if isinstance(tree, dict):
        return 1 + max(map(depth, tree.values()), default=0)
    if isinstance(tree, list):
        return 1 + max(map(depth, tree), default=0)
    return 0


def of_type(type_: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    match type_:
        case msgspec.inspect.StrType() if type_.pattern:  # names: no control characters
            return st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
        case msgspec.inspect.StrType():
            low, high = type_.min_length or 0, min(type_.max_length or 12, 12)
            return st.text(st.characters(exclude_categories=["Cs"]), min_size=low, max_size=high)
        case msgspec.inspect.BytesType():
            return st.binary(min_size=type_.min_length or 0, max_size=type_.max_length or 12)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            high = type_.le if type_.le is not None else (type_.lt or 2**53) - 1
            return st.integers(type_.ge or 0, high)
        case msgspec.inspect.VarTupleType():
            return st.lists(of_type(type_.item_type), max_size=3).map(tuple)
        case msgspec.inspect.TupleType():
            return st.tuples(*map(of_type, type_.item_types))
        case msgspec.inspect.StructType():
            return of_struct(type_.cls)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.UnionType():
            return st.one_of(*map(of_type, type_.types))
    raise NotImplementedError(type_)


def of_struct(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    fields = {
        f.name: SPECIAL[f.name] if f.name in SPECIAL else of_type(f.type) for f in info.fields
    }
    return st.builds(cls, **fields)


SPECIAL["tensors"] = st.lists(of_struct(m.Tensor), max_size=3).map(lambda t: encode_model(tuple(t)))
pairs = st.one_of(
    [
        st.tuples(st.just(decode), of_struct(cls))
        for decode, kinds in DECODERS.items()
        for cls in kinds
    ]
)
quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.data_too_large]
)


def outcome(decode: Any, data: bytes) -> Any:
    """The message, or the reason of a WireError; anything else fails the test."""
    try:
        return decode(data)
    except WireError as error:
        caught = error
    assert caught.reason in REASONS
    assert str(caught)
    return caught.reason


@pytest.mark.parametrize(
    ("decode", "kind"),
    [(d, k) for d, kinds in DECODERS.items() for k in kinds],
    ids=lambda x: x.__name__,
)
def test_every_message_comes_back_as_it_was(decode: Any, kind: Any) -> None:
    @settings(max_examples=15, deadline=None)
    @given(of_struct(kind))
    def check(message: m.Message) -> None:
        data = encode(message)
        assert decode(data) == message
        assert decode(memoryview(bytearray(data))) == message

    check()


@quick
@given(st.sampled_from(list(DECODERS)), st.binary(max_size=300))
@example(decode_to_syncer, b"")
@example(decode_to_learner, b"\x80\x04\x95")
def test_arbitrary_bytes_give_a_message_or_a_wire_error(decode: Any, data: bytes) -> None:
    outcome(decode, data)


@quick
@given(pairs, st.data())
def test_damaged_messages_give_a_message_or_a_wire_error(pair: Any, data: st.DataObject) -> None:
    decode, message = pair
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        match data.draw(st.sampled_from(["flip", "insert", "cut", "delete"])):
            case "flip" if at < len(raw):
                raw[at] ^= data.draw(st.integers(1, 255))
            case "insert":
                raw[at:at] = data.draw(st.binary(max_size=6))
            case "delete":
                del raw[at : at + 3]
            case _:
                del raw[at:]
    outcome(decode, bytes(raw))


@quick
@given(pairs, st.data())
def test_a_cut_message_is_truncated(pair: Any, data: st.DataObject) -> None:
    decode, message = pair
    raw = encode(message)
    cut = data.draw(st.integers(0, len(raw) - 1))
    assert outcome(decode, raw[:cut]) == "truncated"


def a_zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    return file.getvalue()


FOREIGN = {
    "a pickle": b"\x80\x04\x95\x1e\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94",
    "an old pickle": b"cposix\nsystem\n(S'id'\ntR.",
    "JSON": json.dumps({"type": "Goodbye", "epoch": 1}).encode(),
    "a zip": a_zip(),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303"),
    "nested lists": b"\x91" * 100_000,
    "nested maps": b"\x81\xa1a" * 100_000,
    "a list of 4 billion": b"\xdd\xff\xff\xff\xff",
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "bytes of 4 GB": b"\xc6\xff\xff\xff\xff",
}


@EVERY_DECODER
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_bytes_are_refused(decode: Any, name: str) -> None:
    expected = {"garbage", "truncated", "invalid", "oversize"}
    assert outcome(decode, FOREIGN[name]) in expected


STATUS = b"\x82\xa4type\xa6Status\xa4body\x81\xa1a"


@pytest.mark.parametrize(
    ("bomb", "reason"),
    [
        (b"\x91" * 1_000_000, "garbage"),
        (b"\x81\xa1a" * 1_000_000, "garbage"),
        (b"\x91" * 20 + b"\x01", "invalid"),
        (b"\xdd\xff\xff\xff\xff", "truncated"),
        (b"\xdf\xff\xff\xff\xff", "truncated"),
        (b"\xc6\xff\xff\xff\xff", "truncated"),
        (b"\xc7\x03\x05abc", "invalid"),  # an extension type
        (b"\xd6\xff\x00\x00\x00\x00", "invalid"),  # a timestamp
        (b"\xc4\x01a", "invalid"),  # bytes
        (b"\x81\x90\x01", "invalid"),  # a list as a key
        (b"\xa1\xff", "garbage"),  # not UTF-8
    ],
    ids=range(11),
)
def test_bombs_inside_of_a_free_tree_are_refused(bomb: bytes, reason: str) -> None:
    assert outcome(decode_to_learner, STATUS + bomb) == reason


def test_a_raised_recursion_limit_does_not_open_the_tree() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    try:
        assert outcome(decode_to_learner, STATUS + b"\x91" * 3000 + b"\x01") == "invalid"
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"type": "Nonsense"}, "unknown"),
        ({"type": "Welcome"}, "unknown"),  # right word, wrong direction
        ({"type": "Goodbye", "epoch": 1, "extra": 1}, "unknown"),
        ({"epoch": 1}, "invalid"),
        ({"type": 7, "epoch": 1}, "invalid"),
        ({"type": "Goodbye"}, "invalid"),
        ({"type": "Goodbye", "epoch": -1}, "invalid"),
        ({"type": "Goodbye", "epoch": 2**60}, "invalid"),
        ({"type": "Goodbye", "epoch": 1.5}, "invalid"),
        ({"type": "Goodbye", "epoch": "1"}, "invalid"),
        ({"type": "Goodbye", "epoch": None}, "invalid"),
        (["Goodbye", 1], "garbage"),
    ],
    ids=str,
)
def test_reasons_tell_what_is_wrong(body: Any, reason: str) -> None:
    assert outcome(decode_to_syncer, msgspec.msgpack.encode(body)) == reason


def test_what_follows_a_message_is_garbage() -> None:
    assert outcome(decode_to_syncer, encode(m.Goodbye(epoch=1)) + b"\0") == "garbage"


def test_an_incarnation_with_a_newline_is_refused() -> None:
    hello = m.Hello(
        protocol=1, run="", name="a", incarnation="0" * 32 + "\n", tensors=encode_model(())
    )
    assert outcome(decode_to_syncer, encode(hello)) == "invalid"


def test_size_is_checked_before_anything_is_decoded() -> None:
    assert outcome(decode_to_syncer, bytes(m.CONTROL_BYTES_MAX + 1)) == "oversize"
    assert outcome(decode_to_learner, bytes(m.CONTROL_BYTES_MAX + 1)) == "oversize"
    assert outcome(decode_bulk, bytes(BULK_BYTES_MAX + 1)) == "oversize"


@pytest.mark.parametrize("name", ["a", "model.layers.0.self_attn.q_proj.weight"])
def test_a_model_too_large_to_describe_is_refused_before_it_is_sent(name: str) -> None:
    tensor = m.Tensor(name=name, shape=(4, 4), dtype="float32", kind="matrix")
    with pytest.raises(WireError, match="Synchronize fewer tensors") as caught:
        encode_model((tensor,) * 200_000)
    assert caught.value.reason == "oversize"


def test_a_model_of_forty_thousand_tensors_can_be_described() -> None:
    tensor = m.Tensor(
        name="model.layers.100.mlp.experts.255.down_proj.weight.lora_A.default",
        shape=(4096, 4096),
        dtype="bfloat16",
        kind="matrix",
    )
    model = encode_model((tensor,) * 40_000)
    hello = m.Hello(protocol=1, run="", name="a", incarnation="0" * 32, tensors=model)
    heard = decode_to_syncer(encode(hello))
    assert heard == hello
    assert isinstance(heard, m.Hello)
    assert model_length(heard.tensors) == 40_000
    assert decode_model(heard.tensors) == (tensor,) * 40_000


@pytest.mark.parametrize(
    "said",
    [b"", b"\xc0", b"\xa3abc", b"\x80", b"\xdd\xff\xff\xff\xff", b"\xdd\x00", b"\xdc", b"\x91\xc0"],
)
def test_what_is_no_model_is_refused(said: bytes) -> None:
    with pytest.raises(WireError):
        decode_model(msgspec.Raw(said))


@given(st.binary(max_size=64))
def test_whatever_is_said_about_a_model_is_read_or_refused(said: bytes) -> None:
    outcome(lambda data: decode_model(msgspec.Raw(data)), said)


@given(st.integers(0, 70_000))
@example(15)
@example(16)
@example(65_535)
@example(65_536)
def test_how_long_a_model_is_can_be_seen_without_reading_it(length: int) -> None:
    assert model_length(msgspec.Raw(msgspec.msgpack.encode([0] * length))) == length


def test_an_oversize_bulk_header_is_refused_before_it_is_sent() -> None:
    with pytest.raises(WireError) as caught:
        encode(m.Gone(kind="x" * 5000, fragment=0, key=0))
    assert caught.value.reason == "oversize"


@pytest.mark.parametrize("value", ["\ud800", object(), 2**70], ids=["surrogate", "object", "huge"])
def test_what_cannot_be_encoded_is_invalid(value: Any) -> None:
    with pytest.raises(WireError) as caught:
        encode(m.Status(body={"a": value}))
    assert caught.value.reason == "invalid"


def welcome(parameters: dict[Any, Any]) -> bytes:
    return encode(
        m.Welcome(
            protocol=1,
            run="r",
            epoch=1,
            index=0,
            count=1,
            clock=0,
            fragments=1,
            fingerprint="f",
            parameters=parameters,
            bulk_port=1,
            token=bytes(16),
        )
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {f"k{i}": i for i in range(PARAMETERS_MAX + 1)},
        {"t": {f"k{i}": i for i in range(PARAMETERS_MAX + 1)}},
        {"t": {"deeper": {"a": 1}}},
        {"t": [1, 2]},
        {"t": b"bytes"},
        {"t": "x" * 5000},
        {"x" * 5000: 1},
        {"x" * 5000: {}},
        {"t": {1: 2}},
    ],
    ids=range(9),
)
def test_parameters_that_no_syncer_sends_are_refused(parameters: dict[Any, Any]) -> None:
    assert outcome(decode_to_learner, welcome(parameters)) == "invalid"

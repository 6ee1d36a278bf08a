"""Whatever bytes a decoder is given: it gives what they mean, or one of our own errors."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from diloco_plugin.errors import DiLoCoError
from tests.fuzz.decoders import Decoder, every_decoder
from tests.soak import SOAK

ROUNDS = 100
PICKLES = (
    b"cbuiltins\nprint\n(S'unpickled'\ntR.",
    b"\x80\x02cbuiltins\nprint\nX\x09\x00\x00\x00unpickled\x85R.",
    b"\x80\x04\x95\x1e\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94",
)
FOREIGN = (
    *PICKLES,
    b"",
    b"\0" * 64,
    b"\xff" * 300,
    b"PK\x03\x04" + b"x" * 100,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\x91" * 100_000,
    b"\x81\xa1a" * 100_000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"1e999999",
    b"9" * 5000,
    b'"\\ud800"',
    b"\xff" * 8 + b"{}",
    (2**40).to_bytes(8, "little") + b"{}",
)
#: What breaks those who believe what they read: ends of ranges, nothing, depth, other types.
POISON = (
    b"", b"\0", b"\xff", b"\x80", b"\xc0", b"\xc1", b"null", b"-1", b"0", b"1e999", b"NaN", b"{}",
    b"[]", b'""', b"true", b"9223372036854775808", b"18446744073709551616", b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\x90", b"\x80", b"\\u0000", b"../../x",
    b"[" * 2000, b"\x91" * 2000, b"\n", b"#", b"=", b'"', b"[[a]]",
)  # fmt: skip


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> list[Decoder]:
    return every_decoder(tmp_path_factory.mktemp("fuzz"))


def own_error(decoder: Decoder, data: bytes) -> DiLoCoError | None:
    """What it said to these bytes, None if it took them; anything else fails the test."""
    try:
        decoder.read(data)
    except DiLoCoError as error:
        return error
    except Exception as error:
        raise AssertionError(f"{decoder}: {error!r} of {data[:200]!r}") from error
    return None


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The same with one to four changes: bits, bytes, pieces cut out, doubled, moved, poisoned."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, to = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        to = draw.choice((to, min(len(data), at + draw.randrange(9))))
        match draw.randrange(6):
            case 0:
                bit = draw.randrange(8 * len(data)) if data else 0
                changed = bytearray(data)
                if data:
                    changed[bit // 8] ^= 1 << bit % 8
                data = bytes(changed)
            case 1:
                data = data[:at] + data[to:]
            case 2:
                data = data[:to] + data[at:]
            case 3:
                data = data[:at] + draw.randbytes(to - at) + data[to:]
            case 4:
                data = data[:at] + draw.choice(POISON) + data[to:]
            case _:
                data = data[:at]
    return data


def test_every_decoder_takes_what_was_written_for_it(decoders: list[Decoder]) -> None:
    assert len({decoder.name for decoder in decoders}) == len(decoders)
    for decoder in decoders:
        assert decoder.samples
        for sample in decoder.samples:
            assert own_error(decoder, sample) is None, decoder


def test_foreign_bytes_give_our_own_errors_and_nothing_is_unpickled(
    decoders: list[Decoder], capsys: pytest.CaptureFixture[str]
) -> None:
    for decoder in decoders:
        for data in FOREIGN:
            own_error(decoder, data)
        for pickle in PICKLES:
            sample = decoder.samples[0]
            own_error(decoder, sample + pickle)
            own_error(decoder, pickle + sample)
            own_error(decoder, sample[: len(sample) // 2] + pickle + sample[len(sample) // 2 :])
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.timeout(300 * SOAK)
def test_changed_and_random_bytes_give_what_they_mean_or_our_own_errors(
    decoders: list[Decoder],
) -> None:
    refused = taken = 0
    for decoder in decoders:
        draw = random.Random(decoder.name)
        for _ in range(ROUNDS * SOAK):
            sample = draw.choice(decoder.samples)
            data = mutated(sample, draw) if draw.random() < 0.9 else draw.randbytes(len(sample))
            if own_error(decoder, data):
                refused += 1
            else:
                taken += 1
    print(f"{len(decoders)} decoders, {refused + taken:,} inputs, {refused:,} refused")
    assert refused > taken > 0


#: Calls that turn bytes or text into something.
PARSING = {
    "json.loads", "msgpack.decode", "json.decode", "decoder.decode", "_decoder.decode",
    "toml.loads", "torch.load", "load_file", "safe_open", "torch.frombuffer", "struct.unpack",
    "ast.literal_eval",
}  # fmt: skip
#: Where they are, and what in `decoders` reaches them.
PLACES = {
    "config.py": "a configuration",
    "modelfile.py": "a safetensors file",
    "receiving.py": "a chunk in bf16",
    "store/formats.py": "run.json",
    "store/fragments.py": "a fragment",
    "tape/codec.py": "steps alone",
    "tape/segments.py": "the header of a tape",
    "wire/framing.py": "what a learner says",
    "wire/manifest.py": "an inner state",
}
#: Parse nothing that comes from outside: ranks of one job among themselves, our own JSON, flags.
INSIDE = {
    "learner/turns.py", "learner/island.py", "learner/modelconfig.py", "learner/handover.py",
}  # fmt: skip


def test_no_place_that_parses_is_left_out(decoders: list[Decoder]) -> None:
    root = Path(__file__).parents[2] / "diloco_plugin"
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and any(ast.unparse(node.func).endswith(name) for name in PARSING)
    }
    assert found == PLACES.keys() | INSIDE
    assert set(PLACES.values()) <= {decoder.name for decoder in decoders}

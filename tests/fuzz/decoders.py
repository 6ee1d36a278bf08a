"""Every place where bytes from outside become something: what reads them, and what they look like.

Outside is the network, the files of a run, a tape, a folder of keys, a model's files and a
configuration. What checks a digest first is also fed bytes with the right digest, so that what
lies behind it is reached.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from diloco_plugin import modelfile
from diloco_plugin.config import load_toml
from diloco_plugin.net.keys import (
    make_learner_keys,
    make_syncer_keys,
    read_allow_list,
    read_door_keys,
)
from diloco_plugin.receiving import take_chunk
from diloco_plugin.store import RunFile
from diloco_plugin.store.formats import (
    JOURNAL_KIND,
    Life,
    Manifest,
    decode_entry,
    read_sealed,
    seal,
)
from diloco_plugin.store.fragments import read_entry, read_fragment
from diloco_plugin.store.records import RecordFile, read_records, salvage_records
from diloco_plugin.store.recovery import recover
from diloco_plugin.tape.codec import decode_steps
from diloco_plugin.tape.recording import Recorder
from diloco_plugin.tape.replay import replay
from diloco_plugin.tape.segments import KIND, segment_paths
from diloco_plugin.tensors.codec import codec
from diloco_plugin.wire import manifest as inner
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.chunks import Receiver
from diloco_plugin.wire.framing import (
    decode_bulk,
    decode_model,
    decode_to_learner,
    decode_to_syncer,
    encode,
    encode_model,
)
from tests.store.states import checkpoint, commit, started
from tests.tape.worlds import eventful

ELEMENTS = 64


@dataclass(frozen=True)
class Decoder:
    """`read` is given any bytes; `samples` are right ones, and it takes all of them."""

    name: str
    samples: tuple[bytes, ...]
    read: Callable[[bytes], object]

    def __str__(self) -> str:
        return self.name


def every_decoder(scratch: Path) -> list[Decoder]:
    """All of them; `scratch` is where the files lie that they read."""
    return [
        *_messages(),
        *_payloads(),
        *_state(scratch / "state"),
        *_tape(scratch / "tape"),
        *_keys(scratch / "keys"),
        *_model(scratch / "model"),
        _configuration(scratch / "diloco.toml"),
    ]


def _at(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Reads a file that has these bytes."""

    def reading(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return reading


def _messages() -> list[Decoder]:
    model = encode_model((msg.Tensor("weight", (3, 5), "float32", "weight"),))
    hello = msg.Hello(
        protocol=1,
        run="r",
        name="a",
        incarnation="0" * 32,
        tensors=model,
        versions=(4, 5),
        model_config='{"model_type": "gpt2"}',
    )
    welcome = msg.Welcome(
        protocol=1,
        run="r",
        epoch=9,
        index=0,
        count=2,
        clock=24,
        fragments=2,
        fingerprint="f" * 64,
        parameters={"quorum": 1, "outer_options": {"momentum": 0.9}},
        bulk_port=7001,
        token=bytes(16),
    )
    status = msg.Status(body={"learners": [{"name": "a", "rate": 1.5}]})
    offer = msg.Offer(epoch=9, round=3, fragment=1, base=4, steps=24, tokens=99)
    bulk = [
        msg.BulkHello(token=bytes(16)),
        msg.Want(kind="push", fragment=1, key=4, first=0, count=2),
        msg.Chunk(kind="push", fragment=1, key=4, index=0, crc=5),
    ]
    return [
        Decoder("what a learner says", (encode(hello), encode(offer)), decode_to_syncer),
        Decoder("the model of a learner", (bytes(model),), lambda d: decode_model(msgspec.Raw(d))),
        Decoder("what the syncer says", (encode(welcome), encode(status)), decode_to_learner),
        Decoder("the header of bulk data", tuple(map(encode, bulk)), decode_bulk),
    ]


@dataclass(frozen=True)
class _Frame:
    buffer: bytearray


def _payloads() -> list[Decoder]:
    """A chunk of a push in every codec, with a right checksum whatever it holds."""
    values = torch.linspace(-3, 3, ELEMENTS)

    def chunk(name: str) -> Decoder:
        kind = codec(name)
        encoded = torch.empty(kind.nbytes(ELEMENTS), dtype=torch.uint8)
        kind.encode(values, encoded)

        def read(data: bytes) -> object:
            said = msg.Chunk(kind="push", fragment=0, key=0, index=0, crc=zlib.crc32(data))
            receiver, target = Receiver(1, 1), torch.zeros(ELEMENTS)
            receiver.wants()
            take_chunk(said, (b"", _Frame(bytearray(data))), receiver, kind, target)
            return target

        return Decoder(f"a chunk in {name}", (encoded.numpy().tobytes(),), read)

    moments = inner.Entry("exp_avg", "float32", (ELEMENTS,), False)
    state = inner.ParameterState("weight", "float32", (moments,), {"step": 3})
    group = inner.GroupState({"amsgrad": False}, (state,))
    told = inner.Manifest(
        (inner.OptimizerState("AdamW", (group,)),),
        positions=(inner.Position("LambdaLR", {"last_epoch": 5}),),
        rates=((0.1,),),
    )
    _, end = inner.places(inner.entries_of(told.optimizers))
    stream = bytes(end) + inner.tail_of(told)
    reading = Decoder("an inner state", (stream,), lambda data: inner.read(memoryview(data)))
    return [*map(chunk, ("fp32", "bf16")), reading]


def _state(root: Path) -> list[Decoder]:
    """Every file of a run, alone and in its place; JSON also with a right digest."""
    store = started(root)
    commit(store, 0, 2)
    checkpoint(store, past={"count": 2})
    commit(store, 1, 2)
    store.close(clean=False)
    manifest, journal = root / "manifest/000000002.json", root / "journal/000002.log"
    fragment = root / "frag/0001/v000000002.safetensors"
    entries = read_records(journal, JOURNAL_KIND).payloads
    alone = root.with_name("alone")
    alone.mkdir()

    def sealed(path: Path, kind: type[Any]) -> list[Decoder]:
        body = msgspec.json.encode(msgspec.json.decode(path.read_bytes())["body"])
        file = alone / path.name

        def read(data: bytes) -> object:
            file.write_bytes(resealed(data))
            return read_sealed(file, kind)

        plain = _at(file, lambda path: read_sealed(path, kind))
        return [
            Decoder(path.name, (path.read_bytes(),), plain),
            Decoder(f"{path.name} with a right digest", (body,), read),
        ]

    def records(data: bytes) -> object:
        path = alone / "000002.log"
        write_records(path, JOURNAL_KIND, [data])
        return decode_entry(read_records(path, JOURNAL_KIND).payloads[0], path)

    def in_place(path: Path) -> Decoder:
        def read(data: bytes) -> object:
            copy = shutil.copytree(root, alone / "whole", dirs_exist_ok=True)
            (copy / path.relative_to(root)).write_bytes(data)
            return recover(copy)

        return Decoder(f"{path.name} in its place", (path.read_bytes(),), read)

    scanned = _at(alone / "000002.log", lambda path: read_records(path, JOURNAL_KIND))
    salvaged = _at(alone / "000002.log", lambda path: salvage_records(path, JOURNAL_KIND))
    return [
        *sealed(root / "run.json", RunFile),
        *sealed(root / "epoch.json", Life),
        *sealed(manifest, Manifest),
        Decoder("a journal", (journal.read_bytes(),), scanned),
        Decoder("a journal that is salvaged", (journal.read_bytes(),), salvaged),
        Decoder("a record with a right checksum", entries, records),
        Decoder("a fragment", (fragment.read_bytes(),), _at(alone / fragment.name, read_fragment)),
        Decoder("its entry", (fragment.read_bytes(),), _at(alone / fragment.name, read_entry)),
        *map(in_place, (root / "run.json", root / "epoch.json", manifest, journal, fragment)),
    ]


def resealed(body: bytes) -> bytes:
    """A sealed file with these bytes as its body, whatever they are."""
    return seal(msgspec.Raw(body))  # type: ignore[arg-type]


def write_records(path: Path, kind: str, payloads: list[bytes]) -> None:
    path.unlink(missing_ok=True)
    file = RecordFile.create(path, kind=kind)
    for payload in payloads:
        file.append(payload)
    file.close()


def _tape(folder: Path) -> list[Decoder]:
    """A segment, and each of its first two records with a right checksum."""
    folder.mkdir()
    recorder = Recorder(folder)
    eventful(1, 2, decide=recorder.step)
    recorder.close()
    (path,) = segment_paths(folder)
    header, steps, *_ = read_records(path, KIND).payloads
    other = folder.with_name("other.tape")

    def silently(path: Path) -> object:
        return replay(path, lambda line: None)

    def with_header(data: bytes) -> object:
        write_records(other, KIND, [data, steps])
        return silently(other)

    def with_steps(data: bytes) -> object:
        write_records(other, KIND, [header, data])
        return silently(other)

    return [
        Decoder("a tape", (path.read_bytes(),), _at(other, silently)),
        Decoder("the header of a tape", (header,), with_header),
        Decoder("steps on a tape", (steps,), with_steps),
        Decoder("steps alone", (steps,), decode_steps),
    ]


def _keys(folder: Path) -> list[Decoder]:
    make_syncer_keys(folder)
    make_learner_keys(folder, "eu-1")
    secret, allowed = folder / "syncer.key", folder / "learners.d" / "eu-1.pub"
    public = allowed.read_bytes()
    return [
        Decoder(
            "a secret key", (secret.read_bytes(),), _at(secret, lambda _: read_door_keys(folder))
        ),
        Decoder("the list", (public,), _at(allowed, lambda _: read_allow_list(folder))),
    ]


def _model(folder: Path) -> list[Decoder]:
    """What a run begins with, what a learner says that its model is, and a config in the way."""
    folder.mkdir()
    tensors = {"weight": torch.ones(3, 5)}
    shard, index = folder / "model-1.safetensors", folder / "model.safetensors.index.json"
    modelfile.write_model(shard, tensors)
    index.write_text(json.dumps({"weight_map": {"weight": shard.name}}))
    whole, config = folder / "whole.safetensors", b'{"model_type": "gpt2", "n_layer": 2}'

    def said(data: bytes) -> object:
        with contextlib.suppress(UnicodeDecodeError):  # text is text by then: msgpack saw to it
            modelfile.write_model(folder / "said" / "model.safetensors", tensors, {}, data.decode())
        return None

    def in_the_way(path: Path) -> object:
        return modelfile.write_model(path.with_name("model.safetensors"), tensors, {}, "{}")

    (folder / "said").mkdir()
    (folder / "beside").mkdir()
    return [
        Decoder(
            "a safetensors file",
            (shard.read_bytes(),),
            _at(whole, lambda path: modelfile.load_init(str(path))),
        ),
        Decoder(
            "an index of shards",
            (index.read_bytes(),),
            _at(index, lambda path: modelfile.load_init(str(path.parent))),
        ),
        Decoder("a config that a learner sent", (config,), said),
        Decoder("a config in the way", (config,), _at(folder / "beside/config.json", in_the_way)),
    ]


def _configuration(path: Path) -> Decoder:
    sample = b'run = "x"\nquorum = 2\ngrace = 0.5\n[outer_options]\nmomentum = 0.9\n'
    return Decoder("a configuration", (sample,), _at(path, load_toml))

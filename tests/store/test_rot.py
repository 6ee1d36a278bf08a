"""Bytes that rot: recovery gives the truth or an error, never anything else. It only reads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_plugin.errors import DamagedError
from diloco_plugin.store.fragments import read_fragment
from diloco_plugin.store.recovery import recover
from tests.store.states import checkpoint, commit, content, same, started, tensors

TRUTH = {0: 3, 1: 3}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two manifests, three merges between them and two after the newer one."""
    root = tmp_path_factory.mktemp("state")
    store = started(root)
    commit(store, 0, 2)
    commit(store, 1, 2)
    checkpoint(store, past={"count": 2})
    commit(store, 1, 3)
    commit(store, 0, 3)
    store.close(clean=False)
    return root


def spoiled(path: Path, flips: int, start: int = 0) -> Iterator[int]:
    """The file with one bit changed from byte `start` on, `flips` times; then it is put back."""
    data = path.read_bytes()
    rng = random.Random(path.name)
    bits = range(8 * start, 8 * len(data))
    try:
        for bit in bits if flips >= len(bits) else rng.sample(bits, flips):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            yield bit
    finally:
        path.write_bytes(data)


def outcome(root: Path) -> str:
    try:
        found = recover(root)
    except DamagedError:
        return "damaged"
    assert {f: entry.record.version for f, entry in found.newest.items()} == TRUTH
    return "truth"


@pytest.mark.parametrize(
    ("name", "flips", "possible"),
    [
        ("manifest/000000002.json", 800, {"truth"}),
        ("manifest/000000001.json", 200, {"truth"}),
        ("journal/000002.log", 1500, {"truth", "damaged"}),
        ("journal/000001.log", 200, {"truth"}),
        ("run.json", 300, {"damaged"}),
        ("epoch.json", 300, {"damaged"}),
    ],
)
def test_after_any_flipped_bit_recovery_has_the_truth_or_says_damaged(
    state: Path, name: str, flips: int, possible: set[str]
) -> None:
    before = content(state)
    assert {outcome(state) for _ in spoiled(state / name, flips)} == possible
    assert content(state) == before


def test_a_rotten_last_record_never_takes_a_version_back(state: Path) -> None:
    path = state / "journal/000002.log"
    size = path.stat().st_size
    assert {outcome(state) for _ in spoiled(path, 800, size - 300)} == {"truth"}


def test_a_journal_cut_anywhere_loses_nothing_while_the_files_are_there(state: Path) -> None:
    path = state / "journal/000002.log"
    data = path.read_bytes()
    try:
        for cut in range(36, len(data)):
            path.write_bytes(data[:cut])
            assert outcome(state) == "truth"
    finally:
        path.write_bytes(data)


def test_a_rotten_manifest_without_an_older_one_is_damage(tmp_path: Path) -> None:
    store = started(tmp_path)
    store.close(clean=False)
    for _ in spoiled(tmp_path / "manifest/000000001.json", 200):
        with pytest.raises(DamagedError, match=r"manifest/000000001\.json is damaged"):
            recover(tmp_path)


def test_a_rotten_fragment_is_never_loaded_as_anything_else(state: Path) -> None:
    path = state / "frag/0001/v000000003.safetensors"
    seen: Counter[str] = Counter()
    for _ in spoiled(path, 1500):
        try:
            entry, values = read_fragment(path)
        except DamagedError:
            seen["damaged"] += 1
        else:
            assert entry.record.version == 3
            assert same(values, tensors(1, 3))
            seen["the same"] += 1
    assert seen["damaged"] > 1200

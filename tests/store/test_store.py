"""The state directory: what comes back, who may use it, what is kept, what is adopted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from diloco_plugin.errors import ConfigError, DamagedError, StateLockedError, StoreError
from diloco_plugin.store import Store, formats
from diloco_plugin.store.records import FILE_BYTES, RECORD_BYTES, read_records
from tests.store.states import (
    checkpoint,
    commit,
    content,
    held,
    opened,
    record,
    run_file,
    same,
    started,
    tensors,
)


def test_a_new_directory_has_no_run_and_an_epoch(tmp_path: Path) -> None:
    store = opened(tmp_path / "a" / "b", now_ms=1234)
    assert (store.run, store.past, store.records, store.notes) == (None, None, [], [])
    assert store.epoch == store.lineage == 1234
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert store.free_bytes() > 0
    store.close(clean=True)


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    store = started(tmp_path)
    returned = [commit(store, 0, 2), commit(store, 1, 2), commit(store, 0, 3)]
    store.close(clean=False)
    store = opened(tmp_path)
    assert store.run == run_file()
    assert store.past == {"lives": 1}
    assert store.records == returned
    assert held(store) == [3, 2]
    assert store.load(0)[0] == returned[2]
    checkpoint(store, past=[1, "x"])
    store.close(clean=True)
    store = opened(tmp_path)
    assert (store.past, store.records, held(store)) == ([1, "x"], [], [3, 2])
    store.close(clean=True)


def test_the_digest_of_a_record_covers_every_field_name_dtype_and_shape() -> None:
    plain, values = record(0, 1), tensors(0, 1)
    digests = {formats.digest_record(plain, values)}
    for name in ("epoch", "round", "fragment", "version", "clock"):
        changed = msgspec.structs.replace(plain, **{name: 77})
        digests.add(formats.digest_record(changed, values))
    digests.add(formats.digest_record(msgspec.structs.replace(plain, exact=False), values))
    digests.add(formats.digest_record(plain, {**values, "count": torch.tensor([1])}))
    digests.add(formats.digest_record(plain, {**values, "count": torch.tensor(1.0)}))
    renamed = {"tally" if name == "count" else name: v for name, v in values.items()}
    digests.add(formats.digest_record(plain, renamed))
    assert len(digests) == 10


def test_two_cannot_open_one_directory(tmp_path: Path) -> None:
    store = opened(tmp_path)
    before = content(tmp_path)
    with pytest.raises(StateLockedError, match=f"{tmp_path} is in use by process {os.getpid()}"):
        opened(tmp_path)
    program = (
        "import sys; from pathlib import Path; from diloco_plugin.store import Store\n"
        "Store.open(Path(sys.argv[1]), durability='commit', now_ms=1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert "StateLockedError" in done.stderr
    assert content(tmp_path) == before
    store.close(clean=True)
    opened(tmp_path).close(clean=True)


def test_epochs_grow_also_when_the_clock_goes_back(tmp_path: Path) -> None:
    epochs = []
    for now in (1000, 5, 2000, 0, 2001, 2000):
        store = opened(tmp_path, now_ms=now)
        epochs.append(store.epoch)
        store.close(clean=False)
    assert epochs == [1000, 1001, 2000, 2001, 2002, 2003]


@pytest.mark.parametrize(
    ("durability", "clean", "kept"),
    [("commit", False, True), ("interval", True, True), ("interval", False, False)],
)
def test_the_lineage_goes_on_while_nothing_announced_can_be_lost(
    tmp_path: Path, durability: str, clean: bool, kept: bool
) -> None:
    store = opened(tmp_path, durability=durability, now_ms=10)
    checkpoint(store, 1)
    store.close(clean=clean)
    store = opened(tmp_path, now_ms=20)
    assert (store.epoch, store.lineage) == (20, 10 if kept else 20)
    store.close(clean=False)


def test_what_recovery_needs_is_kept_and_nothing_else(tmp_path: Path) -> None:
    store = started(tmp_path)
    for version in range(2, 9):
        commit(store, 0, version)
        if version % 2:
            checkpoint(store)
    store.close(clean=True)
    assert [path for path in content(tmp_path) if not path.endswith("h.json")] == [
        "frag/0000/v000000007.safetensors",
        "frag/0000/v000000008.safetensors",
        "frag/0001/v000000001.safetensors",
        "journal/000003.log",
        "journal/000004.log",
        "manifest/000000003.json",
        "manifest/000000004.json",
        "run.json",
    ]
    (tmp_path / "manifest/000000004.json").write_bytes(b"{}")
    store = opened(tmp_path)
    assert held(store) == [8, 1]
    assert "went on from manifest 3" in store.notes[0]
    assert [r.version for r in store.records] == [6, 7, 8]
    assert list((tmp_path / "evidence").rglob("000000004.json"))
    checkpoint(store)
    store.close(clean=False)
    store = opened(tmp_path)
    assert (held(store), store.notes) == ([8, 1], [])
    store.close(clean=False)


def test_a_version_whose_record_is_torn_off_is_adopted(tmp_path: Path) -> None:
    store = started(tmp_path)
    records = [commit(store, *at) for at in ((0, 2), (1, 2), (0, 3))]
    store.close(clean=False)
    journal = tmp_path / "journal/000001.log"
    whole = journal.read_bytes()
    first = FILE_BYTES + RECORD_BYTES + len(read_records(journal, "journal").payloads[0])
    for cut in range(first, len(whole)):
        journal.write_bytes(whole[:cut])
        store = opened(tmp_path)
        assert store.records == records
        assert held(store) == [3, 2]
        assert store.lineage == 1
        store.close(clean=False)
        assert journal.stat().st_size == len(whole)


def test_a_torn_record_without_its_file_ends_the_lineage(tmp_path: Path) -> None:
    store = started(tmp_path)
    commit(store, 0, 2)
    store.close(clean=False)
    with (tmp_path / "journal/000001.log").open("ab") as journal:
        journal.write(b"garbage")
    store = opened(tmp_path)
    assert held(store) == [2, 1]
    assert store.lineage == store.epoch
    assert "They were cut off." in store.notes[0]
    store.close(clean=False)


def test_a_version_that_was_not_journaled_and_is_not_intact_is_damage(tmp_path: Path) -> None:
    store = started(tmp_path)
    commit(store, 0, 2)
    store.close(clean=False)
    journal, file = tmp_path / "journal/000001.log", tmp_path / "frag/0000/v000000002.safetensors"
    journal.write_bytes(journal.read_bytes()[:-1])
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    before = content(tmp_path)
    with pytest.raises(DamagedError, match=r"v000000002\.safetensors is damaged: digest"):
        opened(tmp_path)
    assert content(tmp_path) == before


def test_a_file_of_another_chain_is_not_adopted(tmp_path: Path) -> None:
    other = started(tmp_path / "other")
    commit(other, 0, 2)
    commit(other, 0, 3)
    other.close(clean=False)
    started(tmp_path / "this").close(clean=False)
    name = "frag/0000/v000000003.safetensors"
    (tmp_path / "this" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(DamagedError, match="does not follow version 1"):
        opened(tmp_path / "this")


def test_without_commits_what_came_after_the_checkpoint_is_rolled_back(tmp_path: Path) -> None:
    store = opened(tmp_path, durability="interval")
    checkpoint(store, 1)
    checkpoint(store, 5)
    store.close(clean=False)
    for name in ("manifest/000000002.json", "journal/000002.log"):
        (tmp_path / name).unlink()
    (tmp_path / "frag/0001/v000000009.safetensors.tmp").write_bytes(b"half")
    store = opened(tmp_path)
    assert held(store) == [1, 1]
    assert store.lineage == store.epoch
    assert "unfinished" in store.notes[0]
    assert not [name for name in content(tmp_path) if "v000000005" in name or ".tmp" in name]
    commit(store, 0, 2)
    store.close(clean=False)


def test_a_start_that_was_not_finished_leaves_nothing(tmp_path: Path) -> None:
    store = started(tmp_path)
    store.close(clean=False)
    (tmp_path / "manifest/000000001.json").unlink()
    life = formats.read_sealed(tmp_path / "epoch.json", formats.Life)
    with pytest.raises(DamagedError, match="all later ones are missing"):
        opened(tmp_path)
    unfinished = msgspec.structs.replace(life, started=False)
    (tmp_path / "epoch.json").write_bytes(formats.seal(unfinished))
    store = opened(tmp_path)
    assert store.run is None
    assert list(content(tmp_path)) == ["epoch.json"]
    checkpoint(store, 1)
    assert held(store) == [1, 1]
    store.close(clean=True)


@pytest.mark.parametrize(
    "name",
    ["run.json", "epoch.json", "journal/000001.log", "frag/0001/v000000002.safetensors"],
)
def test_a_missing_or_spoiled_file_is_named_and_nothing_is_touched(
    tmp_path: Path, name: str
) -> None:
    store = started(tmp_path)
    for at in ((0, 2), (1, 2), (0, 3)):
        commit(store, *at)
    store.close(clean=True)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    before = content(tmp_path)
    advice = f"diloco repair --state {tmp_path}`"
    with pytest.raises(DamagedError, match=f"{name}.*Nothing was changed.*{advice}"):
        opened(tmp_path)
    assert content(tmp_path) == before
    path.unlink()
    with pytest.raises(DamagedError, match=f"{name} is damaged: it is missing"):
        opened(tmp_path)


def test_a_newer_format_asks_for_an_update(tmp_path: Path) -> None:
    started(tmp_path).close(clean=False)
    newer = msgspec.structs.replace(run_file(), format=formats.FORMAT + 1)
    (tmp_path / "run.json").write_bytes(formats.seal(newer))
    with pytest.raises(ConfigError, match="Update diloco-plugin"):
        opened(tmp_path)


def test_a_directory_that_cannot_be_used_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(tmp_path / "file")


def test_a_version_that_does_not_follow_is_our_bug(tmp_path: Path) -> None:
    store = started(tmp_path)
    with pytest.raises(ValueError, match="does not follow version 1"):
        commit(store, 0, 1)
    with pytest.raises(StoreError, match="cannot be used again"):
        commit(store, 0, 2)
    store.close(clean=True)


def test_a_record_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    store = started(tmp_path)
    push = msgspec.structs.replace(record(0, 2).contributions[0], norm=float("nan"))
    with pytest.raises(ValueError, match="JSON cannot hold"):
        store.commit(msgspec.structs.replace(record(0, 2), contributions=(push,)), tensors(0, 2))
    store.close(clean=False)
    store = Store.open(tmp_path, durability="commit", now_ms=1)
    assert same(store.load(0)[1], tensors(0, 1))
    store.close(clean=True)

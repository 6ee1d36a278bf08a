"""A damaged state is made usable again: nothing is lost silently and all evidence is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco_plugin.errors import ConfigError, DamagedError, StateLockedError
from diloco_plugin.store import digest_of
from diloco_plugin.store.repair import FragmentState, examine, rebuild
from tests.store.states import checkpoint, commit, content, held, opened, same, started, tensors


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Fragment 0 at version 3, fragment 1 at version 2; the manifest knows 2 and 1."""
    root = tmp_path / "state"
    store = started(root)
    commit(store, 0, 2)
    checkpoint(store, past={"count": 1})
    commit(store, 0, 3)
    commit(store, 1, 2)
    store.close(clean=False)
    return root


def spoil(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return bytes(data)


def refused(root: Path) -> None:
    with pytest.raises(DamagedError):
        start(root)


def start(root: Path) -> None:
    store = opened(root)
    try:
        held(store)
    finally:
        store.close(clean=False)


def test_an_intact_state_has_no_problems_and_is_left_alone(state: Path) -> None:
    before = content(state)
    report = examine(state)
    assert report.problems == []
    theta = [digest_of(tensors(f, v)["theta"]) for f, v in ((0, 3), (1, 2))]
    assert report.fragments == [
        FragmentState(0, 3, theta[0], True, 3),
        FragmentState(1, 2, theta[1], True, 2),
    ]
    assert rebuild(state, {}) == ["Nothing is damaged."]
    assert content(state) == before


def test_a_lost_version_is_not_given_up_silently(state: Path) -> None:
    damaged = state / "frag/0000/v000000003.safetensors"
    rotten = spoil(damaged)
    report = examine(state)
    wanted = digest_of(tensors(0, 3)["theta"])
    assert report.fragments[0] == FragmentState(0, 3, wanted, False, 2)
    assert "v000000003.safetensors is damaged: digest" in report.problems[0]
    before = content(state)
    wrong = {0: (torch.ones(5),)}
    with pytest.raises(DamagedError, match=rf"version 3 with digest {wanted} \(version 2 is"):
        rebuild(state, wrong)
    assert content(state) == before
    notes = rebuild(state, wrong, accept_loss=True)
    assert notes[0] == "fragment 0: version 3 is lost; version 2 is used."
    (evidence,) = (state / "evidence").glob("*/frag-0000-v000000003.safetensors")
    assert evidence.read_bytes() == rotten
    store = opened(state)
    assert (held(store), store.past) == ([2, 2], {"count": 1})
    assert store.lineage == store.epoch
    assert [(r.fragment, r.version) for r in store.records] == [(1, 2)]
    commit(store, 0, 3)
    checkpoint(store)
    store.close(clean=False)
    store = opened(state)
    assert held(store) == [3, 2]
    store.close(clean=False)
    assert evidence.exists()


def test_a_learner_gives_a_lost_version_back(state: Path) -> None:
    spoil(state / "frag/0000/v000000003.safetensors")
    theta = tensors(0, 3)["theta"]
    notes = rebuild(state, {0: (torch.ones(5), theta)})
    assert "version 3 was taken from a learner, with the outer state of version 2." in notes[0]
    store = opened(state)
    record, values = store.load(0)
    assert record.version == 3
    assert same(values, {**tensors(0, 2), "theta": theta})
    assert store.load(1)[0].version == 2
    assert [(r.fragment, r.version) for r in store.records] == [(1, 2), (0, 3)]
    assert store.lineage == store.epoch
    store.close(clean=False)
    assert examine(state).problems == []


def test_without_any_older_version_only_a_learner_helps(state: Path) -> None:
    for version in (2, 3):
        spoil(state / f"frag/0000/v{version:09}.safetensors")
    with pytest.raises(DamagedError, match="no version is intact"):
        rebuild(state, {}, accept_loss=True)
    notes = rebuild(state, {0: (tensors(0, 3)["theta"],)})
    assert "without outer state" in notes[0]
    store = opened(state)
    assert same(store.load(0)[1], {"theta": tensors(0, 3)["theta"]})
    store.close(clean=False)


def test_a_version_that_is_older_than_the_manifest_comes_back_in_the_records(state: Path) -> None:
    store = opened(state)
    checkpoint(store, past={"count": 3})
    store.close(clean=False)
    spoil(state / "frag/0000/v000000003.safetensors")
    refused(state)
    rebuild(state, {}, accept_loss=True)
    store = opened(state)
    assert held(store) == [2, 2]
    assert [(r.fragment, r.version) for r in store.records] == [(0, 2)]
    store.close(clean=False)


@pytest.mark.parametrize("name", ["journal/000002.log", "epoch.json"])
def test_a_damaged_journal_or_epoch_loses_nothing(state: Path, name: str) -> None:
    data = bytearray((state / name).read_bytes())
    data[80] ^= 1
    (state / name).write_bytes(data)
    refused(state)
    assert name in examine(state).problems[0]
    rebuild(state, {})
    store = opened(state)
    assert held(store) == [3, 2]
    assert store.lineage == store.epoch > 1
    store.close(clean=False)
    assert list((state / "evidence").glob(f"*/{name.replace('/', '-')}"))


def test_when_no_manifest_is_left_the_past_must_be_given(state: Path) -> None:
    for number in (1, 2):
        spoil(state / f"manifest/{number:09}.json")
    refused(state)
    with pytest.raises(DamagedError, match="no manifest can be read"):
        rebuild(state, {})
    rebuild(state, {}, past={"count": 99})
    store = opened(state)
    assert (held(store), store.past, store.records) == ([3, 2], {"count": 99}, [])
    store.close(clean=False)


def test_a_rotten_newest_manifest_is_no_problem(state: Path) -> None:
    spoil(state / "manifest/000000002.json")
    assert examine(state).problems == []


def test_run_json_is_made_anew_from_its_copy(state: Path) -> None:
    whole = (state / "run.json").read_bytes()
    for spoiling in (spoil, Path.unlink):
        spoiling(state / "run.json")
        refused(state)
        assert "run.json was made anew." in rebuild(state, {})
        assert (state / "run.json").read_bytes() == whole
        store = opened(state)
        assert held(store) == [3, 2]
        store.close(clean=False)
        assert (state / "run.json").read_bytes() == whole


def test_without_run_json_and_its_copy_there_is_nothing_to_rebuild_for(state: Path) -> None:
    spoil(state / "run.json")
    spoil(state / "epoch.json")
    before = content(state)
    with pytest.raises(DamagedError, match="are lost"):
        rebuild(state, {})
    assert content(state) == before


def test_a_repair_that_is_cut_short_can_be_done_again(state: Path) -> None:
    spoil(state / "frag/0000/v000000003.safetensors")
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    rebuild(state, {}, accept_loss=True)
    (state / "manifest/000000003.json").unlink()
    damaged = state / "frag/0000/v000000003.safetensors"
    damaged.write_bytes(before[damaged])
    assert examine(state).fragments[0].version == 3
    rebuild(state, {}, accept_loss=True)
    store = opened(state)
    assert held(store) == [2, 2]
    store.close(clean=False)
    assert len(list((state / "evidence").iterdir())) == 2


def test_a_state_in_use_or_none_at_all_is_not_repaired(state: Path, tmp_path: Path) -> None:
    store = opened(state)
    for work in (examine, lambda root: rebuild(root, {})):
        with pytest.raises(StateLockedError):
            work(state)
        with pytest.raises(ConfigError, match="does not exist"):
            work(tmp_path / "nothing")
    store.close(clean=True)
    with pytest.raises(ConfigError, match="holds no run"):
        examine(tmp_path)

"""Whatever call fails, wherever the process stops or the power goes: what returned is there."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from diloco_plugin.errors import NoRoomError, StoreError
from diloco_plugin.store import Store
from tests.store.disks import Disk, ShadowDisk, Stopped
from tests.store.states import (
    FRAGMENTS,
    Story,
    checkpoint,
    commit,
    held,
    opened,
    started,
)

#: None is a checkpoint; after the fourth step the syncer is started again.
STEPS = ((0, 2), (1, 2), None, (0, 3), (0, 4), (1, 3), None, (1, 4))


def live(root: Path, story: Story, *, retry: bool = False) -> Counter[str]:
    """Two lives of a syncer; `retry` tries a step once more that had no room."""
    seen: Counter[str] = Counter()
    store = opened(root)
    try:
        step(store, story, "start", retry, seen)
        for index, at in enumerate(STEPS):
            if index == len(STEPS) // 2:
                store.close(clean=False)
                store = opened(root)
            step(store, story, at, retry, seen)
        store.close(clean=True)
    finally:
        store.close(clean=False)
    return seen


def step(
    store: Store, story: Story, at: tuple[int, int] | str | None, retry: bool, seen: Counter[str]
) -> None:
    for attempt in range(2):
        try:
            if isinstance(at, tuple):
                story.tried[at[0]] = at[1]
                commit(store, *at)
                story.returned[at[0]] = at[1]
            elif at:
                story.tried = dict.fromkeys(range(FRAGMENTS), 1)
                checkpoint(store, 1)
                story.returned, story.started = dict(story.tried), True
            else:
                checkpoint(store, past={"at": len(story.returned)})
            return
        except NoRoomError:
            seen["no room"] += 1
            if attempt or not retry:
                raise
            if story.started:
                versions = [story.returned[f] for f in range(FRAGMENTS)]
                assert held(store) == versions


def calls_of_two_lives(root: Path) -> list[str]:
    disk = Disk()
    with disk.in_place():
        live(root, Story())
    return disk.calls


def test_a_commit_makes_bytes_then_name_then_record_durable(tmp_path: Path) -> None:
    store = started(tmp_path)
    disk = Disk()
    with disk.in_place():
        commit(store, 0, 2)
    store.close(clean=False)
    assert disk.calls == ["save", "fsync", "rename", "fsync", "write", "fdatasync"]


@pytest.mark.parametrize("error", [0, errno.EIO, errno.ENOSPC], ids=["stop", "EIO", "ENOSPC"])
def test_whatever_call_fails_all_that_returned_is_there(tmp_path: Path, error: int) -> None:
    calls = calls_of_two_lives(tmp_path / "whole")
    seen: Counter[str] = Counter()
    for at in range(len(calls)):
        root, story, disk = tmp_path / str(at), Story(), Disk(at, error)
        try:
            with disk.in_place():
                seen += live(root, story, retry=error == errno.ENOSPC)
            seen["went on"] += 1
        except (Stopped, StoreError, NoRoomError) as failure:
            seen[type(failure).__name__] += 1
        if root.exists():
            story.check(root)
    assert len(calls) > 80
    if error == errno.ENOSPC:
        assert seen["went on"] > len(calls) // 3, seen
        assert seen["no room"] > len(calls) // 3, seen
    else:
        assert not seen["went on"] + seen["no room"], seen


def test_whatever_the_power_cut_leaves_all_that_returned_is_there(tmp_path: Path) -> None:
    class Cuts(ShadowDisk):
        images = 0

        def done(self, name: str, *args: object) -> None:
            super().done(name, *args)
            image = tmp_path / "image"
            with pytest.MonkeyPatch.context() as patch:
                for call, real in self._real.items():
                    patch.setattr(os, call, real)
                for seed in range(4):
                    rng = random.Random(1000 * len(self.calls) + seed) if seed else None
                    self.image(image, rng)
                    story.check(image)
                    shutil.rmtree(image)
                    self.images += 1

    (tmp_path / "disk").mkdir()
    root, story = tmp_path / "disk/state", Story()
    disk = Cuts(tmp_path / "disk/state")
    with disk.in_place():
        live(root, story)
    disk.close()
    assert disk.images > 300


def test_on_a_full_disk_nothing_changes_until_there_is_room(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from diloco_plugin.errors import ConfigError, NoRoomError
from tests.store.states import checkpoint, content, held, opened, record, started, tensors

root = Path(sys.argv[1]) / "state"
ballast = root.parent / "ballast"
store = started(root)
big = tensors(0, 2, elements=60_000)
refused = 0
for room in range(0, 400, 4):
    with ballast.open("wb", buffering=0) as file:
        while store.free_bytes() > 1024 * room:
            file.write(bytes(4096))
    before = content(root)
    try:
        stored = store.commit(record(0, 2), big)
        break
    except NoRoomError:
        assert content(root) == before
        assert held(store) == [1, 1]
    try:
        checkpoint(store)
    except NoRoomError:
        assert held(store) == [1, 1]
    refused += 1
    ballast.unlink()
assert refused > 50, refused
store.close(clean=False)
ballast.unlink()
store = opened(root)
assert store.records == [stored]
assert store.load(0)[0] == stored
store.close(clean=True)
print("refused", refused)
"""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = f'mount -t tmpfs -o size=2m none {disk} && exec {sys.executable} -c "$0" {disk}'
    unshare = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-Urm"]
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", str(disk)]).returncode:
        pytest.skip("no tmpfs of one's own here")
    done = subprocess.run(
        [*unshare, "sh", "-c", mounted, program], capture_output=True, text=True, cwd=Path.cwd()
    )
    assert done.stdout.startswith("refused"), done.stderr

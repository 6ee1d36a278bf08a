"""Builders for tests of the store: a run of two small fragments, and what was done to it."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from diloco_plugin.store import Contribution, MergeRecord, RunFile, Store, digest_of

FRAGMENTS = 2


def run_file(fragments: int = FRAGMENTS) -> RunFile:
    return RunFile(
        run="test",
        parameters={"quorum": 1, "outer_lr": 0.7},
        tensors=(("a", (5,), "float32", "weight", ""), ("b", (6,), "bfloat16", "buffer", "")),
        fragments=fragments,
        fingerprint="f" * 64,
    )


def tensors(fragment: int, version: int, elements: int = 5) -> dict[str, Tensor]:
    """Values that differ for every fragment and version, the outer state in another dtype."""
    theta = torch.arange(elements + fragment, dtype=torch.float32) + 10 * version
    return {"theta": theta, "momentum": (theta / 3).bfloat16(), "count": torch.tensor(version)}


def record(fragment: int, version: int, *, epoch: int = 1, round_: int = 0) -> MergeRecord:
    push = Contribution(
        name="eu-1", incarnation="0" * 32, base=version - 1, steps=3, tokens=99, norm=0.1 * version
    )
    return MergeRecord(
        epoch=epoch,
        round=round_ or 10 * version + fragment,
        fragment=fragment,
        version=version,
        clock=24 * version,
        exact=True,
        contributions=(push,),
        base_digest=digest_of(tensors(fragment, version)["theta"]),
    )


def opened(root: Path, *, durability: str = "commit", now_ms: int = 1) -> Store:
    return Store.open(root, durability=durability, now_ms=now_ms)


def checkpoint(store: Store, version: int | None = None, past: object = None) -> None:
    """Also writes `version` of every fragment, if given."""
    fragments = [] if version is None else range(FRAGMENTS)
    store.checkpoint(
        run_file(), past, [(record(f, version or 0), tensors(f, version or 0)) for f in fragments]
    )


def commit(store: Store, fragment: int, version: int) -> MergeRecord:
    return store.commit(record(fragment, version), tensors(fragment, version))


def started(root: Path) -> Store:
    store = opened(root)
    checkpoint(store, 1, past={"lives": 1})
    return store


def held(store: Store) -> list[int]:
    """The newest version of every fragment, loaded and compared with what was stored."""
    found = []
    for fragment in range(FRAGMENTS):
        loaded, values = store.load(fragment)
        assert same(values, tensors(fragment, loaded.version))
        found.append(loaded.version)
    return found


def same(values: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return values.keys() == expected.keys() and all(
        values[name].dtype == expected[name].dtype and torch.equal(values[name], expected[name])
        for name in expected
    )


def content(root: Path) -> dict[str, str]:
    """A digest of every file but the lock."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


@dataclasses.dataclass
class Story:
    """What was tried and what returned, step by step: the truth that recovery is held to."""

    started: bool = False
    returned: dict[int, int] = dataclasses.field(default_factory=dict)
    tried: dict[int, int] = dataclasses.field(default_factory=dict)

    def check(self, root: Path) -> None:
        """Everything that returned is there, and at most the step that was tried."""
        store = opened(root)
        try:
            if store.run is None:
                assert not self.started
                return
            for fragment, version in enumerate(held(store)):
                allowed = {self.returned.get(fragment), self.tried.get(fragment)}
                assert version in allowed, (fragment, version, self)
            newest = {r.fragment: r.version for r in store.records}
            assert all(held(store)[f] == v for f, v in newest.items())
            assert store.lineage <= 2 or not self.started, store.notes
        finally:
            store.close(clean=False)

"""State directories of real runs, and how they are damaged."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import diloco_plugin
from diloco_plugin.store import THETA
from diloco_plugin.store.formats import fragment_path, numbers, versions
from diloco_plugin.store.fragments import read_fragment
from diloco_plugin.syncer import Syncer
from tests.end_to_end.fleet import Trainee, merged, sgd, small_model, train_until
from tests.syncers import running_syncer

RUN = {"sync_every": 4, "fragments": 2, "overlap": 1}
FLAGS = ("--sync-every", "4", "--fragments", "2", "--overlap", "1")
#: A step of a learner that has time to take every merge before the next one.
SLOW = 0.2


def finished_run(state: Path, **parameters: object) -> dict[str, Tensor]:
    """A run of two fragments that was stopped in order; returns its model."""
    with running_syncer(**{**RUN, **parameters}, config={"state": str(state)}) as syncer:
        model = small_model()
        optimizer = sgd(model)
        with diloco_plugin.attach(model, optimizer, syncer.address, name="a") as learner:
            train_until(model, optimizer, lambda: merged(learner) >= 6)
    return model_of(syncer)


def model_of(syncer: Syncer) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in syncer._merging.the_model.tensors().items()}


def newest(state: Path, fragment: int) -> Path:
    """The file of the newest version of a fragment."""
    return fragment_path(state, fragment, versions(state, fragment)[-1])


def theta(path: Path) -> Tensor:
    return read_fragment(path)[1][THETA]


def rot(path: Path, at: int = -1) -> bytes:
    """Change one byte; returns what is there now."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return bytes(data)


def rot_in_the_middle(path: Path) -> bytes:
    return rot(path, path.stat().st_size // 2)


def journal(state: Path) -> Path:
    """The newest journal."""
    return state / "journal" / f"{numbers(state, 'journal')[-1]:06}.log"


def bases(trainee: Trainee) -> list[int]:
    """The version of every fragment's base at a learner."""
    learner = trainee.learner
    if learner is None or learner._core is None:
        return []
    return [part.base for part in learner._core.parts]


def base_of(trainee: Trainee, fragment: int) -> Tensor:
    """A copy of a learner's base of a fragment, flat."""
    assert trainee.learner is not None
    replica = trainee.learner._session._replica
    assert replica is not None
    elements = replica.layout.fragments[fragment].elements
    return torch.clone(replica.base_slice(fragment, 0, elements))

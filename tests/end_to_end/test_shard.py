"""Each learner its own part of the data."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset

import diloco_plugin
from diloco_plugin.errors import ConfigError, UnreachableError
from tests.end_to_end.fleet import small_model
from tests.syncers import running_syncer


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_four_learners_divide_the_data_without_rest_or_overlap() -> None:
    data = list(range(103))
    with running_syncer(learners=4) as syncer:
        parts = [diloco_plugin.shard(data, syncer.address, name=f"l{i}") for i in range(4)]
    seen = [part[place] for part in parts for place in range(len(part))]
    assert sorted(seen) == data


def test_a_learner_keeps_its_part_when_it_joins_and_when_it_returns() -> None:
    data = list(range(40))
    with running_syncer(learners=2) as syncer:
        diloco_plugin.shard(data, syncer.address, name="first")
        part = diloco_plugin.shard(data, syncer.address, name="second")
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco_plugin.attach(model, optimizer, syncer.address, name="second") as learner:
            assert (learner.index, learner.count) == (1, 2)
        again = diloco_plugin.shard(data, syncer.address, name="second")
    assert [part[i] for i in range(len(part))] == [again[i] for i in range(len(again))]


def test_streams_and_datasets_with_a_shard_of_their_own_are_divided_too() -> None:
    parts = [list(diloco_plugin.shard(Numbers(), index=i, count=3)) for i in range(3)]
    assert sorted(number for part in parts for number in part) == list(range(10))

    class Own:
        def shard(self, num_shards: int, index: int) -> tuple[int, int]:
            return num_shards, index

    assert diloco_plugin.shard(Own(), index=1, count=3) == (3, 1)


def test_without_an_expected_number_of_learners_the_fix_is_named() -> None:
    with running_syncer() as syncer, pytest.raises(ConfigError, match="--learners N"):
        diloco_plugin.shard([1, 2], syncer.address, name="a")


def test_a_wrong_place_and_a_missing_syncer_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="0 <= index < count"):
        diloco_plugin.shard([1], index=2, count=2)
    with pytest.raises(ConfigError, match="together"):
        diloco_plugin.shard([1], index=2)
    with pytest.raises(ConfigError, match="cannot divide"):
        diloco_plugin.shard(object(), index=0, count=1)
    monkeypatch.setattr("diloco_plugin.data.TIMEOUT_SECONDS", 0.3)
    with pytest.raises(UnreachableError):
        diloco_plugin.shard([1], "tcp://127.0.0.1:9", name="a")

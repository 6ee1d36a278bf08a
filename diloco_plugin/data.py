"""Each learner its own part of the data: `shard()`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch.utils.data import Dataset, IterableDataset

from diloco_plugin.config import default_address
from diloco_plugin.credentials import learner_keys
from diloco_plugin.errors import ConfigError, RefusedError
from diloco_plugin.learner.naming import check_name, default_name
from diloco_plugin.net.keys import Insecure, LineKeys

TIMEOUT_SECONDS: Final = 60.0


def shard(
    dataset: Any,
    address: str | None = None,
    *,
    name: str | None = None,
    keys: str | None = None,
    index: int | None = None,
    count: int | None = None,
) -> Any:
    """This learner's own part of `dataset`: every `count`-th example, from the `index`-th on.

    The place comes from the syncer, which was started with `--learners N`; it stays the learner's
    as long as it has the same name. One learner more than N shares the part of another, and is
    warned when it joins. With `index` and `count` nobody is asked. Within a learner of several
    ranks, the usual distributed sampler divides the part further.

    Args:
        dataset: a map-style or iterable PyTorch dataset, a Hugging Face dataset (divided by its own
            `shard`), or any sequence.
        address: of the syncer; default: the environment variable `DILOCO_SYNCER`.
        name: the same as the learner is attached with.
        keys: the same as the learner is attached with.

    Raises:
        ConfigError: the syncer does not know how many learners there are, or an argument is wrong.
        UnreachableError: no syncer answered.
        RefusedError: the syncer said no.
    """
    if (index is None) != (count is None):
        raise ConfigError("shard() takes index and count together, or neither.")
    if index is None or count is None:
        where = default_address(address)
        security = learner_keys(where, keys, name)
        name = name or default_name(security)
        check_name(name)
        index, count = _place(where, name, security)
    if count < 1 or not 0 <= index < count:
        raise ConfigError(f"shard(index={index}, count={count}): use 0 <= index < count.")
    own = getattr(dataset, "shard", None)
    if callable(own):
        return own(num_shards=count, index=index)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return _Part(dataset, index, count)
    if hasattr(dataset, "__iter__"):
        return _Stream(dataset, index, count)
    raise ConfigError(
        f"shard() cannot divide a {type(dataset).__name__}: it has neither __getitem__ and __len__"
        " nor __iter__. Divide it yourself by learner.index and learner.count."
    )


def _place(address: str, name: str, keys: LineKeys | Insecure | None) -> tuple[int, int]:
    from diloco_plugin.net.asking import ask
    from diloco_plugin.wire.framing import decode_to_learner, encode
    from diloco_plugin.wire.messages import Place, PlaceRequest, Refuse

    request = encode(PlaceRequest(name=name))
    answer = decode_to_learner(ask(address, request, TIMEOUT_SECONDS, keys))
    if isinstance(answer, Refuse):
        raise RefusedError(answer.code, answer.text)
    if not isinstance(answer, Place):
        raise RefusedError("place", f"the syncer at {address} does not tell places: upgrade it.")
    if answer.count == 0:
        raise ConfigError(
            f"the syncer at {address} does not know how many learners will divide the data: start"
            " it with --learners N (and --override, if it goes on from its --state), or call"
            " shard(dataset, index=..., count=...)."
        )
    return answer.index % answer.count, answer.count


class _Part(Dataset[Any]):
    def __init__(self, dataset: Any, index: int, count: int) -> None:
        self._dataset = dataset
        self._places = range(index, len(dataset), count)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int) -> Any:
        return self._dataset[self._places[place]]


class _Stream(IterableDataset[Any]):
    def __init__(self, dataset: Any, index: int, count: int) -> None:
        self._dataset = dataset
        self._index, self._count = index, count

    def __iter__(self) -> Iterator[Any]:
        for place, example in enumerate(self._dataset):
            if place % self._count == self._index:
                yield example

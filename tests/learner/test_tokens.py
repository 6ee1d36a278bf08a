"""Work is counted once, in training only, and without asking an accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diloco_plugin.learner.tokens import TokenCounter


class Tiny(nn.Module):
    """A language model in miniature, called as Hugging Face models are."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 16)
        self.checkpointed = checkpointed

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.table(input_ids)
        head = self.head
        logits: Tensor = (
            checkpoint(head, hidden, use_reentrant=False) if self.checkpointed else head(hidden)
        )
        return logits


IDS = torch.zeros(2, 8, dtype=torch.int64)
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])


def test_ids_count_as_tokens() -> None:
    model = Tiny()
    counter = TokenCounter(model)
    model(input_ids=IDS)
    model(input_ids=IDS)
    assert counter.take() == 32
    assert counter.take() == 0


def test_padding_does_not_count() -> None:
    model = Tiny()
    counter = TokenCounter(model)
    model(input_ids=IDS, attention_mask=MASK)
    model(input_ids=IDS, attention_mask=MASK.bool())
    assert counter.take() == 26


@pytest.mark.parametrize("mask", [torch.zeros(2, 1, 8, 8), torch.zeros(2, 8), None])
def test_a_mask_that_does_not_mark_tokens_is_not_summed(mask: Tensor | None) -> None:
    counter = TokenCounter(None)
    counter.count_batch({"attention_mask": mask, "input_ids": IDS})
    assert counter.take() == 16


def test_evaluation_does_not_count() -> None:
    model = Tiny()
    counter = TokenCounter(model)
    with torch.no_grad():
        model(input_ids=IDS)
    model.eval()
    model(input_ids=IDS)
    assert counter.take() == 0


def test_models_without_tokens_count_samples() -> None:
    model = nn.Linear(4, 2)
    counter = TokenCounter(model)
    model(torch.zeros(5, 4))
    assert counter.take() == 5


def test_the_users_function_wins_and_sees_what_forward_sees() -> None:
    seen: list[Any] = []

    def token_fn(batch: Any) -> int:
        seen.append(batch)
        return 7

    model = Tiny()
    counter = TokenCounter(model, token_fn)
    model(input_ids=IDS, attention_mask=MASK)
    model(IDS)
    model(IDS, MASK)
    assert counter.take() == 21
    assert set(seen[0]) == {"input_ids", "attention_mask"}
    assert seen[1] is IDS
    assert [id(tensor) for tensor in seen[2]] == [id(IDS), id(MASK)]


def test_detach_stops_counting_but_forgets_nothing() -> None:
    model = Tiny()
    counter = TokenCounter(model)
    model(input_ids=IDS)
    counter.detach()
    counter.detach()
    model(input_ids=IDS)
    counter.add(3)
    assert counter.take() == 19


def train(model: nn.Module, counter: TokenCounter, steps: int, **inputs: Tensor) -> list[int]:
    taken = []
    for _ in range(steps):
        model(**inputs).sum().backward()
        taken.append(counter.take())
    return taken


def test_gradient_checkpointing_inside_does_not_count_twice() -> None:
    model = Tiny(checkpointed=True)
    assert train(model, TokenCounter(model), 3, input_ids=IDS) == [16, 16, 16]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_the_whole_model_does_not_count_twice(reentrant: bool) -> None:
    model = nn.Linear(4, 2)
    counter = TokenCounter(model)
    for _ in range(2):
        inputs = torch.zeros(5, 4, requires_grad=True)
        checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
        assert counter.take() == 5


@pytest.mark.parametrize("how", ["before", "after", "in place"])
def test_a_compiled_model_counts_the_same_without_recompiling(how: str) -> None:
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    model = Tiny()
    compiled: Any = torch.compile(model, backend=backend) if how == "before" else model
    counter = TokenCounter(model)
    if how == "after":
        compiled = torch.compile(model, backend=backend)
    if how == "in place":
        model.compile(backend=backend)
    assert train(compiled, counter, 12, input_ids=IDS, attention_mask=MASK) == [13] * 12
    assert graphs <= 2


@dataclass
class Batch:
    input_ids: Tensor
    labels: Tensor


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"input_ids": IDS, "attention_mask": MASK}, 13),
        ({"input_ids": IDS}, 16),
        (({"input_ids": IDS}, torch.zeros(2)), 16),
        (Batch(IDS, IDS), 16),
        ({"image": torch.zeros(6, 3), "label": torch.zeros(6)}, 6),
        ([torch.zeros(4, 3), torch.zeros(4)], 4),
        ((["name"], (torch.zeros(3, 2),)), 3),
        (torch.zeros(9, 2), 9),
        (torch.tensor(1.0), 1),
        (["no", "tensors"], 0),
        (None, 0),
    ],
)
def test_batches_of_every_shape_are_counted(batch: Any, count: int) -> None:
    counter = TokenCounter(None)
    counter.count_batch(batch)
    assert counter.take() == count


def test_a_hugging_face_batch_is_a_mapping() -> None:
    transformers = pytest.importorskip("transformers")
    counter = TokenCounter(None)
    counter.count_batch(transformers.BatchEncoding({"input_ids": IDS, "attention_mask": MASK}))
    assert counter.take() == 13


def test_padding_that_arrives_late_is_taken_back_and_the_sum_is_exact() -> None:
    # What happens with masks on an accelerator, without one.
    counter = TokenCounter(None)
    late = iter([0, 20, 3, 0])
    counter._settle = lambda: next(late)  # type: ignore[method-assign]
    taken = []
    for size in (24, 16, 16, 0):
        counter.add(size)
        taken.append(counter.take())
    assert taken == [24, 0, 9, 0]
    assert sum(taken) == 24 + 16 + 16 - 20 - 3

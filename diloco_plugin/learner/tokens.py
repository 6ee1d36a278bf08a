"""How much work a learner has done: tokens, or samples where a model has no tokens.

Counted where it costs nothing: in a pre-hook of the model's forward, or from a batch that a
framework hands over. Nothing here waits for an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_MASK: Final = "attention_mask"
_IDS: Final = "input_ids"


class TokenCounter:
    """Sums up units of work since the last ``take``. Training thread only.

    What counts as work, in this order: what ``token_fn`` says; the ones in ``attention_mask``; the
    size of ``input_ids``; else samples, the first side of the first tensor found.

    Args:
        model: the innermost model, counted in training mode with grad mode on: evaluations, and the
            second pass of gradient checkpointing, do not count. None counts by the methods only.
        token_fn: gets the batch: the keyword arguments of ``forward`` if there are any, else its
            positional argument (a tuple, if several).
    """

    def __init__(
        self, model: nn.Module | None, token_fn: Callable[[Any], int] | None = None
    ) -> None:
        self._token_fn = token_fn
        self._total = 0
        # Masks on an accelerator: their padding is summed there, read one take later, and taken
        # back.
        self._padding: Tensor | None = None
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None
        self._forwards = 0
        self._handle: RemovableHandle | None = None
        if model is not None:
            self._handle = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def take(self) -> int:
        """Return the work since the last take, and start over.

        With masks on an accelerator, padding counts at first and is taken back by the next take, by
        when it is known without waiting.
        """
        total = self._total - self._settle()
        # Padding can only exceed a later, smaller batch: then the rest is taken back later still.
        taken = max(0, total)
        self._total = total - taken
        self._forwards = 0
        return taken

    def add(self, count: int) -> None:
        """Count this many units, whatever they are."""
        self._total += count

    def count_batch(self, batch: Any) -> None:
        """Count a batch: a tensor, or a mapping, sequence or dataclass of such. See the class."""
        if self._token_fn is not None:
            self._total += int(self._token_fn(batch))
            return
        fields = _mapping(batch)
        mask, ids = fields.get(_MASK), fields.get(_IDS)
        # Any other mask (additive, or one for each pair of positions) does not count tokens.
        if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
            self._count_mask(mask)
        elif isinstance(ids, Tensor):
            self._total += ids.numel()
        else:
            first = _first_tensor(batch)
            if first is not None:
                self._total += first.shape[0] if first.dim() else 1

    def detach(self) -> None:
        """Remove the hook; what was counted stays. Harmless when repeated."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if torch._C._current_graph_task_id() != -1:
            # Inside backward: checkpointing runs the model again. The reentrant kind ran it without
            # grad mode the first time, so there it has not been counted yet.
            if self._forwards > 0:
                self._forwards -= 1
                return
        else:
            self._forwards += 1
        self.count_batch(kwargs or (args[0] if len(args) == 1 else args))

    def _count_mask(self, mask: Tensor) -> None:
        if mask.device.type != "cuda":
            self._total += int(mask.sum())
            return
        self._total += mask.numel()
        padding = mask.numel() - mask.sum()
        self._padding = padding if self._padding is None else self._padding + padding

    def _settle(self) -> int:
        """Return the padding that the last take started to fetch, and start to fetch this one's."""
        arrived = 0
        if self._arriving is not None:
            value, event = self._arriving
            event.synchronize()  # recorded a whole step ago
            arrived = int(value)
            self._arriving = None
        if self._padding is not None:
            value = torch.empty((), dtype=torch.int64, pin_memory=True)
            value.copy_(self._padding, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._padding.device))
            self._arriving = (value, event)
            self._padding = None
        return arrived


def _mapping(batch: Any) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, Tensor):
        return {}  # dynamo, which may trace this, cannot look into its attributes
    # A pair (inputs, labels) whose inputs are a mapping is as common as the mapping itself.
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], Mapping):
        return batch[0]
    attributes = getattr(batch, "__dict__", None)
    return attributes if isinstance(attributes, Mapping) else {}


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    items: Iterable[Any] = ()
    items = batch if isinstance(batch, (list, tuple)) else _mapping(batch).values()
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)

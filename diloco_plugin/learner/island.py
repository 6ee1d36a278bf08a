"""A learner made of several ranks: who speaks for them, and how the others hear what to do.

A merge that only rank 0 applies makes the ranks of a DDP job diverge silently, so every rank
carries out every plan. All exchanges are plain tensors over gloo: nothing is pickled, no
accelerator waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

#: Numbers that fit into the one broadcast that every boundary pays for.
PLAN_INLINE: Final = 31


class Solo:
    """A learner with one rank: everything is already where it should be."""

    leader: Final = True
    size: Final = 1

    def share_plan(self, plan: Sequence[int]) -> list[int]:
        """Return the leader's plan."""
        return list(plan)

    def share_text(self, text: str) -> str:
        """Return the leader's text."""
        return text

    def share_flat(self, tensor: Tensor) -> None:
        """Fill ``tensor`` with the leader's values."""

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""


class Group:
    """A learner with several ranks, of which the first one speaks to the syncer.

    Every method, the constructor included, is collective: all ranks call it, in the same order,
    from the training thread. A rank that dies makes the others raise RuntimeError, as in any
    collective.

    Args:
        process_group: the ranks of this learner; None means all of them.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is None:
            ranks = list(range(dist.get_world_size()))
            group = dist.new_group(backend="gloo")
        else:
            ranks = dist.get_process_group_ranks(process_group)
            # The ranks outside are another learner's and do not take part in this call.
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._group: dist.ProcessGroup | None = group
        self._source = ranks[0]
        self.leader = dist.get_rank() == ranks[0]
        self.size = len(ranks)

    def share_plan(self, plan: Sequence[int]) -> list[int]:
        """Return the leader's plan; what other ranks pass is ignored. Numbers are int64.

        Up to 31 numbers take one broadcast, more take a second one.
        """
        head = torch.zeros(1 + PLAN_INLINE, dtype=torch.int64)
        if self.leader:
            head[0] = len(plan)
            inline = torch.tensor(list(plan[:PLAN_INLINE]), dtype=torch.int64)
            head[1 : 1 + len(inline)] = inline
        self._broadcast(head)
        length = int(head[0])
        numbers: list[int] = head[1 : 1 + length].tolist()
        if length <= PLAN_INLINE:
            return numbers
        rest = torch.zeros(length - PLAN_INLINE, dtype=torch.int64)
        if self.leader:
            rest.copy_(torch.tensor(list(plan[PLAN_INLINE:]), dtype=torch.int64))
        self._broadcast(rest)
        return numbers + [int(number) for number in rest.tolist()]

    def share_text(self, text: str) -> str:
        """Return the leader's text; what other ranks pass is ignored."""
        data = text.encode() if self.leader else b""
        (length,) = self.share_plan([len(data)])
        if not length:
            return ""
        raw = torch.zeros(length, dtype=torch.uint8)
        if self.leader:
            raw.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._broadcast(raw)
        return bytes(raw.numpy()).decode()

    def share_flat(self, tensor: Tensor) -> None:
        """Fill ``tensor``, contiguous, on the CPU, equally long everywhere, with the leader's.

        Raises:
            ValueError: it is elsewhere or not contiguous. The other ranks then wait: it is a bug.
        """
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"share_flat takes a contiguous CPU tensor, got one on {tensor.device}."
            )
        self._broadcast(tensor)

    def close(self) -> None:
        """Let go of the group. Harmless when repeated."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise RuntimeError("this group is closed: nothing can be shared any more.")
        dist.broadcast(tensor, src=self._source, group=self._group)


Island: TypeAlias = Solo | Group


def detect() -> Solo | Group:
    """Return what torch.distributed says this process is part of. Collective, like ``Group``."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Group()
    return Solo()

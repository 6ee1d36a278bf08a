"""The global model: what the syncer owns, merges and hands out. Changed by one thread.

Memory, in copies of the fp32 model: theta 1, outer state 1 (SGD with momentum), wire copies 1
(fp32; 0.5 with bf16), accumulators and receive slots a few fragments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco_plugin.core.parameters import Parameters
from diloco_plugin.errors import LayoutError
from diloco_plugin.tensors.codec import codec
from diloco_plugin.tensors.layout import Layout, views
from diloco_plugin.tensors.merge import Measure, RoundMerge, measure, weight
from diloco_plugin.tensors.outer import OuterOptimizer


@dataclass(frozen=True, slots=True)
class WireCopy:
    """One version of a fragment, encoded once for everybody. `data` is uint8 and never changes."""

    version: int
    codec: str
    data: Tensor


class GlobalModel:
    """Theta, the outer optimizer and the rounds that are being merged.

    Everything but `wire_copy` belongs to the merge thread.
    """

    def __init__(self, layout: Layout, parameters: Parameters) -> None:
        """Allocates theta; it holds nothing useful until `seed` or `complete_seed`."""
        self.layout = layout
        self._parameters = parameters
        self.theta = [torch.zeros(fragment.elements) for fragment in layout.fragments]
        self._outer = OuterOptimizer(
            layout,
            self.theta,
            optimizer=parameters.outer_optimizer,
            lr=parameters.outer_lr,
            momentum=parameters.outer_momentum,
            nesterov=parameters.outer_nesterov,
            options=parameters.outer_options,
        )
        self._rounds: dict[int, RoundMerge] = {}
        #: encoded with the last merge; what learners get changes when that is durable
        self._fresh: list[WireCopy | None] = [None] * len(layout.fragments)
        self._wire: list[WireCopy | None] = [None] * len(layout.fragments)

    def wire_copy(self, fragment: int) -> WireCopy | None:
        """The newest published version of a fragment. Any thread."""
        return self._wire[fragment]

    def publish(self, fragment: int) -> None:
        """Learners may have the last merge of a fragment: it is durable. Any thread."""
        self._wire[fragment] = self._fresh[fragment]

    def version(self, fragment: int) -> int:
        """The version that theta holds; it may not be published yet."""
        copy = self._fresh[fragment]
        return copy.version if copy is not None else -1

    def held(self, fragment: int) -> Tensor:
        """A fragment as learners hold it in fp32, flat: what it is after its way over the wire."""
        copy = self._fresh[fragment]
        assert copy is not None
        kind = codec(copy.codec)
        if kind.lossless:
            return self.theta[fragment]
        values = torch.empty(self.theta[fragment].numel())
        kind.decode(copy.data, values)
        return values

    def durable(self, fragment: int) -> dict[str, Tensor]:
        """Live tensors that bring a fragment back: flat fp32 theta, and the outer state."""
        state = self._outer.state(fragment)
        return {"theta": self.theta[fragment], **{f"outer/{k}": v for k, v in state.items()}}

    def restore(
        self, fragment: int, version: int, tensors: Mapping[str, Tensor], *, exact: bool
    ) -> None:
        """Take back what `durable` gave.

        Raises:
            LayoutError, ConfigError: it is of another model or outer optimizer.
        """
        theta = tensors["theta"]
        if theta.shape != self.theta[fragment].shape or theta.dtype != torch.float32:
            raise LayoutError(
                f"fragment {fragment} on disk has {theta.numel()} elements of {theta.dtype}, the"
                f" model has {self.theta[fragment].numel()} of float32: it is of another model."
            )
        self.theta[fragment].copy_(theta)
        outer = {k.removeprefix("outer/"): v for k, v in tensors.items() if k != "theta"}
        self._outer.load_state(fragment, outer)
        self._encode(fragment, version, exact=exact)
        self.publish(fragment)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill theta from named tensors (--init).

        Raises:
            LayoutError: names or shapes differ from the layout; names the first ones.
        """
        problems = []
        for fragment, theta in zip(self.layout.fragments, self.theta, strict=True):
            for slot, view in zip(fragment.slots, views(theta, fragment), strict=True):
                given = tensors.get(slot.spec.name)
                if given is None:
                    problems.append(f"{slot.spec.name} is missing")
                elif given.shape != view.shape:
                    problems.append(
                        f"{slot.spec.name} has shape {tuple(given.shape)}, the learner's has"
                        f" {tuple(view.shape)}"
                    )
                else:
                    view.copy_(given)
        if problems:
            raise LayoutError(
                f"the model given with --init does not fit: {'; '.join(problems[:5])}."
                " Start from a file of the same model."
            )

    def complete_seed(self) -> str | None:
        """Theta was filled from outside: encode it as version 0. Returns what is wrong with it."""
        for fragment, theta in zip(self.layout.fragments, self.theta, strict=True):
            if not measure(theta, fragment).finite:
                return f"fragment {fragment.index} holds values that are not finite"
        for fragment in self.layout.fragments:
            self._encode(fragment.index, 0, exact=False)
            self.publish(fragment.index)
        return None

    def measure(self, fragment: int, delta: Tensor) -> Measure:
        """Norms and finiteness of a push."""
        return measure(delta, self.layout.fragments[fragment])

    def fold(
        self,
        round_: int,
        fragment: int,
        delta: Tensor,
        size: Measure,
        *,
        tokens: int,
        steps: int,
        closing: bool,
    ) -> None:
        """Add a push to the accumulators of its round; `delta` is free afterwards."""
        merge = self._rounds.get(round_)
        if merge is None:
            method = "direct" if closing else self._parameters.merge
            merge = self._rounds[round_] = RoundMerge(self.layout.fragments[fragment], method)
        merge.fold(delta, weight(tokens, steps), size)

    def merge(self, round_: int, fragment: int, version: int, *, closing: bool) -> bool:
        """Close a round: outer step and encoding of the new version, which nobody gets before it is
        published. False: nothing has changed.

        A closing round into which nobody gave anything only encodes the fragment exactly.
        """
        merge = self._rounds.pop(round_, None)
        step = self._outer.close if closing else self._outer.step
        if merge is not None and not step(fragment, merge.gradient()):
            return False
        self._encode(fragment, version, exact=closing)
        return True

    def drop(self, round_: int) -> None:
        """Forget a round that will not be merged."""
        self._rounds.pop(round_, None)

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the global model by canonical name, fp32."""
        return {
            slot.spec.name: view.clone()
            for fragment, theta in zip(self.layout.fragments, self.theta, strict=True)
            for slot, view in zip(fragment.slots, views(theta, fragment), strict=True)
        }

    def _encode(self, fragment: int, version: int, *, exact: bool) -> None:
        kind = codec("fp32" if exact else self._parameters.codec)
        theta = self.theta[fragment]
        # Always into new memory: somebody may still be reading the version before.
        data = torch.empty(kind.nbytes(theta.numel()), dtype=torch.uint8)
        kind.encode(theta, data)
        self._fresh[fragment] = WireCopy(version, kind.name, data)

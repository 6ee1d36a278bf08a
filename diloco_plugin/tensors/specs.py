"""What a model consists of, as plain data: it travels in a learner's introduction.

A description may come from the network, so ``check_specs`` decides whether it makes sense before
anything is laid out after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_plugin.errors import LayoutError

#: Merged by the run's method (RDA, unless the run says otherwise).
WEIGHT: Final = "weight"
#: Always merged by direct averaging (paper section 3.2): embeddings and heads tied to them.
EMBEDDING: Final = "embedding"
#: Floating-point buffers: plain weighted mean, no outer optimizer.
BUFFER: Final = "buffer"
KINDS: Final = (WEIGHT, EMBEDDING, BUFFER)

ELEMENTS_MAX: Final = 2**40
DIMENSIONS_MAX: Final = 16
NAME_MAX: Final = 512

_DTYPE_CLASSES: Final = {
    "float32": "float",
    "bfloat16": "float",
    "float16": "float",
    "float64": "float",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model. ``alias_of`` names the owner when it is tied to another one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    alias_of: str = ""

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


def dtype_class(dtype: str) -> str:
    """What two learners must agree on: a bf16 and an fp32 learner may share a run ("float").

    Raises:
        LayoutError: a dtype that cannot be merged.
    """
    found = _DTYPE_CLASSES.get(dtype)
    if found is None:
        raise LayoutError(
            f"dtype {dtype!r} cannot be merged: convert the tensor to one of"
            f" {', '.join(_DTYPE_CLASSES)}."
        )
    return found


def check_specs(specs: Sequence[TensorSpec]) -> None:
    """Checks that a description makes sense, whoever sent it.

    Raises:
        LayoutError: an empty description, a bad name, shape, dtype, kind or alias, a name that
            stands twice, or no elements, or more than ``ELEMENTS_MAX`` of them, in total.
    """
    owners: dict[str, TensorSpec] = {}
    names: set[str] = set()
    elements = 0
    for spec in specs:
        _check_one(spec)
        if spec.name in names:
            raise LayoutError(
                f"{spec.name} is described twice: every tensor must have its own name."
            )
        names.add(spec.name)
        if not spec.alias_of:
            owners[spec.name] = spec
            elements += spec.numel
    for spec in specs:
        if spec.alias_of:
            _check_alias(spec, owners)
    if not 1 <= elements <= ELEMENTS_MAX:
        raise LayoutError(
            f"{len(specs)} tensors with {elements} elements in total: a model to train together"
            f" needs between 1 and 2**40 elements. Check which parameters require grad."
        )


def _check_one(spec: TensorSpec) -> None:
    if not 1 <= len(spec.name) <= NAME_MAX:
        raise LayoutError(
            f"a tensor's name has {len(spec.name)} characters ({spec.name[:80]!r}):"
            f" use 1 to {NAME_MAX}."
        )
    if len(spec.shape) > DIMENSIONS_MAX or any(side < 0 for side in spec.shape):
        raise LayoutError(
            f"{spec.name}: shape {spec.shape} is not possible: sides are 0 or more, and at most"
            f" {DIMENSIONS_MAX} of them."
        )
    if spec.kind not in KINDS:
        raise LayoutError(
            f"{spec.name}: kind {spec.kind!r} is unknown, use one of {', '.join(KINDS)}; or the"
            f" sender runs another version of diloco-plugin: use the same one everywhere."
        )
    try:
        dtype_class(spec.dtype)
    except LayoutError as error:
        raise LayoutError(f"{spec.name}: {error}") from None


def _check_alias(spec: TensorSpec, owners: Mapping[str, TensorSpec]) -> None:
    owner = owners.get(spec.alias_of)
    if owner is None:
        raise LayoutError(
            f"{spec.name} is tied to {spec.alias_of}, which is not the owner of a described tensor:"
            f" describe the owner, and tie every alias to it directly."
        )
    if (owner.shape, owner.dtype, owner.kind) != (spec.shape, spec.dtype, spec.kind):
        raise LayoutError(
            f"{spec.name} is tied to {owner.name} but differs from it ({spec.shape}, {spec.dtype},"
            f" {spec.kind} and {owner.shape}, {owner.dtype}, {owner.kind}): untie them."
        )


def differences(
    run_specs: Iterable[TensorSpec], learner_specs: Iterable[TensorSpec], limit: int = 5
) -> list[str]:
    """Says how a learner's model differs from the run's, in sentences for the learner's user.

    Returns:
        At most ``limit`` sentences, then one that counts the rest. Empty when both may share a run.
        Two dtypes of one class are no difference.
    """
    run = {spec.name: spec for spec in run_specs}
    learner = {spec.name: spec for spec in learner_specs}
    found = list(_differences(run, learner))
    if len(found) > limit:
        found[limit:] = [f"... and {len(found) - limit} more differences."]
    return found


def _differences(run: Mapping[str, TensorSpec], learner: Mapping[str, TensorSpec]) -> Iterator[str]:
    yield from _prefixes(run, learner)
    if len(run) != len(learner):
        yield f"the run has {len(run)} tensors, this learner has {len(learner)}"
    for name in sorted(run.keys() | learner.keys()):
        ours, theirs = run.get(name), learner.get(name)
        if ours is None:
            yield f"{name}: this learner has it, the run does not"
        elif theirs is None:
            yield f"{name}: the run has it, this learner does not (missing, or frozen)"
        else:
            yield from _compare(ours, theirs)


def _compare(run: TensorSpec, learner: TensorSpec) -> Iterator[str]:
    name = run.name
    if run.shape != learner.shape:
        yield f"{name}: the run has shape {run.shape}, this learner has {learner.shape}"
    if run.alias_of != learner.alias_of:
        yield f"{name}: in the run it is {_tied(run)}, in this learner it is {_tied(learner)}"
    if run.kind != learner.kind:
        yield f"{name}: the run merges it as {run.kind}, this learner marks it as {learner.kind}"
    if dtype_class(run.dtype) != _DTYPE_CLASSES.get(learner.dtype):
        yield f"{name}: the run has dtype {run.dtype}, this learner has {learner.dtype}"


def _tied(spec: TensorSpec) -> str:
    return f"tied to {spec.alias_of}" if spec.alias_of else "not tied"


def _prefixes(run: Mapping[str, TensorSpec], learner: Mapping[str, TensorSpec]) -> Iterator[str]:
    """The one difference that is met most: the same model, one level deeper in another one."""
    if prefix := _holder(run, learner):
        yield f'the run\'s model is what this learner calls {prefix}: attach with module="{prefix}"'
    if prefix := _holder(learner, run):
        yield (
            f"this learner's model is what the run calls {prefix}: start the run again from"
            f' learners that attach with module="{prefix}"'
        )


def _holder(inner: Mapping[str, TensorSpec], outer: Mapping[str, TensorSpec]) -> str:
    """The path under which ``outer`` has all of ``inner``; empty if there is none."""
    longest = max(inner, key=lambda name: (len(name), name), default="")
    found = (name.removesuffix(f".{longest}") for name in outer if name.endswith(f".{longest}"))
    return next((path for path in found if all(f"{path}.{name}" in outer for name in inner)), "")

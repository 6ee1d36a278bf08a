"""Who takes part: the tensors of a live model that are trained together, by canonical name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from diloco_plugin.errors import LayoutError
from diloco_plugin.tensors.specs import (
    BUFFER,
    EMBEDDING,
    WEIGHT,
    TensorSpec,
    check_specs,
    dtype_class,
)

#: Path components that wrappers add: torch.compile, DDP, Fabric, FSDP, activation checkpointing.
WRAPPERS: Final = frozenset(
    {"_orig_mod", "module", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)


@dataclass(frozen=True, slots=True)
class Census:
    """The tensors of one model.

    Attributes:
        specs: sorted by name; tied tensors stand here once as owner and once for each alias.
        tensors: owners only, the live parameters and buffers themselves. Keep these references: a
            framework may move or cast them (new storage, other dtype) after they were listed.
    """

    specs: tuple[TensorSpec, ...]
    tensors: dict[str, Tensor]


def canonical_name(name: str) -> str:
    """``name`` without what wrappers added, so that wrapping a model does not change its layout."""
    *path, leaf = name.split(".")
    # The leaf is the tensor itself: a parameter may well be called "module".
    return ".".join([*(part for part in path if part not in WRAPPERS), leaf])


def census(model: nn.Module, *, buffers: str = "merge", within: str | None = None) -> Census:
    """Lists what of ``model`` is trained together.

    That is every parameter that requires grad now (so LoRA sends its adapters only), tied ones
    once, and with ``buffers="merge"`` the persistent floating-point buffers of what is trained.
    Integer buffers stay local: a mean of counters and indices means nothing. So do non-persistent
    ones: they are not part of the saved model; they are computed (rotary tables, masks), and the
    same everywhere or rightly different.

    Args:
        buffers: "merge", or "local" to leave all of them at home.
        within: path of a submodule; only it takes part, and names are relative to it.

    Raises:
        LayoutError: nothing to train, two tensors under one canonical name, no such submodule, or a
            tensor that has no plain floating-point values in place.
        ValueError: ``buffers`` is neither.
    """
    if buffers not in ("merge", "local"):
        raise ValueError(f"buffers={buffers!r} is unknown: use merge or local.")
    root = model if within is None else _submodule(model, within)
    parameters = ((name, p) for name, p in _parameters(root) if p.requires_grad)
    named = _by_canonical_name(parameters)
    if not named:
        raise LayoutError(
            f"{type(root).__name__} has no parameter that requires grad, so there is nothing to"
            f" train together: attach after the parameters to train have been unfrozen."
        )
    embeddings = _embeddings(root)
    kinds = {name: EMBEDDING if id(p) in embeddings else WEIGHT for name, p in named.items()}
    if buffers == "merge":
        extra = _by_canonical_name(_buffers(root))
        _refuse_collisions(named, extra)
        named |= extra
        kinds |= dict.fromkeys(extra, BUFFER)
    owners: dict[int, str] = {}
    for name in named:
        # The first in the module's own order, as in named_parameters() and in saved models: the
        # embedding table owns, the head tied to it is the alias.
        owners.setdefault(id(named[name]), name)
    specs = tuple(
        _spec(name, named[name], kinds[name], owners[id(named[name])]) for name in sorted(named)
    )
    check_specs(specs)
    return Census(specs, {name: named[name] for name in sorted(owners.values())})


def _submodule(model: nn.Module, within: str) -> nn.Module:
    raw = dict(model.named_modules(remove_duplicate=False))
    children: dict[str, nn.Module] = {}
    for path, module in raw.items():
        shown = ".".join(part for part in path.split(".") if part not in WRAPPERS)
        if shown:
            children.setdefault(shown, module)
    # Canonical first: under DDP, "module" is the wrapper and rarely what was meant.
    found = children.get(within) or raw.get(within)
    if found is None or not within:
        near = difflib.get_close_matches(within, children, n=3, cutoff=0.4)
        near = near or [path for path in children if "." not in path][:5]
        raise LayoutError(
            f"within={within!r}: {type(model).__name__} has no such submodule;"
            f" use one of its own, such as {', '.join(near) or '(it has none)'}."
        )
    return found


def _parameters(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return iter(root.named_parameters(remove_duplicate=False))


def _buffers(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent floating-point buffers of trained modules."""
    modules = dict(root.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        for leaf, buffer in module._buffers.items():
            if buffer is None or leaf in module._non_persistent_buffers_set:
                continue
            if buffer.is_floating_point() and _is_trained(path, modules):
                yield (f"{path}.{leaf}" if path else leaf), buffer


def _is_trained(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the buffers of the module at ``path`` belong to something that is trained.

    Who freezes a backbone expects all of it to stay as it was at home, BatchNorm statistics
    included; sent along, they would also make a LoRA run as heavy as its base. But a BatchNorm
    without weights of its own (affine=False) is not frozen: there the module that holds it decides.
    """
    while True:
        parameters = list(modules[path].parameters())
        if parameters or not path:
            return any(p.requires_grad for p in parameters)
        path = path.rpartition(".")[0]


def _embeddings(root: nn.Module) -> set[int]:
    """Identities of embedding tables; a head tied to one is the same object, so it is here too."""
    tables = (m for m in root.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    # Not `.weight`: on a parametrized module that would compute it.
    weights = (m._parameters.get("weight") for m in tables)
    return {id(weight) for weight in weights if weight is not None}


def _by_canonical_name(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    raw_names: dict[str, str] = {}
    for raw, tensor in tensors:
        name = canonical_name(raw)
        # The same tensor under the same name is no collision: wrapped and bare view of one module.
        if named.setdefault(name, tensor) is not tensor:
            raise LayoutError(
                f"{raw_names[name]} and {raw} are both called {name} once what wrappers add"
                f" ({', '.join(sorted(WRAPPERS))}) is taken out: rename one of the two submodules."
            )
        raw_names.setdefault(name, raw)
    return named


def _refuse_collisions(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    both = sorted(parameters.keys() & buffers.keys())
    if both:
        raise LayoutError(
            f"{both[0]} is the name of a parameter and of a buffer once what wrappers add"
            f" ({', '.join(sorted(WRAPPERS))}) is taken out: rename one of the two submodules."
        )


def _spec(name: str, tensor: Tensor, kind: str, owner: str) -> TensorSpec:
    _refuse_unusual(name, tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(tensor.shape), dtype, kind, "" if owner == name else owner)


def _refuse_unusual(name: str, tensor: Tensor) -> None:
    what = fix = ""
    if is_lazy(tensor):
        what, fix = (
            "is not initialized yet (lazy)",
            "run one batch through the model before attaching",
        )
    elif tensor.is_meta:
        what, fix = "is on the meta device", "materialize it and load its values before attaching"
    elif hasattr(type(tensor), "__tensor_flatten__") or type(tensor).__name__ == "FlatParameter":
        what = f"is a {type(tensor).__name__}, not a plain tensor (sharded or quantized)"
        fix = "attach a model whose parameters are whole, as under DDP, or freeze it"
    elif tensor.layout is not torch.strided:
        what, fix = f"is sparse ({tensor.layout})", "make it dense with to_dense()"
    elif tensor.is_complex():
        what, fix = (
            f"is complex ({tensor.dtype})",
            "store it as real (torch.view_as_real), or freeze it",
        )
    elif tensor.is_quantized:
        what, fix = f"is quantized ({tensor.dtype})", "dequantize it, or freeze it"
    if what:
        raise LayoutError(f"{name} {what} and cannot be merged: {fix}.")
    try:
        dtype_class(str(tensor.dtype).removeprefix("torch."))
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None

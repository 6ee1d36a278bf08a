"""Turn any existing PyTorch training into a Decoupled DiLoCo learner (arXiv 2604.21428)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco_plugin._version import __version__

if TYPE_CHECKING:
    from diloco_plugin.data import shard
    from diloco_plugin.learner import Learner, attach

__all__ = ["Learner", "__version__", "attach", "shard"]


def __getattr__(name: str) -> Any:
    """Load what is asked for, when it is asked for: `diloco --help` must not wait for torch."""
    if name == "shard":
        from diloco_plugin.data import shard

        return shard
    if name in __all__:
        from diloco_plugin import learner

        return getattr(learner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

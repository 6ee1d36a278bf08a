"""For tests and simulations: the real cores, and everything around them made up."""

from __future__ import annotations

from diloco_plugin.testing.learner import Learner
from diloco_plugin.testing.syncer import Syncer
from diloco_plugin.testing.wire import MS, Progress, Wire
from diloco_plugin.testing.world import World

__all__ = ["MS", "Learner", "Progress", "Syncer", "Wire", "World"]

"""The learner: what runs in the user's training process."""

from __future__ import annotations

from diloco_plugin.learner.attaching import attach
from diloco_plugin.learner.learner import Learner

__all__ = ["Learner", "attach"]

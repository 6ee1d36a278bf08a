"""The Hugging Face Trainer as a learner: `Trainer(..., callbacks=[DiLoCoCallback(...)])`."""

from __future__ import annotations

from diloco_transformers.callback import DiLoCoCallback

__all__ = ["DiLoCoCallback"]

"""Turn any existing PyTorch training into a Decoupled DiLoCo learner (arXiv 2604.21428)."""

from __future__ import annotations

__version__ = "0.1.0"

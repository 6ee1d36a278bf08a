"""How long the tests that draw at random go on: DILOCO_SOAK multiplies it, 1 by default."""

from __future__ import annotations

import os
from typing import Final

SOAK: Final = max(1, int(os.environ.get("DILOCO_SOAK", "1")))

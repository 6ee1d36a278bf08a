"""`python -m tests.end_to_end.half_push ADDRESS NAME ELEMENTS`: sends half of a push."""

from __future__ import annotations

import sys
import time

import torch

from tests.end_to_end.forged import Forged, one_weight


def main() -> None:
    """Join, take the model, make the clock move, and stop in the middle of the answer."""
    address, name, elements = sys.argv[1], sys.argv[2], int(sys.argv[3])
    forger = Forged(address, name, one_weight(elements))
    forger.join()
    forger.take()
    print("joined", flush=True)
    if sys.argv[4:] == ["idle"]:
        time.sleep(600)
    forger.progress(1_000)
    pull = forger.pulled()
    forger.offer(pull)
    forger.serve("push", 0, pull.round, torch.full((elements,), 1e6), 0)
    forger.wanted("push", 0, pull.round, 4)  # the first one has arrived
    print("halfway", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()

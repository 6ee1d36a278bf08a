"""`python -m tests.benchmarks.bad_line`: what three learners lose when the fourth's line is bad.

Their pushes merged per second, as a share of what they merge when all four lines are good; both in
the same run, in turn. Median of three runs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from diloco_plugin.status import fetch
from tests.end_to_end.fleet import Trainee
from tests.end_to_end.processes import Daemon, free_ports
from tests.faults.proxy import Proxy

FLAGS = ("--sync-every", "8", "--fragments", "2", "--overlap", "2", "--lease", "600")
STEP_SECONDS = 0.02


def slow(proxy: Proxy) -> None:
    proxy.delay, proxy.rate = 0.1, 200_000.0


LINES: dict[str, Callable[[Proxy], None]] = {"slow": slow, "held": Proxy.hold}


def wide_model(seed: int) -> nn.Module:
    """Two fragments of some 300 KiB."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 1))


def goodput(address: str, names: Sequence[str], seconds: float) -> float:
    """Pushes of these learners that are merged in a second."""

    def joined() -> int:
        learners = fetch(address, 10)["learners"]
        return sum(learner["rounds_joined"] for learner in learners if learner["name"] in names)

    before, started = joined(), time.monotonic()
    time.sleep(seconds)
    return (joined() - before) / (time.monotonic() - started)


def compare(harm: Callable[[Proxy], None], quorum: int, seconds: float) -> float:
    """Goodput of the others while one line is bad, over theirs while it is good."""
    port = free_ports()
    bind = f"tcp://127.0.0.1:{port}"
    names = ("a", "b", "c")
    with Daemon(*FLAGS, "--quorum", str(quorum), bind=bind), Proxy(port) as proxy:
        trainees = [
            Trainee(wide_model(i), bind, name, data=i, step_seconds=STEP_SECONDS)
            for i, name in enumerate(names)
        ]
        bad = Trainee(wide_model(3), proxy.address, "bad", data=3, step_seconds=STEP_SECONDS)
        bad.wait(lambda: bad.merged >= 5, 60)
        good, spoiled = [], []
        for _ in range(2):
            good.append(goodput(bind, names, seconds))
            harm(proxy)
            spoiled.append(goodput(bind, names, seconds))
            proxy.heal()
            merged = bad.merged
            bad.wait(lambda merged=merged: bad.merged > merged, 60)
        for trainee in [*trainees, bad]:
            trainee.finish()
    return sum(spoiled) / sum(good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    logging.getLogger("diloco").setLevel(logging.ERROR)
    for name, harm in LINES.items():
        for quorum in (1, 3):
            ratios = sorted(compare(harm, quorum, seconds) for _ in range(3))
            label = f"goodput_of_others_{name}_line_quorum_{quorum}"
            middle = statistics.median(ratios)
            print(f"{label:<38}  {middle:10.4g}  ({ratios[0]:.3f} to {ratios[2]:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.benchmarks.attacks [NAME...]`: rounds merged per second under each attack, in
plaintext, as a share of those without, measured in turn.

The attacker is a process of its own on the same machine, and takes only the time of the cores that
nobody else wants: a real one has cores of its own, and takes none from the learners.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import Any

from tests.attacks.stage import MIB, Stage, staged
from tests.attacks.test_attacks import EVERYWHERE

#: Between two windows, for rounds that the change itself has upset.
PAUSE = 0.5


class Attacker:
    """Another process that begins and ends attacks as it is told."""

    def __init__(self, stage: Stage) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.attacks", "--at", stage.address]
        self._process = subprocess.Popen(
            [*command, "--pid", str(stage.process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, word: str) -> None:
        """Begin the attack of this name, or end the one that runs (empty); returns when it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the attacker has ended")

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def obey(address: str, pid: int) -> None:
    """The attacker's process."""
    os.nice(19)
    stage = Stage(address, pid)
    running = contextlib.ExitStack()
    for line in sys.stdin:
        name = line.strip()
        try:
            if name:
                running.enter_context(contextmanager(EVERYWHERE[name])(stage))
            else:
                running.close()
        except AssertionError as error:  # an attack that has failed is over, too
            print(f"{name}: {error}", file=sys.stderr)
        print("done", flush=True)


def rate(stage: Stage, seconds: float) -> float:
    """Rounds merged per second from now on."""
    before, start = stage.status()["rounds"]["merged"], time.monotonic()
    time.sleep(seconds)
    return float(stage.status()["rounds"]["merged"] - before) / (time.monotonic() - start)


def measure(
    stage: Stage, attacker: Attacker, name: str, repeats: int, settle: float, seconds: float
) -> dict[str, float]:
    """One attack: medians without and with it, and the daemon's memory."""
    without, under, rss, held = [], [], stage.rss(), 0
    for _ in range(repeats):
        without.append(rate(stage, seconds))
        attacker.tell(name)
        time.sleep(settle)
        under.append(rate(stage, seconds))
        held = max(held, stage.rss() - rss)
        attacker.tell("")
        time.sleep(PAUSE)
    clean, hit = statistics.median(without), statistics.median(under)
    return {"clean": clean, "hit": hit, "share": hit / clean, "held": held / MIB}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="attacks (default: all)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--settle", type=float, default=0.0, help="seconds of an attack before it is measured"
    )
    parser.add_argument("--seconds", type=float, default=2.5, help="of one window")
    parser.add_argument("--at", help=argparse.SUPPRESS)
    parser.add_argument("--pid", type=int, help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    if arguments.at:
        obey(arguments.at, arguments.pid)
        return
    shares = []
    with staged(None) as stage, Attacker(stage) as attacker:
        for name in arguments.names or EVERYWHERE:
            found = measure(
                stage,
                attacker,
                name,
                arguments.repeats,
                arguments.settle,
                arguments.seconds,
            )
            shares.append(found["share"])
            print(
                f"{name:<75} {found['clean']:6.2f} {found['hit']:6.2f} rounds/s"
                f" {found['share']:5.0%} {found['held']:+6.0f} MiB",
                flush=True,
            )
    print(f"median share {statistics.median(shares):.0%}, lowest {min(shares):.0%}")


if __name__ == "__main__":
    main()

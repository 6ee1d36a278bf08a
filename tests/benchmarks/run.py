"""`make bench`: what taking part costs, as ratios of things measured in turn in one run.

Prints a table and, with `--json FILE`, writes the figures. Machines are noisy: look at ratios, not
at seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import diloco_plugin
from diloco_plugin.status import fetch

MIB = 2**20


@dataclass
class Daemon:
    """A syncer in a process of its own."""

    address: str
    process: psutil.Process

    def rss(self) -> int:
        return int(self.process.memory_info().rss)


@contextlib.contextmanager
def daemon(**flags: Any) -> Iterator[Daemon]:
    words = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
    command = [sys.executable, "-m", "diloco_plugin.cli", "syncer", "--bind=tcp://127.0.0.1:*"]
    process = subprocess.Popen([*command, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"learners join at (\S+)", line):
                break
        else:
            raise RuntimeError("the syncer did not start")
        drain = threading.Thread(target=lambda: [None for _ in process.stderr], daemon=True)
        drain.start()
        yield Daemon(found[1], psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(60)


def gpt2() -> GPT2LMHeadModel:
    """About 30 M parameters."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=512, n_layer=8, n_head=8, vocab_size=8192, n_positions=128,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def model_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * 4 for parameter in model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Real training steps on random tokens; seconds of each."""
    seconds = []
    for _ in range(steps):
        ids = torch.randint(0, 8192, (2, 128))
        started = time.perf_counter()
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def step_time(repeats: int, steps: int) -> dict[str, float]:
    """The training step alone, attached with nothing due, and with a round in every step."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(model, optimizer, 3)
    ratios: dict[str, list[float]] = {"attached": [], "streaming": []}
    alone_seconds, blocked, worst, rounds = [], [], [], []
    with daemon(sync_every=100_000) as idle, daemon() as busy:
        for _ in range(repeats):
            alone = statistics.median(train(model, optimizer, steps))
            alone_seconds.append(alone)
            for name, where in (("attached", idle), ("streaming", busy)):
                learner = diloco_plugin.attach(model, optimizer, where.address, name="bench")
                merged = fetch(where.address, 5)["rounds"]["merged"]
                seconds, stalls = [], []
                for _ in range(steps):
                    before = learner.boundary_seconds
                    seconds += train(model, optimizer, 1)
                    stalls.append(learner.boundary_seconds - before)
                ratios[name].append(statistics.median(seconds) / alone)
                if name == "streaming":
                    blocked.append(sum(stalls) / sum(seconds))
                    worst.append(max(stalls) / alone)
                    rounds.append((fetch(where.address, 5)["rounds"]["merged"] - merged) / steps)
                learner.close()
    return {
        "parameters_m": model_bytes(model) / 4e6,
        "step_alone_s": statistics.median(alone_seconds),
        "step_attached_over_alone": statistics.median(ratios["attached"]),
        "step_streaming_over_alone": statistics.median(ratios["streaming"]),
        "rounds_per_step": statistics.median(rounds),
        "training_thread_blocked_share": statistics.median(blocked),
        "worst_stall_over_step": max(worst),
    }


def pretend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, pace: float) -> None:
    """Steps that move every parameter but compute nothing: for memory, time does not matter."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    for _ in range(steps):
        time.sleep(pace)
        optimizer.step()


def memory(learners: int) -> dict[str, float]:
    """Peak RSS over what the process had before there was a model, in fp32 models."""
    with daemon() as syncer:
        size = 0
        before = syncer.rss()
        peak = [0]
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                peak[0] = max(peak[0], syncer.rss())
                time.sleep(0.02)

        def learn(i: int) -> None:
            nonlocal size
            model = gpt2()
            size = model_bytes(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            with diloco_plugin.attach(model, optimizer, syncer.address, name=f"l{i}"):
                pretend(model, optimizer, 72, 0.2)

        watcher = threading.Thread(target=watch)
        watcher.start()
        threads = [threading.Thread(target=learn, args=(i,)) for i in range(learners)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        watcher.join()
        return {
            f"syncer_rss_models_m{learners}": (peak[0] - before) / size,
            "syncer_rss_without_model_mib": before / MIB,
        }


def learner_memory() -> dict[str, float]:
    """What attaching adds to a learner's RSS, in fp32 models and in largest fragments."""
    me = psutil.Process()
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(model, optimizer, 2)
    with daemon() as syncer:
        before = me.memory_info().rss
        learner = diloco_plugin.attach(model, optimizer, syncer.address, name="bench")
        train(model, optimizer, 6)
        after = me.memory_info().rss
        largest = max(fragment["elements"] for fragment in fetch(syncer.address, 5)["fragments"])
        learner.close()
    extra, size = after - before, model_bytes(model)
    return {
        "learner_rss_models": extra / size,
        "learner_rss_fragments_beyond_one_model": (extra - size) / (4 * largest),
    }


#: Joins and leaves again, as often as it is told; says how long that took.
JOINER = """
import sys, time, torch, diloco_plugin
from tests.benchmarks.run import gpt2
torch.set_num_threads(1)
model = gpt2()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
print("ready", flush=True)
for _ in sys.stdin:
    optimizer.state.clear()
    started = time.perf_counter()
    learner = diloco_plugin.attach(model, optimizer, sys.argv[1], name="joiner", state=sys.argv[2])
    print(time.perf_counter() - started, flush=True)
    assert bool(optimizer.state) == (sys.argv[2] == "peer")
    learner.abandon()
"""


@contextlib.contextmanager
def joining(address: str, state: str) -> Iterator[list[float]]:
    """A learner in another process that joins over and over; seconds of each time."""
    joiner = subprocess.Popen(
        [sys.executable, "-c", JOINER, address, state],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert joiner.stdin is not None
    assert joiner.stdout is not None
    joiner.stdout.readline()
    seconds: list[float] = []
    over = threading.Event()

    def join() -> None:
        while not over.is_set():
            print(file=joiner.stdin, flush=True)
            seconds.append(float(joiner.stdout.readline()))

    thread = threading.Thread(target=join)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()
        joiner.kill()
        joiner.wait()


def giving(repeats: int, steps: int) -> dict[str, float]:
    """A donor's training step alone, and while another one joins, without and with its state."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(model, optimizer, 3)
    ratios: dict[str, list[float]] = {"fresh": [], "peer": []}
    took: dict[str, list[float]] = {"fresh": [], "peer": []}
    with (
        daemon(sync_every=100_000) as syncer,
        diloco_plugin.attach(model, optimizer, syncer.address, name="donor", state="fresh"),
    ):
        for _ in range(repeats):
            alone = statistics.median(train(model, optimizer, steps))
            for state in ratios:
                with joining(syncer.address, state) as seconds:
                    step = statistics.median(train(model, optimizer, steps))
                ratios[state].append(step / alone)
                took[state].append(statistics.median(seconds))
    return {
        "donor_step_while_another_joins_over_alone": statistics.median(ratios["fresh"]),
        "donor_step_while_it_gives_over_alone": statistics.median(ratios["peer"]),
        "joining_without_state_s": statistics.median(took["fresh"]),
        "joining_with_state_s": statistics.median(took["peer"]),
    }


def fast_and_slow(repeats: int, steps: int) -> dict[str, float]:
    """A fast learner's step without and with a three times slower one in the run."""
    step = 0.02

    def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(24)])
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def run(address: str, name: str, seconds: float, until: Callable[[int], bool]) -> list[float]:
        model, optimizer = tiny()
        took: list[float] = []
        with diloco_plugin.attach(model, optimizer, address, name=name):
            while until(len(took)):
                started = time.perf_counter()
                pretend(model, optimizer, 1, seconds)
                took.append(time.perf_counter() - started)
        return took

    ratios, shares = [], []
    for _ in range(repeats):
        medians = []
        for with_slow in (False, True):
            with daemon() as syncer:
                done = threading.Event()
                slow = threading.Thread(
                    target=run,
                    args=(syncer.address, "slow", 3 * step, lambda _, done=done: not done.is_set()),
                )
                if with_slow:
                    slow.start()
                took = run(syncer.address, "fast", step, lambda n: n < steps)
                medians.append(statistics.median(took))
                if with_slow:
                    known = fetch(syncer.address, 5)["learners"]
                    entry = next(learner for learner in known if learner["name"] == "slow")
                    shares.append(entry["rounds_joined"] / max(1, entry["rounds_asked"]))
                    done.set()
                    slow.join()
        ratios.append(medians[1] / medians[0])
    return {
        "fast_step_with_slow_over_without": statistics.median(ratios),
        "slow_joined_share_of_rounds": statistics.median(shares),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a look")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("diloco").setLevel(logging.ERROR)
    repeats, steps = (1, 6) if arguments.quick else (3, 16)
    figures: dict[str, float] = {}
    figures |= learner_memory()  # first: freed memory of other parts would hide what it adds
    figures |= step_time(repeats, steps)
    figures |= giving(repeats, steps)
    for learners in (2, 8):
        figures |= memory(learners)
    figures |= fast_and_slow(repeats, 100)
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:10.4g}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the examples share: command line, model, and a file that the demo reads along."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from text import CONTEXT

BATCH = 16
LEARNING_RATE = 3e-3
WARMUP = 20


def options(description: str | None) -> argparse.Namespace:
    """The command line of every example."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("syncer", help="address, e.g. tcp://127.0.0.1:5555")
    parser.add_argument("--name", default=f"learner-{os.getpid()}", help="of this learner")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data")
    parser.add_argument("--report", type=Path, help="append losses to this file, as JSON lines")
    chosen = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    return chosen


def new_model() -> GPT2LMHeadModel:
    """A GPT-2 of 121 thousand parameters that reads and writes bytes.

    Its weights are always the same: after so few steps, much depends on where one starts.
    """
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.06,  # the usual 0.02 is for wide models; this one would hardly start
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config)


def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A constant learning rate, once Adam knows the size of its gradients."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))


def report(file: Path | None, step: int, **losses: float) -> None:
    """Append one line to `file`."""
    if file is not None:
        line = {"time": time.time(), "step": step}
        line |= {key: round(float(loss), 4) for key, loss in losses.items()}
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

"""What the merged model is compared with: the same model and steps, in one process each.

    python baselines.py --steps 400 --seed 0 --report FILE alone:0 alone:1 all parallel

Writes a line {"who", "step", "held_out"} for every measurement on a quarter of the held-out text;
the last one of each has "final" as well, measured on all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import BATCH, LEARNING_RATE, new_model, warmup
from text import Windows, held_out_text, training_text

PARTS = 4


def held_out_loss(model: GPT2LMHeadModel, share: float = 1.0) -> float:
    """Mean loss in nats per byte on text that nobody trained on."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        batches = list(DataLoader(held_out_text(share), 64))
        losses = [model(**batch).loss.item() * len(batch["input_ids"]) for batch in batches]
    model.train(was_training)
    return sum(losses) / sum(len(batch["input_ids"]) for batch in batches)


def endless(data: Windows, batch: int) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from DataLoader(data, batch, shuffle=True, drop_last=True)


def train(who: str, steps: int, seed: int, report: Path) -> None:
    """Train one model and report how it does."""
    data, batch = training_text(), BATCH
    if who == "parallel":
        batch *= PARTS
    elif who != "all":
        part = int(who.removeprefix("alone:"))
        data, seed = data.shard(PARTS, part), seed + part
    torch.manual_seed(seed)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = warmup(optimizer)
    for step, inputs in enumerate(endless(data, batch), start=1):
        model(**inputs).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        last = step == steps
        if last or step % max(1, steps // 8) == 0:
            line = {"who": who, "step": step, "held_out": held_out_loss(model, 0.25)}
            if last:
                line["final"] = held_out_loss(model)
            with report.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        if last:
            return


def main() -> None:
    """Train one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("who", nargs="+")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for who in args.who:
        train(who, args.steps, args.seed, args.report)


if __name__ == "__main__":
    main()

"""What came out of the demo: numbers, a table, a plot and a sample of text."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2LMHeadModel
from transformers.utils.logging import disable_progress_bar

from backstage.baselines import held_out_loss
from backstage.run import CAST, VICTIM, Act, Run
from text import CONTEXT, training_text

_COLORS: Final = ("#4477AA", "#66CCEE", "#EE6677", "#AA3377")
_LABELS: Final = {
    "alone:0": "learners, each alone",
    "all": "one process, all text",
    "parallel": "data-parallel, four times the batch",
}
_PROMPT: Final = b"The "


@dataclass(slots=True)
class Losses:
    """Held-out losses in nats per byte, at the end and on the way."""

    merged: float = float("nan")
    #: the merged model on the part of the held-out text that the curves are measured on
    merged_on_curve: float = float("nan")
    #: by the name of the learner whose part of the text it is
    alone: dict[str, float] = field(default_factory=dict)
    everything: float = float("nan")
    parallel: float | None = None
    #: (step, loss) of each baseline, by the name that `baselines.py` gives it
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Is the merged model better than every learner that trained alone?"""
        return all(self.merged < loss for loss in self.alone.values())


def load(folder: Path) -> GPT2LMHeadModel:
    """The global model, as anybody would load it."""
    disable_progress_bar()
    return GPT2LMHeadModel.from_pretrained(folder)


def gather(run: Run, model: GPT2LMHeadModel, reports: list[Path]) -> Losses:
    """Measure the merged model, and put the reports of the baselines together."""
    losses = Losses(round(held_out_loss(model), 4), held_out_loss(model, 0.25))
    names = {f"alone:{act.status.get('index')}": name for name, act in run.acts.items()}
    for report in reports:
        for text in report.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            who, final = line["who"], line.get("final")
            losses.curves.setdefault(who, []).append((line["step"], line["held_out"]))
            if final is None:
                continue
            if who == "all":
                losses.everything = final
            elif who == "parallel":
                losses.parallel = final
            else:
                losses.alone[names.get(who, who)] = final
    return losses


def rows(losses: Losses, steps: int) -> list[tuple[str, float]]:
    """The lines of the final table."""
    found = [(f"{name} alone, {steps} steps", loss) for name, loss in losses.alone.items()]
    found.append((f"one process on all of the text, {steps} steps", losses.everything))
    found.append(("DiLoCo: the global model of the four", losses.merged))
    if losses.parallel is not None:
        found.append((f"data-parallel, four times the batch, {steps} steps", losses.parallel))
    return found


def show(console: Console, losses: Losses, steps: int) -> None:
    """Print the final table."""
    table = Table("trained by", "held-out loss", "vs. global model")
    for who, loss in rows(losses, steps):
        ours = loss == losses.merged
        difference = "" if ours else f"{loss - losses.merged:+.3f}"
        table.add_row(who, f"{loss:.3f}", difference, style="bold" if ours else None)
    console.print(table)


def write_json(file: Path, run: Run, losses: Losses, seconds: dict[str, float]) -> dict[str, Any]:
    """Everything that was measured."""
    result = {
        "held_out_loss": {
            "global": losses.merged,
            "alone": losses.alone,
            "one_process_on_all_text": losses.everything,
            "data_parallel": losses.parallel,
        },
        "better_than_every_lone_learner": losses.good,
        "steps": run.steps,
        "seed": run.seed,
        "syncer_flags": run.flags,
        "rounds": run.body.get("rounds", {}),
        "fates": run.body.get("fates", {}),
        "learners": {
            name: {
                "steps_made": max((line["step"] for line in act.losses), default=0),
                "lives": act.lives,
                "rounds_asked": act.status.get("rounds_asked", 0),
                "rounds_joined": act.status.get("rounds_joined", 0),
            }
            for name, act in run.acts.items()
        },
        "events": [
            {"seconds": round(at, 1), "clock": clock, "what": what}
            for at, clock, what in run.events
        ],
        "seconds": {key: round(value, 1) for key, value in seconds.items()},
        "text_sha256": hashlib.sha256(training_text().data).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def plot(file: Path, run: Run, losses: Losses) -> None:
    """Losses on the way, and who was there when."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(4, 1), constrained_layout=True
    )
    for who, curve in losses.curves.items():
        style: dict[str, Any] = {"color": "0.65", "lw": 1, "ls": "--"}
        if not who.startswith("alone"):
            style |= {"color": "black", "ls": "--" if who == "all" else ":"}
        label = _LABELS.get(who)
        upper.plot(*zip(*curve, strict=True), label=label, **style)
    for color, act in zip(_COLORS, run.acts.values(), strict=True):
        for number, life in enumerate(_lives(run, act)):
            label = None if number else f"{act.name}, together"
            upper.plot(*zip(*life, strict=True), color=color, marker=".", lw=1.2, label=label)
    upper.plot(
        run.steps,
        losses.merged_on_curve,
        "*",
        color="green",
        ms=14,
        label="global model, at the end",
    )
    upper.set(ylabel="held-out loss (nats per byte)")
    upper.legend(fontsize="small")
    upper.grid(alpha=0.3)
    _presence(lower, run)
    figure.suptitle("Four learners, two frameworks, one model; one was killed and came back")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _lives(run: Run, act: Act) -> list[list[tuple[float, float]]]:
    """Clock of the run and held-out loss, measured by a learner, for each of its lives."""
    seconds, clocks = zip(*run.clocks, strict=True)
    lives: list[list[tuple[float, float]]] = []
    before = float("inf")
    for line in act.losses:
        if "held_out" in line:
            if line["step"] < before:
                lives.append([])
            before = line["step"]
            clock = float(np.interp(line["time"], seconds, clocks))
            lives[-1].append((clock, line["held_out"]))
    return lives


def _presence(axes: Any, run: Run) -> None:
    for row, (color, act) in enumerate(zip(_COLORS, run.acts.values(), strict=True)):
        axes.plot(act.seen, [row] * len(act.seen), "|", color=color, ms=9, mew=5)
    for _, clock, what in run.events:
        word = next((word for word in ("killed", "started", "back") if word in what), None)
        if VICTIM in what and word:
            axes.axvline(clock, color="0.4", lw=0.8, ls=":")
            axes.text(clock, -0.6, word, fontsize="small", va="bottom", ha="center")
    axes.set(yticks=range(len(CAST)), yticklabels=list(CAST), xlabel="step", ylim=(3.6, -0.6))


@torch.no_grad()
def sample(model: GPT2LMHeadModel, length: int = 240, seed: int = 0) -> str:
    """Text as the model would write it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([list(_PROMPT)])
    for _ in range(length):
        logits = model.eval()(ids[:, -CONTEXT:]).logits[0, -1] / 0.7
        choice = torch.multinomial(logits.softmax(0), 1, generator=generator)
        ids = torch.cat([ids, choice[None]], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")

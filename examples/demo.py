"""One model, four learners, two frameworks.

Two Lightning and two Hugging Face trainers, each with a quarter of the text, train one GPT-2.
One of them is killed on the way and comes back.

    make demo        (or: python examples/demo.py)

What it writes is in demo/: result.json, loss.png, model.safetensors with config.json, logs/.
Exits with 1 if the global model is not better than each of the learners would have been alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from backstage.live import View, table
from backstage.processes import Child, ChildFailedError, Children
from backstage.run import EXAMPLES, POLL_SECONDS, Run

FLAGS: Final = ["--sync-every", "10", "--fragments", "10", "--quorum", "2"]
WHY: Final = (
    "Every fragment is merged each 10 steps instead of 24, since the run is short, and from two"
    " learners or more, since four that share two cores take turns. The rest is default: outer"
    " SGD, lr 0.7, Nesterov momentum 0.5."
)


def main() -> int:
    """Runs the demo; returns the exit code."""
    options = _options()
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    folder = _empty(options.out.resolve())
    flags = options.syncer_flags.split() if options.syncer_flags else FLAGS
    try:
        with Children(folder) as children:
            run = Run(children, folder, options.steps, options.seed, flags)
            if flags is FLAGS:
                console.print(WHY, highlight=False)
            with View(console) as view:
                for _ in run.play():
                    view.show(run)
            if not console.is_terminal:
                console.print(table(run))
            return _compare(console, children, run, parallel=options.data_parallel)
    except ChildFailedError as error:
        console.print(f"The demo failed: {error}", style="red", highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; all processes have been ended.")
        return 130


def _compare(console: Console, children: Children, run: Run, *, parallel: bool) -> int:
    """Train what to compare with, and say how it compares."""
    began = time.monotonic()
    console.print("\nFor comparison: the same model and steps, in one process each.")
    baselines = _start_baselines(children, run, parallel=parallel)
    # Only now, so that it does not slow the learners down.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import torch

    from backstage import results

    torch.set_num_threads(1)
    model = results.load(run.folder)
    text = results.sample(model)
    for child in baselines:
        while child.code is None:
            time.sleep(POLL_SECONDS)
        child.check()
    losses = results.gather(run, model, [_report(run.folder, child.name) for child in baselines])
    seconds = {"run": run.events[-1][0], "baselines": time.monotonic() - began}
    seconds["total"] = run.seconds
    results.plot(run.folder / "loss.png", run, losses)
    results.write_json(run.folder / "result.json", run, losses, seconds)
    results.show(console, losses, run.steps)
    console.print("A sample of the global model:")
    console.print(f"{text}\n", style="italic", highlight=False, markup=False)
    console.print(
        f"{run.seconds:.0f} s in all. {run.folder}: result.json, loss.png, and the global model"
        f' for from_pretrained("{run.folder.name}").',
        highlight=False,
    )
    if not losses.good:
        console.print("The global model is NOT better than every lone learner.", style="bold red")
        return 1
    return 0


def _start_baselines(children: Children, run: Run, *, parallel: bool) -> list[Child]:
    """Two processes, for two cores."""
    work = [["alone:0", "alone:1", "all"], ["alone:2", "alone:3"]]
    if parallel:
        work = [["alone:0", "alone:1", "alone:2", "alone:3", "all"], ["parallel"]]
    script = EXAMPLES / "backstage" / "baselines.py"
    started = []
    for number, names in enumerate(work, start=1):
        name = f"baselines-{number}"
        report = ("--report", _report(run.folder, name))
        length = ("--steps", run.steps, "--seed", run.seed + 1)
        started.append(children.start(name, script, *length, *report, *names))
    return started


def _report(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.jsonl"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=EXAMPLES.parent / "demo", help="folder")
    parser.add_argument(
        "--syncer-flags", help=f"settings of the run, instead of {' '.join(FLAGS)!r}"
    )
    parser.add_argument(
        "--data-parallel",
        action="store_true",
        help="also compare with four times the batch (takes longer)",
    )
    return parser.parse_args()


def _empty(folder: Path) -> Path:
    """The folder, without what an earlier demo left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("result.json", "loss.png", "model.safetensors", "config.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)
    return folder


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

"""What the audience sees while the demo runs: a table in a terminal, lines anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from backstage.run import Act, Run

_LINE_SECONDS: Final = 5.0
_COLORS: Final = {"training": "green", "killed": "bold red", "starting again": "yellow"}


def fates(run: Run) -> str:
    """What became of the pushes, e.g. "310 merged, 12 late"."""
    counts = dict(run.body.get("fates", {}))
    counts["rejected"] = sum(counts.get("rejected", {}).values())
    return ", ".join(f"{count} {fate}" for fate, count in counts.items() if count) or "none"


def joined(act: Act) -> str:
    """Share of the rounds it was asked in that it took part in."""
    asked = act.status.get("rounds_asked", 0)
    return f"{100 * act.status['rounds_joined'] / asked:.0f} %" if asked else "-"


def _headline(run: Run) -> str:
    rounds = run.body.get("rounds", {}).get("merged", 0)
    state = run.body.get("state", "starting")
    return (
        f"{state}, clock {run.clock} of {run.steps}, {rounds} rounds merged; pushes: {fates(run)}"
    )


def table(run: Run) -> RenderableType:
    """The run as it is now."""
    rows = Table(expand=False)
    rows.add_column("learner")
    rows.add_column("state", min_width=14)
    for column in ("step", "lag", "rounds joined", "loss"):
        rows.add_column(column, justify="right")
    for act in run.acts.values():
        present = act.state == "training"
        rows.add_row(
            act.name,
            Text(act.state, style=_COLORS.get(act.state, "dim")),
            str(act.status.get("clock", "-")),
            str(act.status.get("lag", "-")) if present else "-",
            joined(act),
            f"{act.loss:.3f}" if act.loss is not None else "-",
        )
    clock = ProgressBar(total=run.steps, completed=min(run.clock, run.steps), width=60)
    return Group(rows, clock, Text(f"\n{_headline(run)}", style="dim"))


class View:
    """Shows a run. On a terminal a table that changes, and the events above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._told = 0
        self._next_line = 0.0

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, run: Run) -> None:
        """Show the run as it is now."""
        for seconds, _, sentence in run.events[self._told :]:
            self._console.print(f"{seconds:6.1f} s  {sentence}", highlight=False)
        self._told = len(run.events)
        if self._live is not None:
            self._live.update(table(run), refresh=True)
        elif run.seconds >= self._next_line:
            self._next_line = run.seconds + _LINE_SECONDS
            words = (
                f"{act.name} {act.state if act.state != 'training' else act.status.get('clock', 0)}"
                for act in run.acts.values()
            )
            line = f"{run.seconds:6.1f} s  {_headline(run)} | {', '.join(words)}"
            self._console.print(line, highlight=False, soft_wrap=True)

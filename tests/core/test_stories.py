"""The stories in `tests/stories`: what is done to a simulated world, and what its syncer then does.

A story is a text file: blocks of commands, a line `----`, and the transcript that must follow.
With DILOCO_REWRITE_STORIES=1 in the environment the transcripts are written anew: read the diff.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.core.parameters import SECOND_NS, Parameters
from diloco_plugin.testing import World

STORIES = sorted((Path(__file__).parent.parent / "stories").glob("*.txt"))
REWRITE = os.environ.get("DILOCO_REWRITE_STORIES") == "1"
RULE = "----"


def _names(lives: tuple[Life, ...]) -> str:
    return ", ".join(life.name for life in lives) or "nobody"


def _event(event: ev.Event) -> str | None:
    match event:
        case ev.Knocked(life=life):
            held = f", holding versions {list(event.versions)}" if event.versions else ""
            return f"{life.name} knocks{held}"
        case ev.Offered(life=life, nothing=""):
            return (
                f"{life.name} offers for round {event.round}: base {event.base},"
                f" {event.steps} steps, {event.tokens} tokens"
            )
        case ev.Offered(life=life):
            return f"{life.name} has nothing for round {event.round}: {event.nothing}"
        case ev.Received(life=life):
            return f"{life.name}'s push for round {event.round} is here"
        case ev.TransferFailed(life=life):
            return f"{life.name}'s push for round {event.round} failed: {event.reason}"
        case ev.CloseAsked(life=life):
            return f"{life.name} has finished, with progress in fragments {list(event.fragments)}"
        case ev.Left(life=life):
            return f"{life.name} leaves"
        case ev.Vanished(life=life):
            return f"{life.name} is not reachable any more"
        case ev.SeedReceived(life=life):
            return f"{life.name}'s model is here"
        case ev.TookModel(life=life):
            return f"{life.name} holds the model"
        case ev.StateOffered(life=life, nothing=""):
            return (
                f"{life.name}'s inner state of step {event.clock} is ready (ticket {event.ticket})"
            )
        case ev.StateOffered(life=life):
            return f"{life.name} cannot give its inner state: {event.nothing}"
        case ev.StateTaken(life=life):
            return f"{life.name} needs no inner state any more"
        case ev.StateFailed(life=life):
            return f"{life.name} did not get ticket {event.ticket}: {event.reason}"
        case ev.ProbeAnswered(life=life):
            return f"{life.name} is still here"
        case ev.MergeDone():
            return f"round {event.round} is merged" + ("" if event.ok else ", not finite")
        case ev.CommitDone():
            return f"round {event.round} is durable"
        case ev.StopAsked():
            return f"stop: {event.reason}"
    return None


def _action(action: act.Action) -> str | None:
    match action:
        case act.Admit(life=life):
            keeps = ", and it keeps what it holds" if action.keep else ""
            return f"let {life.name} in at clock {action.clock}, index {action.index}{keeps}"
        case act.Refuse(life=life):
            return f"refuse {life.name} ({action.code})"
        case act.AskHello(life=life):
            return f"ask {life.name} who it is"
        case act.Probe(life=life):
            return f"ask the old {life.name} whether it is still there"
        case act.Dismiss(life=life):
            return f"dismiss {life.name}: {action.reason}"
        case act.RequestSeed(life=life):
            return f"fetch the model from {life.name}"
        case act.Pull(lives=lives):
            closing = "closing " if action.closing else ""
            return (
                f"open {closing}round {action.round} of fragment {action.fragment}"
                f" with {_names(lives)}: {action.reason}"
            )
        case act.Fold(life=life):
            return f"add {life.name} to round {action.round}: {action.tokens}^2/{action.steps}"
        case act.Merge():
            return f"merge round {action.round}: {action.reason}"
        case act.Drop():
            return f"drop round {action.round}: {action.reason}"
        case act.Announce(lives=lives):
            exact = ", exactly" if action.exact else ""
            return (
                f"announce fragment {action.fragment} version {action.version}"
                f" to {_names(lives)}{exact}"
            )
        case act.TellFate(life=life):
            return f"tell {life.name}: round {action.round} {action.fate.value} ({action.reason})"
        case act.RequestState(donor=donor):
            return f"ask {donor.name} for its inner state (ticket {action.ticket})"
        case act.OfferState(joiner=joiner):
            return f"let {joiner.name} fetch ticket {action.ticket}"
        case act.EndState():
            return f"ticket {action.ticket} is over"
        case act.RefuseState(joiner=joiner):
            return f"no inner state for {joiner.name}: {action.reason}"
        case act.CompleteRun(lives=lives):
            return f"tell {_names(lives)}: {action.reason}"
        case act.Note() | act.Caution():
            return f"note: {action.text}"
        case act.Stop():
            return f"stop: {action.reason}"
    return None


class Story:
    """Carries out commands and transcribes."""

    def __init__(self) -> None:
        self.world = World()
        self._told = 0

    def carry_out(self, command: str) -> None:
        verb, *words = command.split()
        options: dict[str, Any] = {}
        names = [word for word in words if "=" not in word]
        if verb == "world":  # a word without a value is a flag
            options, names = dict.fromkeys(names, True), []
        for key, _, value in (word.partition("=") for word in words if "=" in word):
            number = value.replace(".", "", 1).isdigit()
            options[key] = (float(value) if "." in value else int(value)) if number else value
        getattr(self, f"_{verb}")(*names, **options)

    def transcript(self) -> Iterator[str]:
        new, self._told = self.world.log[self._told :], len(self.world.log)
        for now_ns, _, item in new:
            line = _event(item) if isinstance(item, ev.Event) else _action(item)
            if line is not None:
                mark = " " if isinstance(item, ev.Event) else "    -> "
                yield f"{now_ns / SECOND_NS:8.3f}{mark}{line}"

    def _world(self, **options: Any) -> None:
        known = ("steps", "seeded", "seed", "latency_ms", "transfer_ms", "work_ms")
        world = {key: options.pop(key) for key in known if key in options}
        parameters = Parameters(**options)
        self.world = World(parameters, fragments=parameters.fragments, **world)

    def _start(self, *names: str, **options: Any) -> None:
        wants_state = bool(options.pop("wants_state", False))
        for name in names:
            self.world.learner(name, wants_state=wants_state, **options)

    def _run(self, seconds: str) -> None:
        self.world.run(float(seconds))

    def _crash(self, name: str) -> None:
        self.world.crash(name)

    def _cut(self, name: str) -> None:
        self.world.cut(name, silent=True)

    def _mend(self, name: str) -> None:
        self.world.mend(name)

    def _pause(self, name: str) -> None:
        self.world.learners[name].paused = True

    def _spoil(self, name: str) -> None:
        self.world.learners[name].finite = False

    def _finish(self, *names: str) -> None:
        for name in names:
            self.world.learners[name].finish()

    def _restart(self) -> None:
        self.world.restart_syncer()

    def _stop(self, *reason: str) -> None:
        self.world.stop_syncer(" ".join(reason))


def _tell(story: str) -> str:
    teller, told, skipping = Story(), [], False
    for line in [*story.splitlines(), ""]:
        if skipping and line:
            continue
        skipping = line == RULE
        told.append(line)
        if skipping:
            told += teller.transcript()
        elif line and not line.startswith("#"):
            teller.carry_out(line)
    return "\n".join(told).rstrip("\n") + "\n"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_story_goes_as_told(path: Path) -> None:
    before = path.read_text()
    after = _tell(before)
    if REWRITE:
        path.write_text(after)
    assert after == before or REWRITE


def test_there_are_stories() -> None:
    assert len(STORIES) >= 6

"""Recompute the decisions on a tape with the core of this version, and compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from diloco_plugin._version import __version__
from diloco_plugin.core.parameters import SECOND_NS
from diloco_plugin.core.syncer import SyncerCore
from diloco_plugin.errors import ConfigError, DamagedError
from diloco_plugin.tape.codec import Outcome, Step
from diloco_plugin.tape.freezing import freeze, thaw
from diloco_plugin.tape.segments import Header, Segment, read_segment, segment_paths

DIFFERENT: Final = 1
_encoder: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where tape and core disagree, in words."""

    where: str
    event: str
    recorded: tuple[str, ...]
    computed: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people; what is the same is marked with a blank."""
        lines = [f"different at {self.where}", f"  event: {self.event}"]
        for title, own, other in (
            ("recorded", self.recorded, self.computed),
            ("computed", self.computed, self.recorded),
        ):
            lines.append(f"  {title}:")
            for index, text in enumerate(own):
                same = other[index : index + 1] == (text,)
                lines.append(f"    {' ' if same else '!'} {text}")
            lines += [] if own else ["    ! nothing"]
        return lines


@dataclass(slots=True)
class Replay:
    """What has been replayed so far."""

    events: int = 0
    decisions: int = 0
    lives: int = 0
    difference: Difference | None = None

    def __str__(self) -> str:
        lives = f"{self.lives} {'life' if self.lives == 1 else 'lives'} of the syncer"
        return f"{self.events:,} events, {self.decisions:,} decisions, {lives}"


def replay(path: Path, say: Callable[[str], None]) -> Replay:
    """Replays a directory or one segment up to the first difference.

    `say` is told, line by line, what one should know besides: another version, a torn end, a gap.

    Raises:
        ConfigError: there is no tape, or it cannot be read.
        DamagedError: it is not what was written.
    """
    player = _Player(say)
    try:
        paths = segment_paths(path) if path.is_dir() else [path]
        if not paths:
            raise ConfigError(f"{path} holds no tape: expected files such as 000001.tape.")
        for one in paths:
            segment = read_segment(one)
            if segment.foreign:
                raise ConfigError(f"{one} is no tape: expected a file such as 000001.tape.")
            player.play(segment)
            if player.result.difference:
                break
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or path}: {error.strerror}.") from None
    return player.result


def show(path: Path, say: Callable[[str], None]) -> int:
    """Replays, tells the outcome, and returns the exit code. Raises what `replay` raises."""
    result = replay(path, say)
    if result.difference is None:
        say(f"the same: {result}")
        return 0
    for line in result.difference.lines():
        say(line)
    say(f"the same before it: {result}")
    return DIFFERENT


class _Player:
    def __init__(self, say: Callable[[str], None]) -> None:
        self.result = Replay()
        self._say = say
        self._warned = {__version__}
        self._core: SyncerCore | None = None
        self._events = 0

    def play(self, segment: Segment) -> None:
        name, version = segment.path.name, __version__
        if segment.scan.end == "torn":
            self._say(f"{name} ends in the middle of a record, as after a kill")
        if segment.empty and segment.scan.end != "damaged":
            return  # cut off before its header was written
        try:
            version = segment.version()
            if version not in self._warned:
                self._warned.add(version)
                self._say(
                    f"{name} was made by version {version}, this is {__version__}:"
                    " differences need not be errors"
                )
            self._play(name, segment)
        except Exception as error:  # a state that only looks like one may break the core anywhere
            text = str(error)
            if not isinstance(error, DamagedError):
                text = f"this is not what a syncer writes ({type(error).__name__}: {error})."
            place = "" if name in text else f"{name}: "
            todo = f" Replay it with diloco-plugin {version}." if version != __version__ else ""
            raise DamagedError(
                f"{place}{text}{todo} (The same before it: {self.result}.)"
            ) from None

    def _play(self, name: str, segment: Segment) -> None:
        header = segment.header()
        core = thaw(header.state)
        self._join(name, header, core)
        self._core, self._events = core, header.events_before
        for step in segment.steps():
            if self.result.difference:
                return
            self._compare(name, core, step)

    def _join(self, name: str, header: Header, core: SyncerCore) -> None:
        """How a segment follows the one before it: a new life, a gap, or without a seam."""
        before = self._core
        if before is None or before.epoch != header.epoch:
            self.result.lives += 1
        elif self._events != header.events_before:
            self._say(f"events {self._events + 1:,} to {header.events_before:,} are missing")
        elif _encoder.encode(freeze(before)) != _encoder.encode(header.state):
            recorded, computed = _first_difference(header.state, freeze(before), "core")
            self.result.difference = Difference(
                f"the beginning of {name}: the state of the core",
                f"all up to number {self._events:,}",
                (recorded,),
                (computed,),
            )

    def _compare(self, name: str, core: SyncerCore, step: Step) -> None:
        computed = _outcome_of(core, step)
        self._events += 1
        if computed != step.outcome:
            seconds = (step.event.now_ns - core.started_ns) / SECOND_NS
            self.result.difference = Difference(
                f"event {self._events:,} ({name}), {seconds:.3f} s after the start of epoch"
                f" {core.epoch}",
                str(step.event),
                _texts(step.outcome),
                _texts(computed),
            )
            return
        self.result.events += 1
        self.result.decisions += len(step.outcome) if isinstance(step.outcome, tuple) else 0


def _outcome_of(core: SyncerCore, step: Step) -> Outcome:
    try:
        return core.step(step.event)
    except Exception as error:  # it may be what happened when this was recorded
        return f"{type(error).__name__}: {error}"


def _texts(outcome: Outcome) -> tuple[str, ...]:
    if isinstance(outcome, str):
        return (f"raised {outcome}",)
    return tuple(str(action) for action in outcome)


def _first_difference(recorded: Any, computed: Any, path: str) -> tuple[str, str]:
    """Both values at the first place where two states differ."""
    if isinstance(recorded, dict) and isinstance(computed, dict):
        pairs = [(f"{path}.{key}", recorded[key], computed[key]) for key in recorded]
    elif isinstance(recorded, list) and isinstance(computed, list):
        same_length = (
            zip(recorded, computed, strict=False) if len(recorded) == len(computed) else ()
        )
        pairs = [(f"{path}[{i}]", one, other) for i, (one, other) in enumerate(same_length)]
    else:
        pairs = []
    for deeper, one, other in pairs:
        if _encoder.encode(one) != _encoder.encode(other):
            return _first_difference(one, other, deeper)
    return f"{path} = {recorded!r:.200}", f"{path} = {computed!r:.200}"

"""`diloco repair`: what is damaged in a state directory, and making it usable again.

It says before it does: without --write or --from-learners nothing is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from diloco_plugin.config import SyncerConfig, duration
from diloco_plugin.core.past import Past
from diloco_plugin.errors import ConfigError, DamagedError
from diloco_plugin.store import RunFile
from diloco_plugin.store.repair import FragmentState, Report, examine, rebuild
from diloco_plugin.syncer.keeping import commit_of
from diloco_plugin.syncer.salvaging import Salvager, Wanted

Found = Mapping[int, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What was asked for. Neither `write` nor `from_learners`: only look."""

    state: str
    write: bool = False
    from_learners: bool = False
    accept_loss: bool = False
    bind: str = ""
    keys: str = ""
    insecure_plaintext: bool = False
    wait: str = "10m"

    @property
    def command(self) -> str:
        """What the user has typed, so far as all choices share it."""
        return f"diloco repair --state {self.state}"


def repair(options: Options, say: Callable[[str], None]) -> int:
    """Looks, and repairs if asked to; returns the exit code. `say` is told a line at a time.

    Raises:
        StateLockedError: a syncer uses the directory.
        DamagedError: something is missing, and what would help. Nothing was changed.
        ConfigError: the directory, the address, the keys or the time to wait cannot be used.
        AddressInUseError: somebody listens where learners should be waited for.
        StoreError: the disk failed or is full.
    """
    directory = Path(options.state)
    seconds = duration(options.wait)
    report = examine(directory)
    if not report.problems:
        say(f"{options.state}: nothing is damaged.")
        return 0
    if not options.write and not options.from_learners:
        for line in [*findings(report), *choices(report, options)]:
            say(line)
        return DamagedError.exit_code
    found: Found = {}
    if options.from_learners and report.run is not None:
        found = _from_learners(options, report, report.run, seconds, say)
    _refuse_silent_loss(options, report, found)
    if report.manifest is None:
        say("No manifest can be read: clock and merges are taken from the fragments that are left.")
    notes = rebuild(
        directory,
        {fragment: (theta,) for fragment, theta in found.items()},
        accept_loss=options.accept_loss,
        past=_past(report, found),
    )
    for note in notes:
        say(note)
    say(
        f"Start the syncer as before, with --state {options.state}: learners that train on find it"
        " by themselves."
    )
    return 0


# ---- looking ----


def findings(report: Report) -> list[str]:
    """What is wrong, in sentences."""
    lines = [f"{report.root} is damaged:", *(f"  {problem}" for problem in report.problems)]
    lost = _lost(report)
    lines += [f"  {_name(state)} was announced and is lost ({_older(state)})." for state in lost]
    if report.run is not None and not lost:
        lines.append("  The newest version of every fragment is intact.")
    return lines


def choices(report: Report, options: Options) -> list[str]:
    """What can be done, and what each choice would do."""
    lost = _lost(report)
    if report.run is None:
        return [
            "Nothing was changed. Without run.json and its copy in epoch.json nothing can be done:"
            " put a copy of either back, or start a new run in another directory, with --init from"
            " an exported model."
        ]
    lines = ["Nothing was changed. What can be done:"]
    if not lost:
        return [
            *lines,
            f"  {options.command} --write",
            "    goes on from what is intact; nothing that was announced is lost.",
        ]
    asked = [state for state in lost if state.base_digest]
    if asked:
        lines += [
            f"  {options.command} --from-learners --bind ADDRESS [--keys DIR]",
            f"    takes {_names(asked)} back from learners that train on without their syncer."
            " ADDRESS and keys are those that it had.",
            f"    {_who_helps(report.run)}",
        ]
    if all(state.held >= 0 for state in lost):
        lines += [
            f"  {options.command} --write --accept-loss",
            f"    gives {_names(lost)} up: {'; '.join(map(_goes_on, lost))}.",
        ]
    elif len(asked) < len(lost):
        lines.append(
            "  Put copies of the missing files back. There is no other way: learners cannot prove"
            " what they hold of a fragment whose records are lost, and no version of it is left."
        )
    return [*lines, "  Damaged files are kept in evidence/ in any case."]


def _who_helps(run: RunFile) -> str:
    dtypes = sorted({dtype for _, _, dtype, _, _ in run.tensors})
    whose = f"the run's first learner had {', '.join(dtypes)}"
    return f"Learners whose parameters are float32 hold it to the bit; {whose}."


def _lost(report: Report) -> list[FragmentState]:
    return [state for state in report.fragments if not state.intact]


def _name(state: FragmentState) -> str:
    return f"version {state.version} of fragment {state.fragment}"


def _names(states: list[FragmentState]) -> str:
    return ", ".join(map(_name, states))


def _older(state: FragmentState) -> str:
    return f"version {state.held} is intact" if state.held >= 0 else "no version is intact"


def _goes_on(state: FragmentState) -> str:
    return f"fragment {state.fragment} goes on from version {state.held}"


# ---- repairing ----


def _from_learners(
    options: Options, report: Report, run: RunFile, seconds: float, say: Callable[[str], None]
) -> Found:
    wanted = [
        Wanted(state.fragment, state.version, state.base_digest)
        for state in _lost(report)
        if state.base_digest
    ]
    if not wanted:
        return {}
    had = report.life.start.get("keys") if report.life else ""
    if had and not options.keys:
        raise ConfigError(
            f"keys: the syncer had the keys in {had}, and its learners talk to nobody else. Add"
            f" --keys {had}."
        )
    config = SyncerConfig(
        bind=options.bind,
        run=run.run,
        keys=options.keys,
        insecure_plaintext=options.insecure_plaintext,
    )
    if problem := config.problem():
        raise ConfigError(problem)
    with contextlib.closing(Salvager(config, run, wanted, say)) as salvager:
        say(f"Learners are waited for at {salvager.address}, for {options.wait}.")
        return salvager.gather(seconds)


def _refuse_silent_loss(options: Options, report: Report, found: Found) -> None:
    """An announced version is given up only where the user said so."""
    lost = [state for state in _lost(report) if state.fragment not in found]
    if options.accept_loss:
        lost = [state for state in lost if state.held < 0]
    if not lost or report.run is None:  # without run.json, rebuild() says what there is to say
        return
    what = "; ".join(f"{_name(state)} ({_older(state)})" for state in lost)
    ways = []
    if options.from_learners:
        ways.append(
            f"No learner gave it back within {options.wait}: see that learners run and look for"
            f" their syncer at {options.bind}, and try again"
        )
    elif any(state.base_digest for state in lost):
        ways.append(
            f"Take it back from learners: `{options.command} --from-learners --bind ADDRESS"
            " [--keys DIR]`"
        )
    if all(state.held >= 0 for state in lost):
        ways.append(f"give it up: `{options.command} --write --accept-loss`")
    fix = "; or ".join(ways) or "Put copies of the missing files back"
    raise DamagedError(f"announced and lost: {what}. Nothing was changed. {fix}.")


def _past(report: Report, found: Found) -> Any:
    """What can be known of the run's past without a manifest."""
    past = Past.seeded(len(report.fragments))
    records = [entry.record for known in report.entries.values() for entry in known.values()]
    for record in sorted(records, key=lambda record: (record.epoch, record.round)):
        if record.fragment < len(report.fragments):
            past.add(commit_of(record))
    for state in report.fragments:
        if state.fragment < len(past.versions):
            whole = state.intact or state.fragment in found
            past.versions[state.fragment] = state.version if whole else state.held
    return msgspec.to_builtins(past, str_keys=True)

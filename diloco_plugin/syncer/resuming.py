"""Going on with a run: what is on disk decides, and what was asked for now must agree with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from diloco_plugin._version import __version__
from diloco_plugin.config import SyncerConfig, parameters_from, parameters_to
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.core.policy import counted
from diloco_plugin.errors import ConfigError, DamagedError
from diloco_plugin.store import RunFile, Store
from diloco_plugin.syncer.keeping import past_of
from diloco_plugin.syncer.model import GlobalModel
from diloco_plugin.tensors.layout import TensorSpec, build_layout

log = logging.getLogger("diloco.syncer")

#: Parameters that a run may be given anew: what is merged stays the same kind of thing.
CHANGEABLE: Final = frozenset(
    {"quorum", "grace", "outer_lr", "max_staleness", "norm_guard", "lease", "close_timeout"}
)
#: What a state does not bring back: every start must say it.
EACH_START: Final = ("bind", "steps", "export", "publish", "keys", "tape", "durability")


def open_store(config: SyncerConfig) -> Store | None:
    """The state directory, locked and repaired, in a new epoch; None: nothing is to be kept.

    Raises:
        StateLockedError, DamagedError, StoreError, ConfigError.
    """
    if not config.state:
        return None
    now_ms = time.time_ns() // 1_000_000
    store = Store.open(Path(config.state), durability=config.durability, now_ms=now_ms)
    for note in store.notes:
        log.warning("%s: %s", config.state, note)
    return store


def reconcile(config: SyncerConfig, given: Collection[str] | None, run: RunFile) -> SyncerConfig:
    """The configuration of a run that goes on: what was not asked for is as it was.

    Args:
        given: keys that somebody has set; None: all of them.

    Raises:
        ConfigError: something that may not change, or not without --override, was asked for.
    """
    before = parameters_from(run.parameters, source=f"{config.state}/run.json")
    now, changes = config.parameters, {}
    refused: list[str] = []
    fixed: list[str] = []
    for item in fields(Parameters):
        old, new = getattr(before, item.name), getattr(now, item.name)
        if old == new or (given is not None and item.name not in given):
            continue
        # a lockstep run waits for so many: another number is another run
        changeable = item.name in CHANGEABLE or (item.name == "learners" and not before.lockstep)
        if config.override and changeable:
            changes[item.name] = new
        else:
            refused.append(f"{item.name}={old!r}, now {new!r}")
            if not changeable:
                fixed.append(item.name)
    if config.run != run.run and (given is None or "run" in given):
        refused.append(f"run={run.run!r}, now {config.run!r}")
        fixed.append("run")
    if refused:
        what = f"the run in {config.state} was started with {'; '.join(refused)}."
        if not fixed:
            raise ConfigError(f"{what} Add --override to change that, or leave it out.")
        raise ConfigError(
            f"{what} Leave that out to go on with it, or start a new run in another --state:"
            f" {' and '.join(fixed)} cannot be changed, --override or not ("
            f"{', '.join(sorted(CHANGEABLE))} and, outside lockstep, learners can)."
        )
    if changes:
        log.info("changed by --override: %s", ", ".join(f"{k}={v}" for k, v in changes.items()))
    return replace(config, run=run.run, parameters=replace(before, **changes))


def start_of(config: SyncerConfig) -> dict[str, Any]:
    """What this start is told, for the next one to compare."""
    return {key: getattr(config, key) for key in EACH_START}


def compare_starts(
    config: SyncerConfig, given: Collection[str] | None, last: Mapping[str, Any], clock: int
) -> None:
    """Warns of what only the last start was told, of a run that has come to step `clock`.

    Raises:
        ConfigError: the run is beyond the last step asked for, and the last start asked for another
            one. If it asked for the same, the run was ending: it ends again, and is exported.
    """
    if 0 < config.steps <= clock and config.steps != last.get("steps"):
        raise ConfigError(
            f"steps={config.steps}: the run in {config.state} has already reached step {clock}."
            " Give more --steps, or leave it out to train until told to stop."
        )
    if 0 < config.steps <= clock:
        log.info("the run had reached its last step (%d) before: it ends again", config.steps)
    missing = [
        f"{key}={value!r}"
        for key, value in last.items()
        if given is not None and key not in given and value != getattr(config, key, value)
    ]
    if missing:
        log.warning(
            "the last start had %s, and this one has not: a state remembers the parameters of its"
            " run only; give these again if you still want them",
            ", ".join(missing),
        )


def run_file(
    config: SyncerConfig, specs: tuple[TensorSpec, ...], model: GlobalModel, model_config: str
) -> RunFile:
    """What a later life has to know about a run."""
    return RunFile(
        run=config.run,
        parameters=parameters_to(config.parameters),
        tensors=tuple((s.name, s.shape, s.dtype, s.kind, s.alias_of) for s in specs),
        fragments=len(model.layout.fragments),
        fingerprint=model.layout.fingerprint,
        model_config=model_config,
        version=__version__,
    )


def specs_of(run: RunFile) -> tuple[TensorSpec, ...]:
    """The tensors of a run, as its learners introduced them."""
    return tuple(TensorSpec(*spec) for spec in run.tensors)


def restore(store: Store, config: SyncerConfig) -> GlobalModel | None:
    """The global model as it is on disk, or None if no learner has brought one yet.

    Raises:
        DamagedError: a file is not what was written there.
    """
    past, run = past_of(store), store.run
    if past is None or run is None:
        return None
    layout = build_layout(specs_of(run), run.fragments)
    if layout.fingerprint != run.fingerprint:
        raise DamagedError(
            f"{config.state}/run.json describes a model with fingerprint {layout.fingerprint[:12]},"
            f" but its fragments were made for {run.fingerprint[:12]}: use the diloco-plugin"
            f" version that made them ({run.version}), or look with"
            f" `diloco repair --state {config.state}`."
        )
    model = GlobalModel(layout, config.parameters)
    for fragment, version in enumerate(past.versions):
        record, tensors = store.load(fragment)
        assert record.version == version, "the store gives another version than its journal"
        model.restore(fragment, version, tensors, exact=record.exact)
    merges = counted(sum(past.versions), "merge")
    log.info("going on with run %r at step %d, %s", run.run, past.clock, merges)
    return model

"""What a daemon tells its user at the start: settings that are legal, but often a mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from diloco_plugin.config import SyncerConfig

#: Rounds that a momentum needs, in units of its horizon 1/(1 - momentum).
_HORIZONS: Final = 10


def advice(config: SyncerConfig, *, goes_on: bool = False) -> list[str]:
    """Sentences to log at start, each with the values it is about and what to do; usually none.

    A run that goes on has its momentum, and cannot change what the first two are about.
    """
    found = [] if goes_on else [_momentum(config), _short(config)]
    found += [_lockstep(config), _nowhere(config)]
    return [sentence for sentence in found if sentence]


def _momentum(config: SyncerConfig) -> str | None:
    """Warns when the outer momentum is long compared with the rounds that a fragment gets.

    Momentum mu averages over about 1/(1-mu) rounds and multiplies the learning rate by as much in
    the long run. Measured on a small language model (README, "Choosing the outer optimizer"): 0.9
    hurts at 16 and at 62 rounds, 0.5 is the best at 62 and is beaten by none at 16. Ten horizons
    separate these cases: 100 rounds for 0.9, 20 for 0.5, and no momentum is always quiet.
    """
    p = config.parameters
    if p.outer_optimizer.upper() != "SGD" or p.outer_momentum == 0.0 or config.steps == 0:
        return None
    horizon = 1.0 / (1.0 - p.outer_momentum)
    rounds = config.steps // p.sync_every
    needed = round(_HORIZONS * horizon)
    if rounds >= needed:
        return None
    fix = "use `--outer-momentum 0 --outer-lr 1.0` (that is `--preset finetune`)"
    if rounds >= 2 * _HORIZONS and p.outer_momentum > 0.5:
        fix = f"use `--outer-momentum 0.5`, or {fix.removeprefix('use ')}"
    return (
        f"outer_momentum={p.outer_momentum:g} averages over about {horizon:.3g} rounds and raises"
        f" outer_lr={p.outer_lr:g} to an effective {p.outer_lr * horizon:.3g}, but"
        f" steps={config.steps} with sync_every={p.sync_every} gives every fragment only {rounds}"
        f" {'round' if rounds == 1 else 'rounds'}; it starts to pay at about {needed}: {fix}."
    )


def _short(config: SyncerConfig) -> str | None:
    if not 0 < config.steps < config.parameters.sync_every:
        return None
    return (
        f"steps={config.steps} is less than sync_every={config.parameters.sync_every}: some"
        " fragments are merged only once, when learners finish. Lower sync_every (and fragments)."
    )


def _lockstep(config: SyncerConfig) -> str | None:
    if not config.parameters.lockstep:
        return None
    return (
        f"lockstep: all {config.parameters.learners} learners wait for each other, and one that"
        " dies stops the others until it is back. Use it for baselines and debugging only."
    )


def _nowhere(config: SyncerConfig) -> str | None:
    if config.export or config.publish:
        return None
    return (
        "the global model is not written anywhere when the run ends; only its learners hold it"
        " then. Add `--export model.safetensors` or `--publish hf://org/name`."
    )

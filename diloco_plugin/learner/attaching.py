"""`attach()`: the one line that makes a training loop a learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from diloco_plugin.errors import ConfigError
from diloco_plugin.learner.learner import Learner


def attach(
    model: nn.Module,
    optimizer: Any,
    address: str | None = None,
    *,
    name: str | None = None,
    keys: str | None = None,
    run: str = "",
    tokens: Callable[[Any], int] | None = None,
    module: str | None = None,
    count_forward: bool = True,
    apply: str = "auto",
    require_syncer: bool = True,
    connect_timeout: float = 60.0,
    close_timeout: float | None = None,
    data_seed: int | None = None,
    model_config: str | None = None,
    state: str = "peer",
    scheduler: Any = None,
    steps: int = 0,
) -> Learner:
    """Make this training a learner: join the run at `address` and take its model.

    Blocks until the global model is in the parameters (or this learner's model has become the
    global one). After that nothing ever waits for the syncer or for another learner, lockstep runs
    aside.

    Args:
        model: the model as it is trained; compiled, DDP-wrapped or plain.
        optimizer: the inner optimizer, or a sequence of them. Never changed.
        address: `tcp://host:port` of the syncer; default: the environment variable `DILOCO_SYNCER`.
        name: of this learner; a learner that returns under its name finds its place again. Default:
            the environment variable `DILOCO_NAME`, else that of the only key in `keys`, else host
            name and process id.
        keys: folder of keys (`diloco keygen` makes one), needed where the syncer has keys or is on
            another machine; or "insecure-plaintext". Default: the environment variable
            `DILOCO_KEYS`, else `~/.config/diloco`.
        run: refuse to join any other run than this one.
        tokens: units of work in a batch (what `forward` was called with); default: ones in
            `attention_mask`, else size of `input_ids`, else samples.
        module: sync only this submodule (e.g. "model" of a LightningModule), under names relative
            to it, so that learners of different frameworks share a run.
        count_forward: count units of work in the model's forward; False where `count_batch` does.
        apply: "inline" acts inside the optimizer's step hook, so that the loop stays as it is;
            "boundary" acts only in `Learner.boundary()`, which the loop calls after a step when no
            graph is alive. "auto" is inline for one optimizer, boundary for several.
        require_syncer: False trains alone until the syncer appears.
        connect_timeout: seconds to wait for the syncer, and for its model while none of it comes.
        close_timeout: seconds that `close()` waits while nothing moves; default: what the syncer
            says (30).
        data_seed: seed of the data order; the syncer warns when two learners have the same.
        model_config: JSON of the model's configuration, published with the global model. Default:
            that of `model.config`, or of the adapter, if it is a Hugging Face model.
        state: where the optimizer's state comes from when this learner joins. "peer": from the
            learner that is furthest, if one can give it and this optimizer's own is not newer (a
            resumed checkpoint); one line in the log says which it is. "fresh": nothing is taken.
        scheduler: the learning rate scheduler, or a sequence of them: it is put where the peer's
            stands, if it is of the same class.
        steps: that a resumed checkpoint has behind it, where the optimizer's state does not count.

    Raises:
        UnreachableError: no syncer answered within `connect_timeout`.
        RefusedError: the syncer said no (another model, another run, a name that is taken,
            keys that do not match, ...).
        LayoutError: the model cannot be synced.
        UnsupportedError: the optimizer cannot be synced.
        ConfigError: an argument is wrong.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if apply not in ("auto", "inline", "boundary"):
        raise ConfigError(f"apply={apply!r} is unknown: use 'auto', 'inline' or 'boundary'.")
    if apply == "inline" and len(optimizers) > 1:
        raise ConfigError(
            "apply='inline' is for one optimizer: with several, another one's graph may be alive."
            " Use apply='boundary' and call learner.boundary() where no graph is alive."
        )
    if state not in ("peer", "fresh"):
        raise ConfigError(f"state={state!r} is unknown: use 'peer' or 'fresh'.")
    inline = apply == "inline" or (apply == "auto" and len(optimizers) == 1)
    learner = Learner(
        model,
        optimizers,
        address,
        name=name,
        keys=keys,
        run=run,
        tokens=tokens,
        module=module,
        count_forward=count_forward,
        inline=inline,
        close_timeout=close_timeout,
        data_seed=data_seed,
        model_config=model_config,
        # who may train before it has joined has better by then
        inner_state=state == "peer" and require_syncer,
        scheduler=scheduler,
        steps=steps,
    )
    try:
        learner.join(connect_timeout, required=require_syncer)
    except BaseException:
        learner.abandon()
        raise
    return learner

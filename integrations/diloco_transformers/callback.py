"""`DiLoCoCallback`: a Trainer of Hugging Face, TRL included, trains one model with others.

Only where the Trainer calls is decided here; what happens then is the learner's business. Not an
`ExportableState`: the Trainer would restore one as a new object with the old arguments, and could
not save again after resuming a checkpoint without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from accelerate.state import PartialState
from transformers import TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from diloco_plugin.errors import UnsupportedError
from diloco_plugin.learner import Learner, attach

log = logging.getLogger("diloco.transformers")

#: Under this key, which is the name of no class, the Trainer keeps our state in its checkpoints.
STATE_KEY: Final = "diloco"
#: The Trainer logs these together once, after the last step and before it loads the best model.
_LAST_LOG: Final = frozenset({"train_loss", "train_runtime"})
_EVALUATION: Final = ("eval_", "test_")

_REFUSED: Final = {
    "DEEPSPEED": "DeepSpeed's engine steps, and its fp32 masters undo every merge",
    "FSDP": "FSDP shards the parameters over the ranks, and a fragment is made of whole tensors",
    "MEGATRON_LM": "Megatron shards the parameters, and its fp32 masters undo every merge",
}


class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]  # untyped base
    """Makes a `Trainer` a learner: joins when training begins, leaves with the global model.

    Joins after a checkpoint was resumed, and before the first step the parameters are those of the
    global model. When training ends, whatever ends it, they are the global model again, and the
    checkpoint of the last step holds it; what `load_best_model_at_end` loads then stays.
    Works under torchrun (DDP: one learner, its first rank speaks), with PEFT (only what requires
    grad is shared) and with TRL's trainers. `trainer.train()` may be called again, also after an
    error.

    Args:
        syncer: `tcp://host:port`; default: the environment variable `DILOCO_SYNCER`.
        name: of this learner; one that returns under its name finds its place again. Default: the
            environment variable `DILOCO_NAME`, else host name and process id.
        keys: folder of keys (`diloco keygen`), or "insecure-plaintext"; default: the environment
            variable `DILOCO_KEYS`, else `~/.config/diloco`.
        run: refuse to join any other run than this one.
        module: share only this submodule, under names relative to it.
        tokens: units of work in the keyword arguments of `forward`; default: ones in
            `attention_mask`, else size of `input_ids`, else samples.
        require_syncer: False trains alone until the syncer appears.
        connect_timeout: seconds to wait for the syncer and its model.
        close_timeout: seconds that leaving waits while nothing moves; default: what the syncer
            says (30).
        data_seed: seed of the data order; the syncer warns when two learners have the same.
            Default: `args.data_seed`, else `args.seed`.
        state: where the optimizer's state comes from when this learner joins: "peer", from the
            learner that is furthest, unless a resumed checkpoint is newer, or "fresh". The
            learning rate scheduler moves along.

    Raises:
        UnsupportedError: from the Trainer's constructor or `train()`, under DeepSpeed or FSDP.
        DiLoCoError: from `train()`, as from `diloco_plugin.attach`.
    """

    def __init__(
        self,
        syncer: str | None = None,
        *,
        name: str | None = None,
        keys: str | None = None,
        run: str = "",
        module: str | None = None,
        tokens: Callable[[Any], int] | None = None,
        require_syncer: bool = True,
        connect_timeout: float = 60.0,
        close_timeout: float | None = None,
        data_seed: int | None = None,
        state: str = "peer",
    ) -> None:
        """Note the arguments; nothing is opened before training begins."""
        self._syncer = syncer
        self._name = name
        self._keys = keys
        self._run = run
        self._module = module
        self._tokens = tokens
        self._require_syncer = require_syncer
        self._connect_timeout = connect_timeout
        self._close_timeout = close_timeout
        self._data_seed = data_seed
        self._state = state
        self._learner: Learner | None = None
        self._graph_alive = False

    @property
    def learner(self) -> Learner | None:
        """The learner of the current training, or of the last one; None before the first."""
        return self._learner

    def install(self, trainer: Any) -> DiLoCoCallback:
        """Add this callback to a Trainer ahead of the others, or move it there; return it.

        Optional. Our metrics then reach reporters like W&B as well; they are in `log_history` in
        any case.
        """
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        # Behind the one that decides what happens at a step: the last step is to be known here.
        flow = (i for i, each in enumerate(callbacks) if isinstance(each, DefaultFlowCallback))
        callbacks.insert(next(flow, -1) + 1, self)
        _refuse_sharded()
        return self

    # ---- events, in the order in which the Trainer fires them ----

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse early what cannot be trained together."""
        _refuse_sharded()

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Join: the weights of a checkpoint, if there is one, are loaded by now."""
        if self._learner is not None:
            # No event follows an exception; auto_find_batch_size even goes on after one.
            self._learner.abandon()
        _refuse_sharded()
        seed = args.seed if args.data_seed is None else args.data_seed
        self._learner = attach(
            model,
            optimizer,
            self._syncer,
            name=self._name,
            keys=self._keys,
            run=self._run,
            tokens=self._tokens,
            module=self._module,
            apply="boundary",
            require_syncer=self._require_syncer,
            connect_timeout=self._connect_timeout,
            close_timeout=self._close_timeout,
            data_seed=seed if self._data_seed is None else self._data_seed,
            state=self._state,
            scheduler=lr_scheduler,
            steps=state.global_step,
        )
        saved = state.stateful_callbacks.get(STATE_KEY)
        if isinstance(saved, dict):
            self._learner.load_state_dict(saved)
        self._note(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on some trainers log in the middle of a forward pass."""
        self._graph_alive = True

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act: the step is done, no graph is alive, and no other callback has seen the step yet."""
        self._graph_alive = False
        learner = self._training()
        if learner is not None:
            learner.expect_step()
            learner.boundary()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave after the last step: its checkpoint and evaluation then see the global model."""
        learner = self._training()
        if learner is None:
            return
        if learner.should_stop and not control.should_training_stop:
            # As the Trainer does at its own last step.
            control.should_training_stop = True
            control.should_save |= args.save_strategy == "steps"
            control.should_evaluate |= args.eval_strategy == "steps"
        self._leave_if(control.should_training_stop or state.global_step >= state.max_steps)
        self._note(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave if an evaluation, or a callback behind us, stopped the training since."""
        self._graph_alive = False
        self._leave_if(control.should_training_stop)
        self._note(state)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add our numbers; leave at the last one, which comes before the best model is loaded."""
        logs = {} if logs is None else logs
        if self._learner is None or any(key.startswith(_EVALUATION) for key in logs):
            return
        if not self._graph_alive:
            self._leave_if(control.should_training_stop or logs.keys() >= _LAST_LOG)
        self._note(state)
        metrics = self._learner.metrics()
        logs.update(metrics)
        if state.log_history:  # what the Trainer has put there is a copy
            state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make sure that we have left. The weights may be the best ones now: leave them alone."""
        learner = self._training()
        if learner is None:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            learner.abandon()
        else:
            learner.close()

    # ---- what they share ----

    def _training(self) -> Learner | None:
        """The learner, while it takes part."""
        return self._learner if self._learner is not None and self._learner.alive else None

    def _leave_if(self, over: bool) -> None:
        learner = self._training()
        if learner is not None and over:
            learner.close()

    def _note(self, state: Any) -> None:
        """What the next checkpoint is to remember of us; tensors come from the syncer again."""
        if self._learner is not None:
            state.stateful_callbacks[STATE_KEY] = self._learner.state_dict()


def _refuse_sharded() -> None:
    """Raise UnsupportedError if Accelerate, set up by the Trainer, spreads the model over ranks."""
    kind = str(PartialState().distributed_type.value)
    if kind in _REFUSED:
        raise UnsupportedError(
            f"a Trainer under {kind} cannot be a learner: {_REFUSED[kind]}. Train with DDP"
            " (torchrun) or on one device."
        )

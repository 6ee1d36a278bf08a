"""The engine, whatever the strategy: a callback that makes a Trainer a learner."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from diloco_lightning.support import averages_from_here, refuse_strategy, steppable
from diloco_plugin.learner import Learner, attach

log = logging.getLogger("diloco.lightning")


class DiLoCoCallback(Callback):  # type: ignore[misc]
    """Makes `Trainer.fit` a learner: it joins a run when training starts and leaves when it ends.

    Model, optimizers, schedulers, data and the Trainer's own strategy stay as they are. When `fit`
    returns, the model holds the global weights (or their average, with a weight-averaging
    callback). The last validation of `fit`, and what `ModelCheckpoint` saves, come before that and
    hold this learner's own: `trainer.validate` and `trainer.save_checkpoint` after `fit` see the
    global ones. Validation, tests, prediction, `fast_dev_run` and the tuner never connect.

    It moves itself to the front of `Trainer.callbacks`, so that every other callback sees a batch's
    merged weights. `trainer.fit` raises the errors of `diloco_plugin.attach` as well.

    Args:
        syncer: `tcp://host:port` of the syncer; default: the environment variable `DILOCO_SYNCER`.
        name: of this learner; a learner that returns under its name finds its place again. Default:
            the environment variable `DILOCO_NAME`, else host name and process id.
        keys: folder of keys (`diloco keygen`), or "insecure-plaintext"; default: the environment
            variable `DILOCO_KEYS`, else `~/.config/diloco`.
        run: refuse to join any other run than this one.
        module: sync only this submodule, under names relative to it: with "model" a LightningModule
            and a Hugging Face model of the same kind can share a run.
        tokens: units of work in a batch; default: ones in `attention_mask`, else size of
            `input_ids`, else samples.
        require_syncer: False trains alone until the syncer appears.
        connect_timeout: seconds to wait for the syncer and its model.
        close_timeout: seconds that leaving waits while nothing moves; default: what the syncer
            says (30).
        data_seed: seed of the data order; the syncer warns when two learners have the same.
            Default: that of `seed_everything`, if it was called.
        state: where the state of the optimizers comes from when this learner joins: "peer", from
            the learner that is furthest, unless a resumed checkpoint is newer, or "fresh".
            Learning rate schedulers of the same class move along.
        log_metrics: log numbers named `diloco/...` to the Trainer's loggers, as often as the
            Trainer logs.
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
        log_metrics: bool = True,
    ) -> None:
        super().__init__()
        self.syncer = syncer
        self.name = name
        self.keys = keys
        self.run = run
        self.module = module
        self.tokens = tokens
        self.require_syncer = require_syncer
        self.connect_timeout = connect_timeout
        self.close_timeout = close_timeout
        self.data_seed = data_seed
        self.state = state
        self.log_metrics = log_metrics
        self._learner: Learner | None = None
        self._state: dict[str, Any] = {}
        self._steps_seen = 0

    @property
    def learner(self) -> Learner | None:
        """The learner, while one is training; its `index` and `count` can shard data."""
        return self._learner

    # ---- joining ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, before anything is set up; get in front of other callbacks."""
        if stage != "fit":
            return
        refuse_strategy(trainer.strategy)
        # In place: this runs in a loop over the list, and whoever is behind us is not affected.
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join: checkpoints are restored by now, and sanity checks and the tuner are through."""
        if trainer.fast_dev_run:
            log.info("fast_dev_run: this training does not join %s.", self.syncer or "a run")
            return
        self._abandon()
        self._learner = attach(
            pl_module,
            steppable(trainer.optimizers),
            self.syncer,
            name=self.name,
            keys=self.keys,
            run=self.run,
            module=self.module,
            tokens=self.tokens,
            count_forward=False,
            apply="boundary",
            require_syncer=self.require_syncer,
            connect_timeout=self.connect_timeout,
            close_timeout=self.close_timeout,
            data_seed=self._seed(),
            state=self.state,
            scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            steps=trainer.global_step,
        )
        self._learner.load_state_dict(self._state)
        self._steps_seen = trainer.global_step

    def _seed(self) -> int | None:
        if self.data_seed is not None:
            return self.data_seed
        seed = os.environ.get("PL_GLOBAL_SEED", "")
        return int(seed) if seed.isdigit() else None

    # ---- training ----

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch; act if an optimizer stepped in it. No graph is alive here."""
        learner = self._learner
        if learner is None:
            return
        learner.count_batch(batch)
        if trainer.global_step != self._steps_seen:
            self._steps_seen = trainer.global_step
            learner.expect_step()
        learner.boundary()
        if learner.should_stop and not trainer.should_stop:
            log.info("the run is complete: training ends.")
            trainer.should_stop = True
        if self.log_metrics and trainer._logger_connector.should_update_logs:
            self._log(learner, pl_module)

    def _log(self, learner: Learner, pl_module: LightningModule) -> None:
        metrics = learner.metrics()
        if metrics:  # none on ranks that do not speak to the syncer
            pl_module.log_dict(
                metrics, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True
            )

    # ---- leaving ----

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave before stochastic weight averaging swaps its average in, for an extra epoch."""
        if self._learner is not None and averages_from_here(trainer):
            self._close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the last progress and take the global model. Averaging callbacks come later."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave at once: an error must not wait for the network."""
        self._abandon()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave, should training have ended in a way that nobody told."""
        self._abandon()

    def _close(self) -> None:
        if self._learner is not None:
            self._learner.close()
            self._abandon()

    def _abandon(self) -> None:
        if self._learner is not None:
            self._state = self._learner.state_dict()
            learner, self._learner = self._learner, None
            learner.abandon()

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers: a few numbers. Weights come from the syncer again."""
        return dict(self._state) if self._learner is None else self._learner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from a checkpoint."""
        self._state = dict(state_dict)

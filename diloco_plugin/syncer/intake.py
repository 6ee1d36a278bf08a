"""How the model comes to the syncer: from a learner, from --init, or from an earlier life."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Final

from msgspec import Raw
from torch import Tensor

from diloco_plugin.config import SyncerConfig
from diloco_plugin.core import policy
from diloco_plugin.core.conduct import Conduct, cost_of
from diloco_plugin.describing import describe, specs_said
from diloco_plugin.errors import ConfigError, LayoutError, NoRoomError
from diloco_plugin.store import RunFile
from diloco_plugin.syncer.bulk import Bulk
from diloco_plugin.syncer.keeping import Keeper
from diloco_plugin.syncer.merging import Merging
from diloco_plugin.syncer.model import GlobalModel
from diloco_plugin.syncer.resuming import run_file, specs_of
from diloco_plugin.tensors.layout import TensorSpec, build_layout, differences
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import model_length

log = logging.getLogger("diloco.syncer")

#: How long a whole model may take to be on disk.
KEEPER_CLOSE_SECONDS: Final = 300.0
#: More tensors than twice those of the run, and so many, are not looked at one by one.
FEW: Final = 1000
#: Of the time in which a speaker may be heard, models that are new to us get a quarter: those of
#: one key, or of all who have none.
NEW_COST: Final = 4
BUSY: Final = "too many learners with a model that is not known here yet: ask again later"


class Intake:
    """What the run's model is. For the daemon's thread, but for `keep_seed`."""

    def __init__(
        self,
        config: SyncerConfig,
        merging: Merging,
        bulk: Bulk,
        keeper: Keeper | None,
        init: Mapping[str, Tensor] | None,
    ) -> None:
        """`init`: the tensors given with --init, by name."""
        #: JSON of the model's configuration, if a learner told it
        self.model_config = ""
        self._config = config
        self._merging = merging
        self._bulk = bulk
        self._keeper = keeper
        self._init = init
        self._specs: tuple[TensorSpec, ...] = ()
        #: how a model was described that is the run's: those who say the same need no second look
        self._said = b""
        self._attention = Conduct()

    def go_on(self, run: RunFile, model: GlobalModel) -> None:
        """The model is that of an earlier life."""
        self._specs, self.model_config = specs_of(run), run.model_config
        self._said = _digest(describe(self._specs))  # with local buffers, learners say more
        self._merging.model = model
        self._bulk.use_model(model)
        if self._keeper is not None:
            self._keeper.describe(run_file(self._config, self._specs, model, self.model_config))

    def describe(self, model_config: str) -> None:
        """A learner was admitted: the first one that has a configuration tells it."""
        self.model_config = self.model_config or model_config

    def problem(self, hello: msg.Hello, key: bytes, *, nobody: bool) -> tuple[str, str] | None:
        """Why this learner's model is not the run's, which is made by the first one: (code, text).

        `key`: of who says this, if it has one; those without share what attention there is. While
        nobody has brought a model (`nobody`), whoever knocks next may have another one.

        Raises:
            NoRoomError: the model given with --init cannot be saved.
            WireError: this describes no model.
        """
        known = self._merging.model is not None and not nobody
        said = _digest(hello.tensors)
        if known:
            if said == self._said:
                return None
            length = model_length(hello.tensors)
            if length > 2 * len(self._specs) + FEW:
                difference = (
                    f"the run has {len(self._specs):,} tensors, this learner describes {length:,}"
                )
                return "layout", policy.another_model(self._config.run, difference)
            cost = cost_of(NEW_COST * memoryview(hello.tensors).nbytes)
            if not self._attention.allows(key, time.monotonic_ns(), cost):
                return "busy", BUSY
        text = self._difference(hello, nobody=nobody)
        if text:
            return "layout", text
        self._said = said
        return None

    def _difference(self, hello: msg.Hello, *, nobody: bool) -> str:
        specs = specs_said(hello.tensors, self._config.parameters.buffers)
        problem = "; ".join(differences(self._specs, specs)) if self._merging.model else ""
        if self._merging.model is not None and not (problem and nobody):
            return problem and policy.another_model(self._config.run, problem)
        try:
            model = self._build(specs, hello)
        except (LayoutError, ConfigError) as error:
            return str(error)
        except (MemoryError, RuntimeError):
            size = 4e-9 * sum(spec.numel for spec in specs)
            return (
                f"the syncer has no room for this model, of which it needs four times {size:.1f} GB"
            )
        self._merging.model, self._specs, self._init = model, specs, None
        self._bulk.use_model(model)
        return ""

    def _build(self, specs: tuple[TensorSpec, ...], hello: msg.Hello) -> GlobalModel:
        wanted = self._config.parameters.fragments
        layout = build_layout(specs, wanted)
        model = GlobalModel(layout, self._config.parameters)
        if self._init is not None:
            model.load(self._init)
            if unusable := model.complete_seed():
                raise LayoutError(f"the model given with --init is unusable: {unusable}.")
            self._begin_now(specs, model, hello)
        if len(layout.fragments) < wanted:
            log.info(
                "%d fragments instead of %d: the model has no more tensors than that",
                len(layout.fragments),
                wanted,
            )
        return model

    def _begin_now(
        self, specs: tuple[TensorSpec, ...], model: GlobalModel, hello: msg.Hello
    ) -> None:
        """The model given with --init must be durable before anybody hears of it: wait for that.

        A learner from an earlier life of the syncer brings its own instead.
        """
        if self._keeper is None or hello.epoch:
            return
        told: SimpleQueue[str | None] = SimpleQueue()
        run = run_file(self._config, specs, model, hello.model_config)
        self._keeper.begin(run, model, told.put)
        try:
            problem = told.get(timeout=KEEPER_CLOSE_SECONDS)
        except Empty:
            problem = "the disk does not answer"
        if problem is not None:
            raise NoRoomError(problem)

    def keep_seed(self, done: Callable[[str | None], None]) -> None:
        """Merge thread: a learner's model is here; it is the run's once it is durable."""
        if self._keeper is None:
            done(None)
            return
        model = self._merging.the_model
        run = run_file(self._config, self._specs, model, self.model_config)
        self._keeper.begin(run, model, done)


def _digest(model: Raw) -> bytes:
    return hashlib.blake2b(model, digest_size=32).digest()

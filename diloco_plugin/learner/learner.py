"""`Learner`: what runs in the user's training process.

The training thread counts (in optimizer hooks), and acts in `boundary()`: it copies fragments out
of and into the live parameters, and nothing else. What takes time happens in the I/O thread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

from torch import nn

from diloco_plugin._version import __version__
from diloco_plugin.config import default_address
from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.handover import Wish
from diloco_plugin.core.learner import LearnerCore
from diloco_plugin.core.link import Standing
from diloco_plugin.credentials import learner_keys
from diloco_plugin.errors import ConfigError, LayoutError
from diloco_plugin.learner.counting import (
    StepCounter,
    parameter_count,
    refuse_unsupported,
    unknown_parameters,
)
from diloco_plugin.learner.innerstate import InnerState
from diloco_plugin.learner.introducing import Introduction
from diloco_plugin.learner.island import Island, detect
from diloco_plugin.learner.joining import (
    Joining,
    Patience,
    error_of,
    problem_of,
    why_not_closed,
    why_not_joined,
)
from diloco_plugin.learner.modelconfig import model_config_json
from diloco_plugin.learner.naming import default_name
from diloco_plugin.learner.session import Session
from diloco_plugin.learner.tokens import TokenCounter
from diloco_plugin.learner.turns import WAIT_SECONDS, Turns
from diloco_plugin.net.keys import Insecure, LineKeys
from diloco_plugin.tensors.layout import census

log = logging.getLogger("diloco.learner")

#: Steps that a framework reports before it is believed that the optimizer has no hooks that fire.
#: AMP skips the first ones, but no more than it takes to halve its initial scale of 2**16 to 1.
UNSEEN_STEPS: Final = 20
#: Steps without any work counted before it is believed that the loop goes round `forward`.
WORKLESS_STEPS: Final = 3


class Learner:
    """One training job that takes part in a run. Made by `attach()`; for the training thread.

    A context manager: leaving the block normally closes (the last progress is given, the global
    model taken); by an exception it abandons, so that an error is not delayed by the network.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        address: str | None,
        *,
        name: str | None,
        keys: str | None,
        run: str,
        tokens: Callable[[Any], int] | None,
        module: str | None,
        count_forward: bool,
        inline: bool,
        close_timeout: float | None,
        data_seed: int | None,
        model_config: str | None,
        inner_state: bool,
        scheduler: Any,
        steps: int,
    ) -> None:
        """Examine the model and start looking for the syncer; `join()` waits for it."""
        refuse_unsupported(optimizers)
        self._optimizers = optimizers
        self._census = census(model, buffers="merge", within=module)
        parameters = {n: t for n, t in self._census.tensors.items() if isinstance(t, nn.Parameter)}
        self._counter = StepCounter(
            optimizers,
            parameters.values(),
            on_step=self.boundary if inline else None,
        )
        self._inner = InnerState(parameters, optimizers, scheduler)
        self._wish = Wish(wanted=inner_state, own=self._inner.steps_behind(steps))
        self._tokens = TokenCounter(_innermost(model) if count_forward else None, tokens)
        self._island: Island = detect()
        self._close_timeout = close_timeout
        self._alive = True
        self._busy = False
        self._warned_unknown = False
        self._held = -1
        self._unseen = 0
        self._workless = 0
        self.name = name or ""
        self.boundary_seconds = 0.0
        self._core: LearnerCore | None = None
        self._session: Session | None = None
        problem = ""
        if self._island.leader:
            try:
                where = default_address(address)
                security = learner_keys(where, keys, name)
                self.name = name or default_name(security)
                self._open_session(where, security, run, data_seed, model_config, model, module)
            except (ConfigError, LayoutError) as error:
                problem = problem_of(error)
        problem = self._island.share_text(problem)
        self.name = self.name or default_name()
        self._turns = Turns(
            self._census, optimizers, self._inner, self._island, self._core, self._session
        )
        if problem:  # on all ranks: those that do not speak would wait for ever
            self.abandon()
            raise error_of(problem)

    def _open_session(
        self,
        address: str,
        security: LineKeys | Insecure | None,
        run: str,
        data_seed: int | None,
        model_config: str | None,
        model: nn.Module,
        module: str | None,
    ) -> None:
        incarnation = secrets.token_hex(16)
        self._core = LearnerCore(
            incarnation=incarnation, now_ns=time.monotonic_ns(), wish=self._wish
        )
        if model_config is None:
            part = _innermost(model).get_submodule(module or "")
            model_config = model_config_json(_innermost(part))
        introduction = Introduction(
            run=run,
            name=self.name,
            incarnation=incarnation,
            specs=self._census.specs,
            data_seed=data_seed,
            model_config=model_config,
            version=__version__,
        )
        self._session = Session(
            address, security, introduction, self._core, self._inner, self._counter
        )

    # ---- joining ----

    def join(self, timeout: float, *, required: bool) -> None:
        """Wait until the global model is held. Collective in an island; errors as in `attach()`."""
        waiting = Joining(timeout)
        problem = ""
        while True:
            problem, joined = self._join_turn(waiting, required)
            if problem or joined:
                break
        failure = self._session.error if self._session is not None else None
        if failure is not None:
            problem = problem_of(failure)
        verdict = self._island.share_text(problem)
        if verdict:
            raise failure or error_of(verdict)

    def _join_turn(self, waiting: Joining, required: bool) -> tuple[str, bool]:
        """One look of all ranks. Returns a problem (leader only), and whether all is done."""
        problem, over = "", False
        event: ev.LearnerEvent = ev.Paused(now_ns=time.monotonic_ns())
        if self._session is not None and self._core is not None:
            with self._session.changed:
                refusal = self._core.link.refusal
                joined = self._core.joined
                if required and not (joined or refusal or self._session.error):
                    self._session.changed.wait(WAIT_SECONDS)
            if refusal is not None and required:
                problem = f"{refusal[0]}: {refusal[1]}"
            elif not joined and required and waiting.over(self._moved()):
                if self._core.holds_model and self._core.link.connected:
                    event = ev.StateRefused(now_ns=time.monotonic_ns(), reason="it does not come")
                else:
                    problem = why_not_joined(self._session, self._core)
            elif not joined and required:
                waiting.mind(self._moved(), self._session, self._core)
            over = bool(problem) or not required
        done = self._turns.turn(event, over=over, joining=True)
        return problem, done

    # ---- training ----

    def boundary(self, tokens: int | None = None) -> None:
        """Act at a point where the inner step is done and no autograd graph is alive.

        Applies what has arrived, stages what was pulled; costs a few microseconds when nothing is
        due. Does nothing unless an optimizer has really stepped since the last call. Never waits
        outside lockstep.

        Args:
            tokens: units of work since the last call, where they cannot be counted in `forward`.
        """
        if not self._alive or self._busy:
            return
        if self._counter.take():
            started = time.perf_counter()
            self._busy = True
            try:
                self._step(tokens)
            finally:
                self._busy = False
                self.boundary_seconds += time.perf_counter() - started
        self._counter.settle()
        if self._session is not None:
            self._session.settled()

    def _step(self, tokens: int | None) -> None:
        counted = self._tokens.take() if tokens is None else tokens
        self._mind_missing_work(counted)
        if self._turns.replica is not None:
            self._turns.replica.after_step()
            self._mind_unknown_parameters()
        work = max(1, counted) * self._island.size
        event: ev.LearnerEvent = ev.Stepped(now_ns=time.monotonic_ns(), tokens=work)
        while not self._turns.turn(event, over=False):
            event = ev.Paused(now_ns=time.monotonic_ns())

    def expect_step(self) -> None:
        """The framework says that an optimizer stepped: for adapters, before `boundary()`.

        If none did (AMP skipped it), the work counted for it is dropped. If none ever does, no hook
        sees this optimizer's steps: one warning, and from then on these calls count.
        """
        if self._counter.moved:
            return
        if self._counter.total_hook_calls:
            self._tokens.take()
            return
        self._unseen += 1
        if self._unseen < UNSEEN_STEPS:
            return
        if self._unseen == UNSEEN_STEPS:
            log.warning(
                "the trainer has stepped %d times, but no hook of an optimizer (%s) ever fired:"
                " from now on the trainer's steps count, even those that did not move the"
                " parameters.",
                self._unseen,
                ", ".join(type(optimizer).__name__ for optimizer in self._optimizers) or "none",
            )
        self._counter.assume()

    def count_batch(self, batch: Any) -> None:
        """Count the units of work in a batch, where no forward hook does (`count_forward`)."""
        self._tokens.count_batch(batch)

    def _mind_missing_work(self, counted: int) -> None:
        if self._workless < 0:  # some was counted, or it was said that none is
            return
        self._workless = self._workless + 1 if counted <= 0 else -1
        if self._workless == WORKLESS_STEPS:
            self._workless = -1
            log.warning(
                "nothing was counted in the first %d steps, so that each of them counts as one"
                " token: the loop does not call the model's own forward. Pass every batch to"
                " learner.count_batch(), or the tokens of a step to learner.boundary().",
                WORKLESS_STEPS,
            )

    def _mind_unknown_parameters(self) -> None:
        held = sum(map(parameter_count, self._optimizers))
        if held == self._held:  # looked at only when an optimizer has got or lost some
            return
        self._held = held
        unknown = unknown_parameters(self._optimizers, self._census.tensors.values())
        unknown = [parameter for parameter in unknown if parameter.requires_grad]
        if unknown and not self._warned_unknown:
            self._warned_unknown = True
            log.warning(
                "%d parameters entered the optimizer after this learner was attached: they are"
                " trained here only. Unfreeze what is to be trained together before attaching.",
                len(unknown),
            )

    # ---- the end ----

    def close(self, timeout: float | None = None) -> None:
        """Give the last progress, take the global model, and leave. Harmless when repeated.

        When it returns, and the syncer answered in time, the parameters are the global model (to
        the bit in fp32). Otherwise one warning says what is missing. Collective in an island.

        Args:
            timeout: seconds without anything moving, after which it gives up.
        """
        if not self._alive:
            return
        if self._counter.take():  # a last step that no boundary followed
            self._step(None)
        self._alive = False
        try:
            self._close(timeout)
        finally:
            self.abandon()

    def _close(self, timeout: float | None) -> None:
        limit = timeout if timeout is not None else self._close_timeout
        if limit is None:
            parameters = self._turns.parameters
            limit = parameters.close_timeout if parameters else 0.0
        patience = Patience(limit)
        event: ev.LearnerEvent = ev.FinishAsked(now_ns=time.monotonic_ns())
        while not self._turns.turn(event, over=self._close_is_over(patience)):
            if self._session is not None:
                with self._session.changed:
                    self._session.changed.wait(WAIT_SECONDS)
            event = ev.Paused(now_ns=time.monotonic_ns())
        if self._core is None or self._session is None:
            return
        if self._core.link.standing is not Standing.LEFT:
            log.warning(
                "left without a closing round: %s. The parameters are this learner's own; its last"
                " progress is not in the global model.",
                why_not_closed(self._session, self._core, limit),
            )

    def _close_is_over(self, patience: Patience) -> bool:
        if self._core is None:
            return False
        link = self._core.link
        return patience.over(self._moved()) or link.over or link.gone_away

    def _moved(self) -> int:
        """Grows while bytes come or go, or fragments are applied."""
        assert self._core is not None
        assert self._session is not None
        return self._session.chunks_moved + self._core.applied

    def abandon(self) -> None:
        """Leave at once, without giving or taking anything; never raises, never blocks for long."""
        self._alive = False
        self._counter.detach()
        self._tokens.detach()
        if self._session is not None:
            if self.connected:  # so that rounds do not wait for it, and its name is free again
                self._session.post([act.Leave()])
            self._session.close()
        self._turns.replica = None  # a learner that has left must not hold a copy of the model
        self._island.close()

    def __enter__(self) -> Learner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    # ---- looking in ----

    @property
    def alive(self) -> bool:
        """Is this learner attached (neither closed nor abandoned)?"""
        return self._alive

    @property
    def index(self) -> int:
        """This learner's number among the learners of the run, as the syncer told it."""
        return self._turns.index

    @property
    def count(self) -> int:
        """How many learners the syncer expects (or knows, if nobody told it)."""
        return self._turns.count

    @property
    def run(self) -> str:
        """Name of the run; empty before the syncer has answered."""
        return self._turns.run

    @property
    def should_stop(self) -> bool:
        """The run has reached its last step: a loop may end. As of the last boundary, on all ranks
        of an island alike.
        """
        return self._turns.should_stop

    @property
    def connected(self) -> bool:
        """Does a syncer know this learner now?"""
        return self._core is not None and self._core.link.connected

    def metrics(self) -> dict[str, float]:
        """Numbers for the user's logger, under `diloco/...`."""
        if self._core is None or self._session is None:
            return {}
        with self._session.lock:
            core = self._core
            values: dict[str, float] = {
                "connected": float(core.link.connected),
                "clock": core.clock,
                "steps": core.steps,
                "tokens": core.tokens,
                "applied": core.applied,
                "pushes_merged": core.fates.get("merged", 0),
                "pushes_late": core.fates.get("late", 0),
                "pushes_refused": sum(
                    n for fate, n in core.fates.items() if fate.startswith(("rejected", "stale"))
                ),
            }
        values["boundary_seconds"] = self.boundary_seconds
        return {f"diloco/{key}": value for key, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should remember: small, JSON. Tensors come from the syncer again."""
        steps = self._core.steps if self._core is not None else 0
        tokens = self._core.tokens if self._core is not None else 0
        return {"name": self.name, "run": self.run, "steps": steps, "tokens": tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a checkpoint."""
        if self._core is not None and self._session is not None:
            with self._session.lock:
                self._core.steps = int(state.get("steps", 0))
                self._core.tokens = int(state.get("tokens", 0))


def _innermost(model: nn.Module) -> nn.Module:
    """The module whose forward the user's code reaches in the end, however it is wrapped."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner

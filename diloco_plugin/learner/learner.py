"""`attach()` and `Learner`: what runs in the user's training process.

The training thread counts (in optimizer hooks), and acts in `boundary()`: it copies fragments out of and into the
live parameters, and nothing else. Everything that takes time happens in the I/O thread (`session`).
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

from torch import nn

from diloco_plugin._version import __version__
from diloco_plugin.config import default_address, parameters_from, parameters_to
from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.learner import LearnerCore
from diloco_plugin.core.link import Standing
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.errors import ConfigError, RefusedError, UnreachableError
from diloco_plugin.learner.counting import StepCounter, refuse_unsupported, unknown_parameters
from diloco_plugin.learner.island import Island, detect
from diloco_plugin.learner.modelconfig import model_config_json
from diloco_plugin.learner.naming import default_name
from diloco_plugin.learner.replica import Buffer, Replica
from diloco_plugin.learner.session import Introduction, Session
from diloco_plugin.learner.tokens import TokenCounter
from diloco_plugin.tensors.layout import BUFFER, Layout, build_layout, census

log = logging.getLogger("diloco.learner")

WAIT_SECONDS: Final = 0.05
#: Steps that a framework reports before it is believed that the optimizer has no hooks that fire.
#: AMP skips the first ones, but no more than it takes to halve its initial scale of 2**16 to 1.
UNSEEN_STEPS: Final = 20
#: Opcodes of the plan that rank 0 of an island shares at every boundary.
_APPLY, _BLEND, _CAPTURE, _RESTORE, _LAY_OUT, _STOP = range(1, 7)
_AGAIN, _DONE = 1, 0


def attach(
    model: nn.Module,
    optimizer: Any,
    address: str | None = None,
    *,
    name: str | None = None,
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
) -> Learner:
    """Make this training a learner: join the run at `address` and take its model.

    Blocks until the global model is in the parameters (or this learner's model has become the global
    one). After that nothing ever waits for the syncer or for another learner, lockstep runs aside.

    Args:
        model: the model as it is trained; compiled, DDP-wrapped or plain.
        optimizer: the inner optimizer, or a sequence of them. Never changed.
        address: `tcp://host:port` of the syncer; default: the environment variable `DILOCO_SYNCER`.
        name: of this learner; a learner that returns under its name finds its place again. Default:
            the environment variable `DILOCO_NAME`, else host name and process id.
        run: refuse to join any other run than this one.
        tokens: units of work in a batch (what `forward` was called with); default: ones in
            `attention_mask`, else size of `input_ids`, else samples.
        module: sync only this submodule (e.g. "model" of a LightningModule), under names relative to
            it, so that learners of different frameworks share a run.
        count_forward: count units of work in the model's forward; False where `count_batch` does.
        apply: "inline" acts inside the optimizer's step hook, so that the loop stays as it is; "boundary"
            acts only in `Learner.boundary()`, which the loop calls after a step when no graph is alive.
            "auto" is inline for one optimizer, boundary for several.
        require_syncer: False trains alone until the syncer appears.
        connect_timeout: seconds to wait for the syncer and its model.
        close_timeout: seconds that `close()` may take; default: what the syncer says (30).
        data_seed: seed of the data order; the syncer warns when two learners have the same.
        model_config: JSON of the model's configuration, published with the global model. Default: that of
            a Hugging Face model or PEFT adapter.

    Raises:
        UnreachableError: no syncer answered within `connect_timeout`.
        RefusedError: the syncer said no (another model, another run, a name that is taken, ...).
        LayoutError: the model cannot be synced.
        UnsupportedError: the optimizer cannot be synced.
        ConfigError: an argument is wrong.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if apply not in ("auto", "inline", "boundary"):
        raise ConfigError(f"apply={apply!r} is unknown: use 'auto', 'inline' or 'boundary'.")
    if apply == "inline" and len(optimizers) > 1:
        raise ConfigError(
            "apply='inline' is for one optimizer: with several, another one's graph may be alive. Use"
            " apply='boundary' and call learner.boundary() where no graph is alive."
        )
    inline = apply == "inline" or (apply == "auto" and len(optimizers) == 1)
    learner = Learner(
        model,
        optimizers,
        address,
        name=name,
        run=run,
        tokens=tokens,
        module=module,
        count_forward=count_forward,
        inline=inline,
        close_timeout=close_timeout,
        data_seed=data_seed,
        model_config=model_config,
    )
    try:
        learner.join(connect_timeout, required=require_syncer)
    except BaseException:
        learner.abandon()
        raise
    return learner


class Learner:
    """One training job that takes part in a run. Made by `attach()`; all methods are for the training thread.

    A context manager: leaving the block normally closes (the last progress is given, the global model taken);
    leaving it by an exception abandons, so that an error is not delayed by the network.

    Attributes:
        index, count: place among the learners, told by the syncer, for sharding data.
        should_stop: the run has reached its last step; a loop may end. As of the last boundary, so
            that all ranks of an island say the same.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        address: str | None,
        *,
        name: str | None,
        run: str,
        tokens: Callable[[Any], int] | None,
        module: str | None,
        count_forward: bool,
        inline: bool,
        close_timeout: float | None,
        data_seed: int | None,
        model_config: str | None,
    ) -> None:
        """Examine the model and start looking for the syncer; `join()` waits for it."""
        refuse_unsupported(optimizers)
        self._optimizers = optimizers
        self._census = census(model, buffers="merge", within=module)
        self._counter = StepCounter(
            optimizers,
            [t for t in self._census.tensors.values() if isinstance(t, nn.Parameter)],
            on_step=self.boundary if inline else None,
        )
        self._tokens = TokenCounter(_innermost(model) if count_forward else None, tokens)
        self._island: Island = detect()
        self._close_timeout = close_timeout
        self._replica: Replica | None = None
        self._parameters: Parameters | None = None
        self._alive = True
        self._busy = False
        self._warned_unknown = False
        self._unseen = 0
        self.should_stop = False
        self.index, self.count = 0, 1
        self.name = name or default_name()
        self.run = run
        self.boundary_seconds = 0.0
        self._core: LearnerCore | None = None
        self._session: Session | None = None
        problem = ""
        if self._island.leader:
            try:
                self._open_session(
                    default_address(address), run, data_seed, model_config, model, module
                )
            except ConfigError as error:
                problem = str(error)
        problem = self._island.share_text(problem)
        if problem:  # on all ranks: those that do not speak would wait for ever
            self.abandon()
            raise ConfigError(problem)

    def _open_session(
        self,
        address: str,
        run: str,
        data_seed: int | None,
        model_config: str | None,
        model: nn.Module,
        module: str | None,
    ) -> None:
        incarnation = secrets.token_hex(16)
        self._core = LearnerCore(incarnation=incarnation, now_ns=time.monotonic_ns())
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
        self._session = Session(address, introduction, self._core)

    # ---- joining ----

    def join(self, timeout: float, *, required: bool) -> None:
        """Wait until the global model is held. Collective in an island. See `attach()` for errors."""
        deadline = time.monotonic() + timeout
        problem = ""
        while True:
            problem, joined = self._join_turn(deadline, required)
            if problem or joined:
                break
        verdict = self._island.share_text(problem)
        if verdict:
            code, _, text = verdict.partition(": ")
            if code == "unreachable":
                raise UnreachableError(text)
            raise RefusedError(code, text)

    def _join_turn(self, deadline: float, required: bool) -> tuple[str, bool]:
        """One look of all ranks. Returns a problem (leader only), and whether all is done."""
        problem, over = "", False
        if self._session is not None and self._core is not None:
            with self._session.changed:
                refusal = self._core.link.refusal
                standing = self._core.link.standing
                if standing is not Standing.LIVE and refusal is None and required:
                    self._session.changed.wait(
                        min(WAIT_SECONDS, max(0, deadline - time.monotonic()))
                    )
            if refusal is not None:
                problem = f"{refusal[0]}: {refusal[1]}"
            elif standing is not Standing.LIVE and required and time.monotonic() >= deadline:
                problem = f"unreachable: {self._why_not_joined()}"
            over = bool(problem) or not required
        done = self._turn(ev.Paused(now_ns=time.monotonic_ns()), over=over)
        return problem, done

    def _why_not_joined(self) -> str:
        assert self._session is not None
        assert self._core is not None
        where = self._session.address
        if self._core.link.standing is Standing.TAKING:
            return (
                f"the syncer at {where} let this learner in, but the model did not arrive in time: it"
                " waits for the learner that brings the model, or the line is slow (raise"
                " connect_timeout)."
            )
        return (
            f"no syncer answered at {where} in time: start it (`diloco syncer --bind {where}`), check"
            " with `diloco check`, or train alone until it appears with require_syncer=False."
        )

    # ---- training ----

    def boundary(self, tokens: int | None = None) -> None:
        """Act at a point where the inner step is done and no autograd graph is alive.

        Applies what has arrived, stages what was pulled; costs a few microseconds when nothing is due. Does
        nothing unless an optimizer has really stepped since the last call. Never waits outside lockstep.

        Args:
            tokens: units of work since the last call, where they cannot be counted in `forward`.
        """
        if not self._alive or self._busy or not self._counter.take():
            return
        started = time.perf_counter()
        self._busy = True
        try:
            self._step(tokens)
        finally:
            self._busy = False
            self.boundary_seconds += time.perf_counter() - started

    def _step(self, tokens: int | None) -> None:
        counted = self._tokens.take() if tokens is None else tokens
        if self._replica is not None:
            self._replica.after_step()
            self._mind_unknown_parameters()
        work = max(1, counted) * self._island.size
        event: ev.LearnerEvent = ev.Stepped(now_ns=time.monotonic_ns(), tokens=work)
        while not self._turn(event, over=False):
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
                "the trainer has stepped %d times, but no step hook of an optimizer (%s) ever fired:"
                " from now on the trainer's steps count, even those that did not move the"
                " parameters.",
                self._unseen,
                ", ".join(type(optimizer).__name__ for optimizer in self._optimizers) or "none",
            )
        self._counter.assume()

    def count_batch(self, batch: Any) -> None:
        """Count the units of work in a batch, where no forward hook does (`count_forward=False`)."""
        self._tokens.count_batch(batch)

    def _turn(self, event: ev.LearnerEvent, *, over: bool) -> bool:
        """One event, on all ranks: decide (leader), share the plan, carry it out. True: no more turns."""
        reserved: list[tuple[act.LearnerAction, Buffer | None]] = []
        plan: list[int] = []
        if self._core is not None and self._session is not None:
            reserved = self._decide(event, plan)
            again = not over and self._wants_another_turn(event)
            plan = [_AGAIN if again else _DONE, *plan, *_encode_plan(reserved)]
        plan = self._island.share_plan(plan)
        if _LAY_OUT in plan[1:2]:
            self._share_layout()
            del plan[1]
        self.should_stop = _STOP in plan[1:2]
        if self._session is not None:
            self._carry_out(reserved)
        else:
            self._follow(plan[1:])
        return plan[0] == _DONE

    def _wants_another_turn(self, event: ev.LearnerEvent) -> bool:
        """Leader: does the training thread have to stay? (joining, closing, lockstep)"""
        assert self._core is not None
        assert self._session is not None
        if self._session.error is not None:
            return False
        if self._core.closing:
            return self._core.link.standing is not Standing.LEFT
        if isinstance(event, ev.Stepped) or self._core.link.standing is Standing.LIVE:
            with self._session.changed:
                if self._core.must_wait():
                    self._session.changed.wait(WAIT_SECONDS)
                return self._core.must_wait()
        return True

    def _decide(
        self, event: ev.LearnerEvent, plan: list[int]
    ) -> list[tuple[act.LearnerAction, Buffer | None]]:
        """Leader: step the core and take the buffers that its actions need, under the lock."""
        assert self._core is not None
        assert self._session is not None
        reserved: list[tuple[act.LearnerAction, Buffer | None]] = []
        with self._session.lock:
            # Under the same lock: what the core decides may need the replica that is laid out here.
            self._lay_out_leader(plan)
            actions = self._core.step(event)
            if self._core.complete is not None:
                plan.append(_STOP)
            for action in actions:
                buffer = None
                if isinstance(action, act.Apply):
                    buffer = self._session.arrived.pop(action.fragment)
                elif isinstance(action, act.Snapshot):
                    assert self._replica is not None
                    buffer = self._replica.take_staging()
                    assert buffer is not None, "the core counts staging buffers"
                    self._session.staged[action.fragment] = buffer
                reserved.append((action, buffer))
        return reserved

    def _carry_out(self, reserved: list[tuple[act.LearnerAction, Buffer | None]]) -> None:
        """Leader: copies in this thread, everything else in the I/O thread, in order."""
        session = self._session
        assert session is not None
        for action, buffer in reserved:
            match action:
                case act.Snapshot():
                    assert self._replica is not None
                    assert buffer is not None
                    self._replica.snapshot(action.fragment, buffer)
                case act.Apply():
                    assert buffer is not None
                    self._apply(action.fragment, action.alpha, buffer)
                    session.applied(action.fragment, buffer)
                case act.CaptureBase():
                    session.settle_bases()
                    self._capture()
                case act.Restore():
                    session.settle_bases()
                    self._restore()
                case _:
                    session.post([action])

    def _follow(self, plan: list[int]) -> None:
        """Other ranks of an island: do what the leader does, with what it sends."""
        steps = iter(plan)
        for code in steps:
            if code in (_APPLY, _BLEND):
                fragment = next(steps)
                assert self._replica is not None
                assert self._parameters is not None
                buffer = self._replica.take_arrival()
                assert buffer is not None
                self._apply(fragment, self._parameters.alpha if code == _BLEND else 0.0, buffer)
                self._replica.rebase(fragment, buffer)
                self._replica.give_back(buffer)
            elif code == _CAPTURE:
                self._capture()
            elif code == _RESTORE:
                self._restore()

    def _apply(self, fragment: int, alpha: float, buffer: Buffer) -> None:
        assert self._replica is not None
        elements = self._replica.layout.fragments[fragment].elements
        self._island.share_flat(buffer.flat[:elements])
        self._replica.apply(fragment, buffer, alpha, self._optimizers)

    def _capture(self) -> None:
        assert self._replica is not None
        for fragment in self._replica.layout.fragments:
            self._replica.capture_base(fragment.index)

    def _restore(self) -> None:
        assert self._replica is not None
        for fragment in self._replica.layout.fragments:
            self._replica.overwrite_with_base(fragment.index, self._optimizers)

    # ---- the layout, known once the syncer has answered ----

    def _lay_out_leader(self, plan: list[int]) -> None:
        assert self._session is not None
        place = self._session.place
        if place is None:
            return
        self.index, self.count, self.run = place.index, place.count, place.run
        if self._replica is None:
            plan.append(_LAY_OUT)

    def _share_layout(self) -> None:
        """All ranks: build the replica from what the leader was told at the door."""
        text = ""
        if self._session is not None:
            place = self._session.place
            assert place is not None
            told = parameters_to(place.parameters) | {"outer_options": {}}
            text = json.dumps(
                [told, len(place.layout.fragments), place.index, place.count, place.run]
            )
        told, fragments, self.index, self.count, self.run = json.loads(
            self._island.share_text(text)
        )
        self._parameters = parameters_from(told, source="the syncer")
        specs = self._census.specs
        if self._parameters.buffers == "local":
            specs = tuple(spec for spec in specs if spec.kind != BUFFER)
        self._build(build_layout(specs, fragments))

    def _build(self, layout: Layout) -> None:
        assert self._parameters is not None
        spare = 2
        if self._parameters.lockstep:
            spare = max(spare, self._parameters.overlap + 1)
        self._replica = Replica(layout, self._census.tensors, staging=spare, arrivals=spare)
        if self._session is not None and self._core is not None:
            with self._session.lock:
                self._core.have_buffers(staging=spare, arrivals=spare)
            self._session.use(self._replica)

    def _mind_unknown_parameters(self) -> None:
        if self._warned_unknown:
            return
        unknown = unknown_parameters(self._optimizers, self._census.tensors.values())
        if unknown:
            self._warned_unknown = True
            log.warning(
                "%d parameters entered the optimizer after this learner was attached: they are trained"
                " here only. Unfreeze what is to be trained together before attaching.",
                len(unknown),
            )

    # ---- the end ----

    def close(self, timeout: float | None = None) -> None:
        """Give the last progress, take the global model, and leave. Harmless when repeated.

        When it returns, and the syncer answered in time, the parameters are the global model (to the bit in
        fp32). Otherwise one warning says what is missing. Collective in an island.
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
            limit = self._parameters.close_timeout if self._parameters else 0.0
        deadline = time.monotonic() + limit
        event: ev.LearnerEvent = ev.FinishAsked(now_ns=time.monotonic_ns())
        while not self._turn(event, over=self._close_is_over(deadline)):
            if self._session is not None:
                with self._session.changed:
                    self._session.changed.wait(WAIT_SECONDS)
            event = ev.Paused(now_ns=time.monotonic_ns())
        if self._core is not None and self._core.link.standing is not Standing.LEFT:
            log.warning(
                "left without a closing round after %.0f s: the syncer did not answer. The parameters are"
                " this learner's own, its last progress is not in the global model.",
                limit,
            )

    def _close_is_over(self, deadline: float) -> bool:
        if self._core is None:
            return False
        link = self._core.link
        return time.monotonic() >= deadline or link.over or link.gone_away

    def abandon(self) -> None:
        """Leave at once, without giving or taking anything; never raises, never blocks for long."""
        self._alive = False
        self._counter.detach()
        self._tokens.detach()
        if self._session is not None:
            if self.connected:  # so that rounds do not wait for it, and its name is free again
                self._session.post([act.Leave()])
            self._session.close()
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


def _encode_plan(reserved: list[tuple[act.LearnerAction, Buffer | None]]) -> list[int]:
    """What the other ranks of an island have to do, in small numbers."""
    plan: list[int] = []
    for action, _ in reserved:
        if isinstance(action, act.Apply):
            plan += [_BLEND if action.alpha > 0.0 else _APPLY, action.fragment]
        elif isinstance(action, act.CaptureBase):
            plan.append(_CAPTURE)
        elif isinstance(action, act.Restore):
            plan.append(_RESTORE)
    return plan


def _innermost(model: nn.Module) -> nn.Module:
    """The module whose forward the user's code reaches in the end, however it is wrapped."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner

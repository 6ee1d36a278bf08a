"""What the training thread does at a boundary, on all ranks of a learner alike.

The leader steps the core and shares what follows as a plan of small numbers; every rank carries it
out at the same step, so that parameters stay equal on all of them. Copies happen here; everything
else is handed to the I/O thread.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from diloco_plugin.config import parameters_from, parameters_to
from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.learner import LearnerCore
from diloco_plugin.core.link import Standing
from diloco_plugin.core.parameters import Parameters
from diloco_plugin.errors import UnsupportedError
from diloco_plugin.learner.innerstate import InnerState
from diloco_plugin.learner.island import Island
from diloco_plugin.learner.replica import Buffer, Replica
from diloco_plugin.learner.session import Session
from diloco_plugin.tensors.layout import Census, Layout, build_layout, taking_part

log = logging.getLogger("diloco.learner")

#: How long the training thread waits for news at a time, in lockstep and at the ends of training.
WAIT_SECONDS: Final = 0.05
#: First number of a plan: will there be another turn at this boundary?
_DONE, _AGAIN = 0, 1
#: Opcodes of a plan.
_APPLY, _BLEND, _CAPTURE, _RESTORE, _LAY_OUT, _STOP, _STATE = range(1, 8)

Reserved: TypeAlias = list[tuple[act.LearnerAction, Buffer | None]]


class Turns:
    """Decides (leader), shares, carries out. Training thread only; `turn` is collective.

    Attributes:
        replica: the learner's numbers; None until the syncer has said how the model is divided.
        parameters: of the run; None until then.
        index, count, run: the learner's place, as the syncer told it last.
        should_stop: the run has reached its last step, as of the last turn.
    """

    def __init__(
        self,
        census: Census,
        optimizers: Sequence[Any],
        inner: InnerState,
        island: Island,
        core: LearnerCore | None,
        session: Session | None,
    ) -> None:
        """`core` and `session` are the leader's, None on other ranks."""
        self.replica: Replica | None = None
        self.parameters: Parameters | None = None
        self.index, self.count, self.run = 0, 1, ""
        self.should_stop = False
        self._census = census
        self._optimizers = optimizers
        self._inner = inner
        self._island = island
        self._core = core
        self._session = session

    def turn(self, event: ev.LearnerEvent, *, over: bool, joining: bool = False) -> bool:
        """One event, on all ranks: decide (leader), share the plan, carry it out.

        Returns True when the training thread need not stay for another turn; `over` says so. While
        `joining` it stays until the global model is held.
        """
        reserved: Reserved = []
        plan: list[int] = []
        if self._core is not None and self._session is not None:
            reserved = self._decide(event, plan)
            again = not over and self._wants_another_turn(joining)
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

    def _wants_another_turn(self, joining: bool) -> bool:
        """Leader: does the training thread have to stay? (joining, closing, lockstep)"""
        assert self._core is not None
        assert self._session is not None
        if self._session.error is not None:
            return False
        if self._core.closing:
            return self._core.link.standing is not Standing.LEFT
        if joining:
            return not self._core.joined
        with self._session.changed:
            if self._core.must_wait():
                self._session.changed.wait(WAIT_SECONDS)
            return self._core.must_wait()

    def _decide(self, event: ev.LearnerEvent, plan: list[int]) -> Reserved:
        """Leader: step the core and take the buffers that its actions need, under the lock."""
        assert self._core is not None
        assert self._session is not None
        reserved: Reserved = []
        with self._session.lock:
            # Under the same lock: what the core decides may need the replica that is laid out here.
            self._lay_out_leader(plan)
            actions = self._core.step(event)
            if self._core.complete is not None:
                plan.append(_STOP)
            for action in actions:
                buffer = None
                if isinstance(action, act.Release | act.Unstage):
                    self._session.free(action)
                    continue
                if isinstance(action, act.DropState):
                    self._session.free(action)
                if isinstance(action, act.Apply):
                    buffer = self._session.arrived.pop(action.fragment)
                elif isinstance(action, act.Snapshot):
                    assert self.replica is not None
                    buffer = self.replica.take_staging()
                    assert buffer is not None, "the core counts staging buffers"
                    self._session.staged[action.fragment] = buffer
                reserved.append((action, buffer))
        return reserved

    def _carry_out(self, reserved: Reserved) -> None:
        """Leader: copies in this thread, everything else in the I/O thread, in order."""
        session = self._session
        assert session is not None
        for action, buffer in reserved:
            match action:
                case act.Snapshot():
                    assert self.replica is not None
                    assert buffer is not None
                    self.replica.snapshot(action.fragment, buffer)
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
                case act.ApplyState():
                    stream, session.inherited = session.inherited, None
                    remark = self._inherit(stream)
                    log.info("inner state: %s%s", action.source, remark)
                case _:
                    session.post([action])

    def _follow(self, plan: list[int]) -> None:
        """Other ranks of an island: do what the leader does, with what it sends."""
        steps = iter(plan)
        for code in steps:
            if code in (_APPLY, _BLEND):
                fragment = next(steps)
                # As the leader has it: the parameters that were shared are those of the first
                # syncer, and may have changed since.
                alpha = _float_of(next(steps)) if code == _BLEND else 0.0
                assert self.replica is not None
                buffer = self.replica.take_arrival()
                assert buffer is not None
                self._apply(fragment, alpha, buffer)
                self.replica.rebase(fragment, buffer)
                self.replica.give_back(buffer)
            elif code == _CAPTURE:
                self._capture()
            elif code == _RESTORE:
                self._restore()
            elif code == _STATE:
                self._inherit(None)

    def _apply(self, fragment: int, alpha: float, buffer: Buffer) -> None:
        assert self.replica is not None
        elements = self.replica.layout.fragments[fragment].elements
        self._island.share_flat(buffer.flat[:elements])
        self.replica.apply(fragment, buffer, alpha, self._optimizers)

    def _inherit(self, stream: Tensor | None) -> str:
        """Begin with a peer's inner optimizer state, which the leader holds."""
        (size,) = self._island.share_plan([stream.numel() if stream is not None else 0])
        stream = torch.empty(size, dtype=torch.uint8) if stream is None else stream
        self._island.share_flat(stream)
        problem = self._inner.problem(stream) if not self._island.leader else ""
        if problem:
            raise UnsupportedError(
                f"this rank cannot take the inner optimizer state that the first one takes:"
                f" {problem}. Give all ranks of a learner the same optimizer, or state='fresh'."
            )
        return self._inner.apply(stream)

    def _capture(self) -> None:
        assert self.replica is not None
        for fragment in self.replica.layout.fragments:
            self.replica.capture_base(fragment.index)

    def _restore(self) -> None:
        assert self.replica is not None
        for fragment in self.replica.layout.fragments:
            self.replica.overwrite_with_base(fragment.index, self._optimizers)

    # ---- the layout, known once the syncer has answered ----

    def _lay_out_leader(self, plan: list[int]) -> None:
        assert self._session is not None
        place = self._session.place
        if place is None:
            return
        self.index, self.count, self.run = place.index, place.count, place.run
        if self.replica is None:
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
        self.parameters = parameters_from(told, source="the syncer", outer=False)
        specs = taking_part(self._census.specs, self.parameters.buffers)
        self._build(build_layout(specs, fragments))

    def _build(self, layout: Layout) -> None:
        assert self.parameters is not None
        spare = 2
        if self.parameters.lockstep:
            spare = max(spare, self.parameters.overlap + 1)
        self.replica = Replica(layout, self._census.tensors, staging=spare, arrivals=spare)
        if self._session is not None and self._core is not None:
            with self._session.lock:
                self._core.have_buffers(staging=spare, arrivals=spare)
            self._session.use(self.replica)


def _encode_plan(reserved: Reserved) -> list[int]:
    """What the other ranks of an island have to do, in small numbers."""
    plan: list[int] = []
    for action, _ in reserved:
        if isinstance(action, act.Apply):
            blend = action.alpha > 0.0
            plan += [_BLEND if blend else _APPLY, action.fragment]
            plan += [_int_of(action.alpha)] if blend else []
        elif isinstance(action, act.CaptureBase):
            plan.append(_CAPTURE)
        elif isinstance(action, act.Restore):
            plan.append(_RESTORE)
        elif isinstance(action, act.ApplyState):
            plan.append(_STATE)
    return plan


def _int_of(number: float) -> int:
    """The bits of a float: it must be the same to the last one on every rank."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


def _float_of(bits: int) -> float:
    (number,) = struct.unpack("<d", bits.to_bytes(8, "little", signed=True))
    return float(number)

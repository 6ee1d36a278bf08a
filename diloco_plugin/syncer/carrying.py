"""Carrying out what the syncer's core decides: messages, transfers, merges, commits.

For the daemon's thread. Nothing is decided here; what cannot be sent comes back as an event.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from diloco_plugin.config import SyncerConfig, parameters_to
from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.core.syncer import SyncerCore
from diloco_plugin.syncer.bulk import Bulk
from diloco_plugin.syncer.control import Control
from diloco_plugin.syncer.intake import Intake
from diloco_plugin.syncer.keeping import Keeper
from diloco_plugin.syncer.merging import Merging
from diloco_plugin.wire import messages as msg
from diloco_plugin.wire.framing import encode

log = logging.getLogger("diloco.syncer")


class Carrier:
    """The hands of the core: one method for each kind of action."""

    def __init__(
        self,
        config: SyncerConfig,
        core: SyncerCore,
        control: Control,
        bulk: Bulk,
        merging: Merging,
        intake: Intake,
        keeper: Keeper | None,
        *,
        has_model: bool,
        later: Callable[[ev.SyncerEvent], None],
    ) -> None:
        """`has_model`: the run was given one, or goes on with one. `later` takes what follows from
        an action at once, to be decided on next.
        """
        self._config, self._core, self._control = config, core, control
        self._bulk, self._merging = bulk, merging
        self._intake, self._keeper = intake, keeper
        self._later = later
        #: the Hello that is being decided on, and the connection that asks for a place
        self.greeting: msg.Hello | None = None
        self.asking = b""
        #: there is a global model, whole
        self.has_model = has_model
        #: the core has said its last word
        self.stopped = False
        self._closing_rounds: set[int] = set()
        self._complained = 0.0
        self._carriers = self._by_action()

    def carry_out(self, action: act.SyncerAction) -> None:
        """Do what the core wants."""
        self._carriers[type(action)](action)

    def _by_action(self) -> dict[type, Callable[[Any], None]]:
        return {
            act.Admit: self._admit,
            act.Refuse: self._refuse,
            act.TellPlace: self._tell_place,
            act.AskHello: lambda a: self.send(a.life, msg.HelloRequired(epoch=self._core.epoch)),
            act.Probe: lambda a: self.send(a.life, msg.Probe(nonce=a.nonce)),
            act.Dismiss: self._dismiss,
            act.RequestSeed: self._request_seed,
            act.Pull: self._pull,
            act.Receive: self._receive,
            act.Discard: self._discard,
            act.Fold: lambda a: self._merging.fold(a, closing=a.round in self._closing_rounds),
            act.Merge: self._merge,
            act.Drop: self._drop,
            act.Commit: self._commit,
            act.Announce: self._announce,
            act.TellFate: self._tell_fate,
            act.RequestState: self._request_state,
            act.OfferState: self._offer_state,
            act.EndState: self._end_state,
            act.RefuseState: lambda a: self.send(a.joiner, msg.NoState(reason=a.reason)),
            act.CompleteRun: lambda a: self._tell_all(a.lives, msg.RunComplete(reason=a.reason)),
            act.Caution: self._caution,
            act.Note: lambda a: log.log(logging.ERROR if a.urgent else logging.INFO, "%s", a.text),
            act.Stop: self._stop,
        }

    def send(self, life: Life, message: msg.Message) -> None:
        """Say something to a learner; one that cannot be reached has vanished."""
        if not self._control.send(life, message):
            self._later(ev.Vanished(now_ns=time.monotonic_ns(), life=life))

    def _tell_all(self, lives: tuple[Life, ...], message: msg.Message) -> None:
        for life in lives:
            self.send(life, message)

    def _admit(self, action: act.Admit) -> None:
        model = self._merging.the_model
        token = secrets.token_bytes(16)
        if self.greeting is not None and self.greeting.name == action.life.name:
            # who is turned away has no say in what is published
            self._intake.describe(self.greeting.model_config)
        self._bulk.forget(action.life)  # a life that comes back begins its transfers anew
        self._bulk.expect(token, action.life)
        parameters = parameters_to(self._config.parameters)
        parameters.pop("outer_options")  # may hold lists; learners take no outer steps
        welcome = msg.Welcome(
            protocol=msg.PROTOCOL,
            run=self._config.run,
            epoch=self._core.epoch,
            index=action.index,
            count=action.count,
            clock=action.clock,
            keep=action.keep,
            fragments=len(model.layout.fragments),
            fingerprint=model.layout.fingerprint,
            parameters=parameters,
            bulk_port=self._bulk.port,
            token=token,
        )
        how = "goes on with what it holds, as" if action.keep else "joins with"
        log.info("learner %s %s index %d of %d", action.life, how, action.index, action.count)
        self.send(action.life, welcome)

    def _tell_place(self, action: act.TellPlace) -> None:
        place = msg.Place(index=action.index, count=action.count)
        self._control.answer(self.asking, encode(place))

    def _refuse(self, action: act.Refuse) -> None:
        loud = time.monotonic() - self._complained > 1.0  # somebody may knock without end
        level = logging.WARNING if loud else logging.DEBUG
        log.log(level, "learner %s is turned away (%s): %s", action.life, action.code, action.text)
        self._complained = time.monotonic() if loud else self._complained
        self.send(action.life, msg.Refuse(code=action.code, text=action.text))
        self._control.hang_up(action.life)

    def _dismiss(self, action: act.Dismiss) -> None:
        log.info("learner %s is gone: %s", action.life, action.reason)
        if action.tell:
            self.send(action.life, msg.Fence(reason=action.reason))
        self._control.hang_up(action.life)
        self._bulk.forget(action.life)

    def _request_seed(self, action: act.RequestSeed) -> None:
        self.has_model = False
        self.send(action.life, msg.SeedRequest())
        self._bulk.receive_seed(action.life)

    def _pull(self, action: act.Pull) -> None:
        log.debug("round %d pulls fragment %d: %s", action.round, action.fragment, action.reason)
        if action.closing:
            self._closing_rounds.add(action.round)
        pull = msg.Pull(
            round=action.round,
            fragment=action.fragment,
            version=action.version,
            closing=action.closing,
        )
        self._tell_all(action.lives, pull)

    def _receive(self, action: act.Receive) -> None:
        exact = action.round in self._closing_rounds
        name = "fp32" if exact else self._config.parameters.codec
        self._bulk.receive(action.life, action.round, action.fragment, name)

    def _discard(self, action: act.Discard) -> None:
        self._bulk.discard(action.life, action.round)
        self._merging.discard(action)

    def _merge(self, action: act.Merge) -> None:
        log.debug("round %d merges fragment %d: %s", action.round, action.fragment, action.reason)
        self._closing_rounds.discard(action.round)
        self._merging.merge(action, self._core.rounds.versions[action.fragment] + 1)

    def _drop(self, action: act.Drop) -> None:
        self._closing_rounds.discard(action.round)
        self._merging.drop(action)

    def _commit(self, action: act.Commit) -> None:
        model = self._merging.the_model
        if self._keeper is not None:
            self._keeper.commit(action, model)
            return
        model.publish(action.fragment)
        self._later(ev.CommitDone(now_ns=time.monotonic_ns(), round=action.round))

    def _announce(self, action: act.Announce) -> None:
        self.has_model = True
        copy = self._merging.the_model.wire_copy(action.fragment)
        assert copy is not None
        announce = msg.Announce(
            fragment=action.fragment, version=action.version, clock=action.clock, codec=copy.codec
        )
        self._tell_all(action.lives, announce)

    def _tell_fate(self, action: act.TellFate) -> None:
        fate = msg.Fate(
            round=action.round,
            fragment=action.fragment,
            fate=action.fate.value,
            reason=action.reason,
        )
        self.send(action.life, fate)

    def _request_state(self, action: act.RequestState) -> None:
        self.send(action.donor, msg.StateRequest(ticket=action.ticket))

    def _offer_state(self, action: act.OfferState) -> None:
        log.info("learner %s gives its inner state to %s", action.donor, action.joiner)
        self._bulk.relay(action.ticket, action.donor, action.joiner, action.size)
        offer = msg.StateOffer(
            ticket=action.ticket, donor=action.donor.name, clock=action.clock, size=action.size
        )
        self.send(action.joiner, offer)

    def _end_state(self, action: act.EndState) -> None:
        self._bulk.end_relay(action.ticket)
        self.send(action.donor, msg.StateOver(ticket=action.ticket))

    def _caution(self, action: act.Caution) -> None:
        log.warning("learner %s: %s", action.life, action.text)
        self.send(action.life, msg.Warn(text=action.text))

    def _stop(self, action: act.Stop) -> None:
        log.info("stopping: %s", action.reason)
        self._tell_all(action.lives, msg.GoingAway(reason=action.reason))
        self.stopped = True

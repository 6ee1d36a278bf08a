"""What a learner says, as events of the syncer core."""

from __future__ import annotations

from diloco_plugin.core import events as ev
from diloco_plugin.core.events import Life
from diloco_plugin.wire import messages as msg


def event_of(message: msg.ToSyncer, life: Life, now: int) -> ev.SyncerEvent:
    """The event of a message; `now` in monotonic nanoseconds."""
    match message:
        case msg.Progress():
            return ev.Progressed(
                now_ns=now,
                life=life,
                clock=message.clock,
                step_ns=message.step_ns,
                tokens=message.tokens,
            )
        case msg.Offer():
            return ev.Offered(
                now_ns=now,
                life=life,
                round=message.round,
                fragment=message.fragment,
                base=message.base,
                steps=message.steps,
                tokens=message.tokens,
                nothing=message.nothing,
            )
        case msg.Taken():
            return ev.TookModel(now_ns=now, life=life)
        case msg.ProbeAnswer():
            return ev.ProbeAnswered(now_ns=now, life=life, nonce=message.nonce)
        case msg.CloseRequest():
            return ev.CloseAsked(now_ns=now, life=life, fragments=message.fragments)
        case msg.StateAnswer():
            return ev.StateOffered(
                now_ns=now,
                life=life,
                ticket=message.ticket,
                clock=message.clock,
                size=message.size,
                nothing=message.nothing,
            )
        case msg.StateResult(problem=""):
            return ev.StateTaken(now_ns=now, life=life, ticket=message.ticket)
        case msg.StateResult():
            return ev.StateFailed(
                now_ns=now, life=life, ticket=message.ticket, reason=message.problem
            )
        case msg.Goodbye():
            return ev.Left(now_ns=now, life=life)
        case _:
            return ev.Heard(now_ns=now, life=life)

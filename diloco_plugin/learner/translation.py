"""What the syncer says as events of the learner core, and what the core wants said as messages."""

from __future__ import annotations

from diloco_plugin.core import actions as act
from diloco_plugin.core import events as ev
from diloco_plugin.tensors.codec import codec
from diloco_plugin.wire import messages as msg


def event_of(message: msg.ToLearner, now: int) -> ev.LearnerEvent | None:
    """The event of a message, or None when the session takes it by itself."""
    match message:
        case msg.Pull():
            return ev.Pulled(
                now_ns=now,
                round=message.round,
                fragment=message.fragment,
                closing=message.closing,
            )
        case msg.Announce():
            return ev.Announced(
                now_ns=now,
                fragment=message.fragment,
                version=message.version,
                clock=message.clock,
                exact=codec(message.codec).lossless,
            )
        case msg.SeedRequest():
            return ev.SeedAsked(now_ns=now)
        case msg.StateOffer():
            return ev.StateAnnounced(
                now_ns=now,
                ticket=message.ticket,
                donor=message.donor,
                clock=message.clock,
                size=message.size,
            )
        case msg.NoState():
            return ev.StateRefused(now_ns=now, reason=message.reason)
        case msg.Refuse():
            return ev.TurnedAway(now_ns=now, code=message.code, text=message.text)
        case msg.HelloRequired():
            return ev.Strange(now_ns=now)
        case msg.RunComplete():
            return ev.RunCompleted(now_ns=now, reason=message.reason)
        case msg.GoingAway():
            return ev.Lost(now_ns=now, reason=message.reason, deliberate=True)
        case msg.Fence():
            return ev.Lost(now_ns=now, reason=message.reason)
        case msg.HeartbeatAnswer():
            return ev.SyncerHeard(now_ns=now)
    return None


def message_of(action: act.LearnerAction, epoch: int) -> msg.Message | None:
    """The message that carries an action out, or None when it takes more than that."""
    match action:
        case act.Beat():
            return msg.Heartbeat(epoch=epoch)
        case act.Report():
            return msg.Progress(
                epoch=epoch, clock=action.clock, step_ns=action.step_ns, tokens=action.tokens
            )
        case act.SayTaken():
            return msg.Taken(epoch=epoch)
        case act.SayState():
            return msg.StateResult(epoch=epoch, ticket=action.ticket, problem=action.problem)
        case act.AskClose():
            return msg.CloseRequest(epoch=epoch, fragments=action.fragments)
        case act.Leave():
            return msg.Goodbye(epoch=epoch)
    return None

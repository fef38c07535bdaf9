"""Clients of a call and the record of what they received (laws 3 and 4).

`bridle.gateway.registry.Tries` finds the call that a retry joins. A call that nobody waits for is
kept for `retry_grace_s`, then cancelled, or kept as abandoned if it had ended.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from bridle.aio import Nursery
from bridle.capture.records import Delivery, Store
from bridle.errors import RequestError
from bridle.gateway.call import DELIVERED, Asked, Call, Stage
from bridle.gateway.metrics import Metrics
from bridle.gateway.recording import issued_ids
from bridle.gateway.registry import GatewaySession
from bridle.prompting.canonical import answer_atoms
from bridle.types import DeliveryState, Message, Usage


class Deliveries:
    """Attaches clients to calls and records what they received."""

    def __init__(
        self, *, store: Store, nursery: Nursery, retry_grace_s: float, metrics: Metrics
    ) -> None:
        self._store = store
        self._nursery = nursery
        self._grace_s = retry_grace_s
        self._metrics = metrics

    def joined(self, session: GatewaySession, question: bytes, asked: Asked) -> Call | None:
        """Return the call that a retry joins, its client attached; `None` = the request is a new
        sample.

        A reply that was delivered under the same idempotency key is superseded then: its client
        asks for it again, so it never arrived.
        """
        call = session.tries.find(question, asked)
        if call is not None:
            why = "retry_count" if asked.retry_count else "client_gone"
            if asked.idempotency_key in call.idempotency_keys:
                why = "idempotency_key"
            joint = {"at": time.time(), "why": why, "retry_count": asked.retry_count}
            call.joined_by = (*call.joined_by, joint)
            self._metrics.joined.values[()] += 1
            self.attach(session, call, asked)
            return call
        lost = session.tries.same_key(question, asked)
        if lost is not None and lost.delivery is DeliveryState.DELIVERED and not lost.continued:
            self.record(session, lost, DeliveryState.SUPERSEDED, "same idempotency key")
        return None

    def attach(self, session: GatewaySession, call: Call, asked: Asked) -> None:
        """Attach one more client that waits for `call`."""
        call.clients += 1
        call.retry_count = asked.retry_count
        if asked.idempotency_key is not None:
            session.tries.named(call, asked.idempotency_key)
        if call.grace is not None:
            call.grace.cancel()
            call.grace = None

    def received(self, session: GatewaySession, call: Call) -> None:
        """Record that a client got the whole reply over a live connection."""
        call.clients -= 1
        if call.delivery is not DeliveryState.DELIVERED:
            self.record(session, call, DeliveryState.DELIVERED)
        else:
            self._release(call)
        session.failed_last = False
        session.tries.detached()

    def refused(self, session: GatewaySession, call: Call, error: RequestError) -> None:
        """Record that a client got the error of the call."""
        call.clients -= 1
        session.note_error(error)
        if call.stage is Stage.FAILED:
            last = replace(call.asked, retry_count=call.retry_count)
            session.tries.refused(call.question_key, last, error)
        session.tries.detached()

    def left(self, session: GatewaySession, call: Call, *, partly: bool) -> None:
        """Record that a client left before it had the whole reply; `partly` = it had some of it."""
        call.clients -= 1
        call.partly_written |= partly
        self._release(call)
        session.tries.detached()
        if call.clients or call.delivered or call.stage is Stage.FAILED or session.sealed:
            return
        if partly and call.stage is Stage.SAMPLING:
            self._expect_echo(session, call)
        if self._grace_s == 0:
            self.expire(session, call)
        else:
            loop = asyncio.get_running_loop()
            call.grace = loop.call_later(self._grace_s, self.expire, session, call)

    def expire(self, session: GatewaySession, call: Call) -> None:
        """Cancel a call whose reply no client waits for, or mark it as abandoned if it had
        ended.
        """
        if call.grace is not None:
            call.grace.cancel()
            call.grace = None
        if call.clients or call.delivery is not None:
            return
        match call.stage:
            case Stage.PLACED | Stage.SAMPLING:
                session.tries.end(call)  # a retry would get the error by which it ends
                if not call.cut() and call.task is not None:
                    call.task.cancel()
            case Stage.COMMITTED:
                state = DeliveryState.CUT if call.partly_written else DeliveryState.ABANDONED
                self.record(session, call, state)
            case Stage.COMMITTING | Stage.FAILED:
                pass  # `committed` looks again; a failed call has nothing to record

    def close(self, session: GatewaySession, call: Call) -> None:
        """Record at the session's end what became of a reply that is not known to be delivered."""
        if call.stage is Stage.COMMITTED and call.delivery is None:
            cut = call.partly_written or call.clients > 0
            self.record(session, call, DeliveryState.CUT if cut else DeliveryState.ABANDONED)

    def committed(self, session: GatewaySession, call: Call) -> None:
        """Mark the reply of a call that was just committed as abandoned or cut, if no client waits
        and the time for a retry has passed.
        """
        if call.clients == 0 and call.grace is None:
            self.expire(session, call)

    def broken(self, session: GatewaySession, call: Call) -> None:
        """Record that a call broke off; the part that was sent and the sampled tokens are
        durable.
        """
        self.record(session, call, DeliveryState.CUT)

    def _expect_echo(self, session: GatewaySession, call: Call) -> None:
        """Expect the partial reply back: a harness that keeps what it got may continue at once.

        What left is found by the conversation from here on; the call's commit puts all of it there.
        """
        shown = _delivered(call)
        if shown is None or session.calls.get(call.exchange_id) is not call:
            return
        question = call.posed()
        session.conversation.commit(
            call.exchange_id,
            question.canonical,
            answer_atoms(shown, question.request.tools),
            issued_ids(shown),
            template_args=question.template_args,
            tokens=0 if call.output_ids is None else len(call.output_ids),
        )

    def shown(self, session: GatewaySession, call: Call, by: str) -> None:
        """Mark a reply as delivered, because a later request shows it."""
        call.continued = True
        if call.stage is Stage.COMMITTED and call.delivery is not DeliveryState.DELIVERED:
            self.record(session, call, DeliveryState.DELIVERED, f"shown by {by}")

    def record(
        self, session: GatewaySession, call: Call, state: DeliveryState, detail: str = ""
    ) -> None:
        """Write the delivery state of a reply; the conversation and the session's counts get it at
        once.
        """
        session.delivered -= call.delivery is DeliveryState.DELIVERED
        session.delivered += state is DeliveryState.DELIVERED
        call.delivery = state
        delivered = state in DELIVERED
        if delivered:
            session.tries.end(call)
        if call.grace is not None:
            call.grace.cancel()
            call.grace = None
        if call.exchange_id in session.calls:  # not after a seal forgot them
            shown = _delivered(call) if state is DeliveryState.CUT else None
            atoms = None
            if shown is not None:
                atoms = answer_atoms(shown, call.posed().request.tools)
                detail = detail or str(call.live.sent if call.live else "")
            session.conversation.mark(call.exchange_id, state, delivered=atoms)
        self._metrics.deliveries.values[(state,)] += 1
        if delivered and call.clients == 0:
            call.release()
        delivery = Delivery(
            exchange_id=call.exchange_id,
            session_id=session.session_id,
            state=state,
            at=time.time(),
            detail=detail,
            joined_by=call.joined_by,
        )
        self._store.deliver_soon(delivery, self._nursery.on_error)

    def _release(self, call: Call) -> None:
        """Drop what nobody can ask for any more."""
        if call.delivered and call.clients == 0:
            call.release()


def _delivered(call: Call) -> tuple[Message, ...] | None:
    """Return the part of a live reply that was written to a client, as its harness may send it
    back.

    `None` = it is not known what was written.
    """
    if call.live is None or call.question is None or not call.live.partly_sent:
        return None
    wire, request = call.question.wire, call.question.request
    body = wire.reply_json(request, call.head, call.live.delivered(), Usage(0, 0))
    return wire.reply_messages(body)

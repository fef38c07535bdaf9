"""Who waits for a call, who joins one, and what became of its reply (laws 3 and 4).

A request that must show the model what an earlier one showed joins that one's call instead of
sampling again, if it says that it is a retry or if nobody waits for the earlier one any more, and
if the earlier reply was never delivered. Identical requests whose clients still wait are separate
samples. A call that nobody waits for is kept for `retry_grace_s`, then cancelled, or kept as
abandoned if it had ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bridle.aio import Nursery
from bridle.capture.records import Delivery
from bridle.capture.store import Store
from bridle.gateway.call import Asked, Call, Stage
from bridle.gateway.metrics import Metrics
from bridle.gateway.recording import issued_ids
from bridle.gateway.registry import Session
from bridle.prompting.canonical import answer_atoms
from bridle.types import DeliveryState, Message, ModelRequest, Usage


def joinable(
    candidates: Sequence[Call], request: ModelRequest, tools_digest: bytes, asked: Asked
) -> Call | None:
    """The call that `request` repeats and joins; `None` = it is a sample of its own.

    `candidates` have exactly this prompt, oldest first. Calls without clients come before those
    that still have one, newer before older.
    """
    found = [
        call
        for call in reversed(candidates)
        if call.stage is not Stage.FAILED
        and call.error is None
        and not call.delivered
        and _same_question(call, request, tools_digest)
        and (_says_so(asked, call) or call.clients == 0)
    ]
    return min(found, key=lambda call: call.clients > 0, default=None)


def _same_question(call: Call, request: ModelRequest, tools_digest: bytes) -> bool:
    """Whether the model must be shown, and may answer, exactly the same."""
    if call.question is None or call.tools_digest != tools_digest:
        return False
    earlier = call.question.request
    return (
        earlier.tool_choice == request.tool_choice
        and earlier.response_schema == request.response_schema
        and earlier.thinking == request.thinking
    )


def _says_so(asked: Asked, call: Call) -> bool:
    if asked.idempotency_key is not None:
        return asked.idempotency_key in call.idempotency_keys
    return asked.retry_count > 0


class Deliveries:
    """Attaches clients to calls and records what they received."""

    def __init__(
        self, *, store: Store, nursery: Nursery, retry_grace_s: float, metrics: Metrics
    ) -> None:
        self._store = store
        self._nursery = nursery
        self._grace_s = retry_grace_s
        self._metrics = metrics

    def attach(self, call: Call, asked: Asked) -> None:
        """One more client waits for `call`."""
        call.clients += 1
        if asked.idempotency_key is not None:
            call.idempotency_keys.add(asked.idempotency_key)
        if call.grace is not None:
            call.grace.cancel()
            call.grace = None

    def received(self, session: Session, call: Call) -> None:
        """A client got the whole reply over a live connection."""
        call.clients -= 1
        if call.delivery is not DeliveryState.DELIVERED:
            self.record(session, call, DeliveryState.DELIVERED)
        self._release(call)
        session.failed_last = False

    def refused(self, session: Session, call: Call, message: str, code: str | None = None) -> None:
        """A client was told that the call failed."""
        call.clients -= 1
        session.told_error(message, code)

    def left(self, session: Session, call: Call, *, partly: bool) -> None:
        """A client went before it had the whole reply; `partly` = some of it was written."""
        call.clients -= 1
        call.partly_written |= partly
        self._release(call)
        if call.clients or call.delivered or call.stage is Stage.FAILED or session.sealed:
            return
        if partly and call.stage is Stage.SAMPLING:
            self._expect_echo(session, call)
        if self._grace_s == 0:
            self.expire(session, call)
        else:
            loop = asyncio.get_running_loop()
            call.grace = loop.call_later(self._grace_s, self.expire, session, call)

    def expire(self, session: Session, call: Call) -> None:
        """Nobody claimed `call`: cancel it, or keep it as abandoned if it had ended."""
        if call.grace is not None:
            call.grace.cancel()
            call.grace = None
        if call.clients or call.delivery is not None:
            return
        match call.stage:
            case Stage.PLACED | Stage.SAMPLING:
                if not call.cut() and call.task is not None:
                    call.task.cancel()
            case Stage.COMMITTED:
                state = DeliveryState.CUT if call.partly_written else DeliveryState.ABANDONED
                self.record(session, call, state)
            case Stage.COMMITTING | Stage.FAILED:
                pass  # `committed` looks again; a failed call has nothing to record

    def close(self, session: Session, call: Call) -> None:
        """The session ends: say what became of a reply that is not known to be delivered."""
        if call.stage is Stage.COMMITTED and call.delivery is None:
            cut = call.partly_written or call.clients > 0
            self.record(session, call, DeliveryState.CUT if cut else DeliveryState.ABANDONED)

    def committed(self, session: Session, call: Call) -> None:
        """`call` is durable; if its grace ran out meanwhile, it is abandoned."""
        if call.clients == 0 and call.grace is None:
            self.expire(session, call)

    def broken(self, session: Session, call: Call) -> None:
        """`call` came to no end; what had left of it, and what was sampled, is durable."""
        self.record(session, call, DeliveryState.CUT)

    def _expect_echo(self, session: Session, call: Call) -> None:
        """A reply broke off: a harness that keeps what it got may go on at once.

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
        )

    def shown(self, session: Session, call: Call, by: str) -> None:
        """A later request shows this reply, so the harness has it, whatever we saw."""
        call.continued = True
        if call.stage is Stage.COMMITTED and call.delivery is not DeliveryState.DELIVERED:
            self.record(session, call, DeliveryState.DELIVERED, f"shown by {by}")

    def asked_again(self, session: Session, calls: Sequence[Call], by: str) -> None:
        """The same prompt is sampled anew: what was delivered and not continued is superseded."""
        for call in calls:
            if call.delivery is DeliveryState.DELIVERED and not call.continued:
                self.record(session, call, DeliveryState.SUPERSEDED, f"asked again by {by}")

    def record(self, session: Session, call: Call, state: DeliveryState, detail: str = "") -> None:
        """Write down what became of a reply; the conversation and the facts know it at once."""
        if state is DeliveryState.DELIVERED and not call.delivered:
            session.delivered += 1
        call.delivery = state
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
        self._metrics.delivery(state.value)
        self._release(call)
        delivery = Delivery(
            exchange_id=call.exchange_id,
            session_id=session.session_id,
            state=state,
            at=time.time(),
            detail=detail,
        )
        task = self._nursery.start(self._store.deliver(delivery), name="deliver")
        session.writing.add(task)
        task.add_done_callback(session.writing.discard)

    def _release(self, call: Call) -> None:
        """Drop what nobody can ask for any more."""
        if call.delivered and call.clients == 0:
            call.release()


def _delivered(call: Call) -> tuple[Message, ...] | None:
    """The part of a live reply that was written to a client, as its harness may send it back.

    `None` = it is not known what was written.
    """
    if call.live is None or call.question is None or not call.live.partly_sent:
        return None
    wire, request = call.question.wire, call.question.request
    body = wire.reply_json(request, call.reply_head(), call.live.delivered(), Usage(0, 0))
    return wire.reply_messages(body)

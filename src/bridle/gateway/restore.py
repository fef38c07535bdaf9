"""Old sessions brought back after their gateway was killed: from the store to a live conversation.

At start-up only keys and settings are read, and facts are counted when they are asked for. A
session's exchanges are read when its key is used: each is put together again from what capture kept
of it, parsed by the dialect that read it the first time, and indexed as if it had just been
committed. Its prompt is a chain node of stored ids; nothing is rendered and nothing is sampled.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import structlog

from bridle.capture.records import Delivery, Exchange, SessionCapture, Store
from bridle.config import Limits, SamplingPolicy
from bridle.dialects import DIALECTS
from bridle.dialects.base import ReplyHead, Route, RouteKind, WireFormat
from bridle.dialects.ids import bare_id, reply_id
from bridle.errors import BridleError, StoreError, boundary
from bridle.gateway import faults, lineage
from bridle.gateway.call import Answer, Asked, Call, Question, SpanList, Stage
from bridle.gateway.live import Mark
from bridle.gateway.models import Models
from bridle.gateway.registry import STORED_AS, GatewaySession, Registry, facts_of, question_key
from bridle.gateway.replay import stop_text_of
from bridle.gateway.responses import DELETED
from bridle.prompting.canonical import Atom, answer_atoms, canonical
from bridle.prompting.conversation import Placement, PlacementKind
from bridle.prompting.prompt import PromptIds
from bridle.prompting.turns import TurnCounts, note_given
from bridle.types import (
    DeliveryState,
    FinishReason,
    Message,
    ModelRequest,
    Reply,
    ToolCall,
    Usage,
)

log = structlog.get_logger()


def register_stored(registry: Registry, store: Store) -> None:
    """Register every session that an earlier gateway opened in `store`; ended ones stay sealed."""
    for record in store.sessions():
        kept = record.metadata.get(STORED_AS)
        if kept is None:
            continue
        outcome = store.outcome(record.session_id)
        if facts_of(outcome) is not None:
            continue  # deleted: the store knows all that is asked of it
        session = GatewaySession(
            record,
            sampling=SamplingPolicy.model_validate(kept["sampling"]),
            limits=Limits.model_validate(kept["limits"]),
        )
        session.restored = session.counted = False
        session.sealed = outcome is not None
        registry.add(session, bytes.fromhex(kept["key_sha256"]))


class Restorer:
    """Reads sessions back when they are needed."""

    def __init__(self, store: Store, models: Models) -> None:
        self._store = store
        self._models = models

    def count(self, session: GatewaySession) -> None:
        """Compute the counts of a session of an earlier process.

        After a `StoreError` the next call tries again.
        """
        if not session.counted:
            _count(session, self._store.read(session.session_id))

    def restore(self, session: GatewaySession) -> None:
        """Read a session's exchanges from the store, unless they are in memory.

        An exchange that cannot be read (a damaged row) is left out: requests that continue it are
        roots. After a `StoreError` the next call tries again.
        """
        if session.restored:
            return
        capture = self._store.read(session.session_id)
        if not session.counted:
            _count(session, capture)
        session.restored = True
        session.stored.update(capture.bodies)
        session.in_hand.captured = sum(map(len, capture.bodies.values()))
        for exchange in capture.exchanges:
            try:
                with boundary(StoreError, "reading an exchange back"):
                    self._bring_back(session, capture, exchange)
            except BridleError as error:
                log.warning(
                    "exchange_not_restored",
                    session=session.session_id,
                    exchange=exchange.exchange_id,
                    error=str(error),
                )
        log.info("session_restored", session=session.session_id, exchanges=len(session.calls))

    def _bring_back(
        self, session: GatewaySession, capture: SessionCapture, exchange: Exchange
    ) -> None:
        wire = DIALECTS[exchange.dialect]
        spans = self._spans(session, exchange)
        request = self._request(session, capture, exchange, wire, spans.whole())
        key = canonical(request, session.atoms)
        session.new_unpaired(key)
        other = exchange.extra.get("other_model")
        template_args = self._models.template_args_of(other, request)
        shown = wire.reply_messages(exchange.reply)
        turns = TurnCounts.of_json(exchange.extra.get("turns"))
        if turns is not None and exchange.continues is None and not turns.foreign:
            note_given(session.conversation, request.messages, key)
        session.conversation.begin(exchange.exchange_id, key, continues=exchange.continues)
        lineage.index_reply(
            session,
            exchange.exchange_id,
            (request, key, template_args),
            shown,
            tokens=len(exchange.output_ids),
            kind=exchange.kind,
        )
        call = Call(
            exchange_id=exchange.exchange_id,
            session_id=session.session_id,
            started_at=exchange.started_at,
            clock_start=0.0,
            question_key=question_key(request, key, template_args),
            other=other,
            asked=Asked(kind=exchange.kind),
            prompt=self._prompt(session, exchange),
            output_ids=exchange.output_ids,
            finish=exchange.finish_reason,
            images=exchange.extra.get("media", ()),
            reasoned=any(message.reasoning for message in shown),
            turns=turns,
            spans=spans,
            continues=exchange.continues,
            base_id=exchange.request.base,
        )
        _register(session, call, exchange)
        delivery = capture.deliveries.get(exchange.exchange_id)
        if delivery is not None:
            call.delivery, call.joined_by = delivery.state, tuple(delivery.joined_by)
            atoms = _left(delivery, exchange, wire, request, shown)
            session.conversation.mark(exchange.exchange_id, delivery.state, delivered=atoms)
        is_whole = exchange.finish_reason is not FinishReason.ABORT
        deleted = delivery is not None and delivery.detail == DELETED
        if request.extra.get("store") and is_whole and not deleted:
            session.shelf.know(reply_id(exchange.reply), exchange.exchange_id)
        if not call.delivered:
            placement, served = _placed_again(exchange), self._models.of(other)
            question = Question(
                request, wire, key, placement, template_args, served, call.question_key
            )
            _keep_for_a_retry(call, exchange, question, shown)
            session.tries.begin(call)

    def _spans(self, session: GatewaySession, exchange: Exchange) -> SpanList:
        """Return the digests of the request's raw messages, as a delta on those of its base."""
        kept = exchange.request
        base = session.calls[kept.base].spans if kept.base is not None else None
        before = base.whole()[: kept.kept_spans] if base is not None else ()
        return SpanList(base, (*before, *kept.spans))

    def _request(
        self,
        session: GatewaySession,
        capture: SessionCapture,
        exchange: Exchange,
        wire: WireFormat,
        digests: tuple[bytes, ...],
    ) -> ModelRequest:
        """Return the request, parsed again from its stored parts."""
        kept = exchange.request
        body = wire.body(
            kept.head,
            [capture.bodies[digest] for digest in digests],
            None if kept.tools is None else capture.bodies[kept.tools],
        )
        route = Route(
            exchange.dialect, RouteKind.GENERATE, model=exchange.extra.get("model"), stream=False
        )
        return wire.parse(route, body, session.messages)

    def _prompt(self, session: GatewaySession, exchange: Exchange) -> PromptIds:
        """Return the chain node of the prompt that was sampled under."""
        if exchange.parent_id is None:
            return PromptIds.root(exchange.suffix_ids)
        before, output_ids = session.calls[exchange.parent_id].sampled()
        if exchange.kept == len(before) + len(output_ids):
            return before.extend(output_ids, exchange.suffix_ids)
        whole = np.concatenate((before.array(), output_ids))[: exchange.kept]
        return PromptIds.root(np.concatenate((whole, exchange.suffix_ids)))


def _count(session: GatewaySession, capture: SessionCapture) -> None:
    """Set the session's counts and the time of its first call.

    Damaged rows count as turns, with the tokens that they show.
    """
    exchanges, damaged = capture.exchanges, capture.damaged
    session.turns = session.requests = session.begun = len(exchanges) + len(damaged)
    last = max((exchange.index for exchange in exchanges), default=-1)
    session.next_index = max(last + 1, session.turns)
    session.tokens = sum(len(exchange.output_ids) for exchange in exchanges)
    session.tokens += sum(row.sampled for row in damaged)
    session.delivered = sum(
        delivery.state is DeliveryState.DELIVERED for delivery in capture.deliveries.values()
    )
    if exchanges:
        seconds = time.time() - min(exchange.started_at for exchange in exchanges)
        session.first_call_at = time.monotonic() - seconds
    session.counted = True


def _register(session: GatewaySession, call: Call, exchange: Exchange) -> None:
    """Make a call known to its session as committed, under the idempotency keys that it had."""
    for stage in (Stage.SAMPLING, Stage.COMMITTING, Stage.COMMITTED):
        call.enter(stage)
    session.calls[exchange.exchange_id] = call
    for key in exchange.extra.get("idempotency_keys", ()):
        session.tries.named(call, key)
    if exchange.continues in session.calls:
        session.calls[exchange.continues].continued = True


def _placed_again(exchange: Exchange) -> Placement:
    return Placement(
        kind=PlacementKind(exchange.extra["placement"]),
        parent=exchange.continues,
        reason=exchange.root_reason,
        drift=exchange.extra.get("drift"),
        extend=exchange.parent_id is not None,
    )


def _keep_for_a_retry(
    call: Call, exchange: Exchange, question: Question, shown: tuple[Message, ...]
) -> None:
    """Keep what a client needs that asks again for a reply it never got."""
    call.question = question
    call.head = _head_of(exchange, question.request)
    facts, served = exchange.extra, question.served
    usage = Usage(
        prompt_tokens=exchange.prompt_length,
        completion_tokens=len(exchange.output_ids),
        cached_tokens=facts.get("cached_tokens", 0),
        reasoning_tokens=facts.get("reasoning_tokens", 0),
    )
    stop_text = stop_text_of(exchange, served.sampler.decode)
    reply = replace(_reply_of(exchange, shown), stop_text=stop_text)
    if question.request.logprobs:
        reply = served.prompts.with_logprobs(reply, exchange)
    call.answer = Answer(reply, usage, exchange.reply)
    if exchange.finish_reason is FinishReason.ABORT:
        call.error = faults.client_left()  # it has no end that could be asked for


def _left(
    delivery: Delivery,
    exchange: Exchange,
    wire: WireFormat,
    request: ModelRequest,
    shown: tuple[Message, ...],
) -> tuple[Atom, ...] | None:
    """Return the part of a live reply that was written before it was cut; `None` = unknown."""
    mark = Mark.read(delivery.detail)
    if mark is None:
        return None
    part = mark.within(_reply_of(exchange, shown))
    body = wire.reply_json(request, _head_of(exchange, request), part, Usage(0, 0))
    return answer_atoms(wire.reply_messages(body), request.tools)


def _head_of(exchange: Exchange, request: ModelRequest) -> ReplyHead:
    return ReplyHead(
        reply_id=bare_id(reply_id(exchange.reply)),
        model=request.model,
        created=int(exchange.started_at),
        prompt_tokens=exchange.prompt_length,
    )


def _reply_of(exchange: Exchange, shown: tuple[Message, ...]) -> Reply:
    tool_calls: list[ToolCall] = [made for message in shown for made in message.tool_calls]
    return Reply(
        content="".join(message.text for message in shown),
        reasoning="".join(message.reasoning or "" for message in shown) or None,
        tool_calls=tuple(tool_calls),
        finish_reason=exchange.finish_reason,
    )

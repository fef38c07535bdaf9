"""Turns that go on from the last one, read without the session's memory of its conversation.

Most requests are the last one's bytes, then its reply as a faithful harness sends it back, then one
message of a user or a tool. What such a turn continues is known without a search, and its facts
follow from those of the turn before. So the memory that a search needs (`RequestHistory`, atoms,
`Conversation`) learns of these turns only when the session gets any other request: `settle` then
reads the newest body, with the functions that read every request, and finds the others in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b, sha256
from itertools import accumulate
from typing import Any
from weakref import ref

from bridle.dialects.base import Route, WireFormat
from bridle.dialects.json_reader import MOST_ITEMS, split_grown
from bridle.engines.pool import EnginePool
from bridle.gateway import lineage
from bridle.gateway.admission import LONG_BYTES
from bridle.gateway.call import Asked, Call, Question, Stage
from bridle.gateway.listener import Connection
from bridle.gateway.models import Models, Served
from bridle.gateway.registry import GatewaySession, question_rest
from bridle.gateway.routing import asked
from bridle.harness_rules import decided_by_head
from bridle.prompting.canonical import (
    AtomKind,
    Canonical,
    answer_atoms,
    canonical,
    chain_after,
    message_atoms,
    only_text,
    text_after,
)
from bridle.prompting.conversation import Placement, PlacementKind
from bridle.types import DeliveryState, FinishReason, Kind, Message, ModelRequest, Role, ToolCall

MOST_TURNS = 64
"""Turns that wait to be settled; more are settled at once."""

_COMMA = ord(",")

_MESSAGES = frozenset({"messages", "message_spans", "span_digests", "span_lengths"})
"""The fields of a request that its messages decide."""

_TURNS = frozenset({Kind.AGENT, Kind.SUBAGENT})
"""Kinds of calls whose replies are not remembered for what they say."""

_UNREAD = Canonical((), (), (), b"")
"""In place of the canonical form of a request that `Tip.next` has read."""


class KnownHead:
    """A head that was authenticated, and what the requests with it have in common."""

    def __init__(
        self,
        connection: Connection,
        session: GatewaySession,
        headers: dict[str, str],
        route: Route,
        wire: WireFormat,
        raw: tuple[bytes, bytes],
    ) -> None:
        """`raw` is the head's bytes before and behind the length of the body."""
        self.before, self.after = raw
        self.start = len(self.before)
        self.size = self.start + len(self.after)
        self.head = connection.head
        self.session = ref(session)  # which may end before its connections
        self.headers = headers
        self.route = route
        self.wire = wire
        self._said: tuple[object, str, tuple[Asked, Served, EnginePool]] | None = None
        """The part of all requests with this `extra` and model besides their messages, and who
        answers them; `None` = not known."""

    def is_fixed(self, request: ModelRequest) -> bool:
        """Return whether all requests with this one's fields get the same engine and settings as
        it.
        """
        known = self._said
        return known is not None and known[0] is request.extra and known[1] == request.model

    def said(
        self, session: GatewaySession, request: ModelRequest, models: Models
    ) -> tuple[Asked, Served, EnginePool] | None:
        """Return a request's settings besides its messages, and the engine and pool that answer it.

        `None` = it does not want one unconstrained sample of its own from a pool of engines.
        """
        known = self._said
        if known is not None and known[0] is request.extra and known[1] == request.model:
            return known[2]
        harness, rules = session.record.metadata.get("harness"), session.kind_rules
        said = asked(self.headers, request, harness, rules)
        served = models.find(request.model, said.kind)
        pool = served.engine
        if not isinstance(pool, EnginePool) or not _is_whole(request, said, served):
            return None
        if decided_by_head(self.headers, harness, rules):
            self._said = request.extra, request.model, (said, served, pool)
        return said, served, pool


def _is_whole(request: ModelRequest, said: Asked, served: Served) -> bool:
    """Return whether a request wants a sample of its own, not constrained."""
    return not (
        request.logprobs
        or request.response_schema is not None
        or said.retry_count
        or said.idempotency_key is not None
        or (served.info.grammar and request.tool_choice not in {"auto", "none"})
    )


@dataclass(slots=True, eq=False)
class LinearTurn:
    """A turn that the session's memory does not know yet."""

    call: Call
    end: int
    """Length of its request's body up to the end of the last message."""
    spans: int
    """Number of its request's raw messages."""
    link: bytes
    """Digest of the chain behind its request."""
    shown: tuple[Message, ...] | None = None
    """Its reply as its harness will send it back; `None` = it is not read, or being sampled."""

    def read_reply(self, session: GatewaySession, wire: WireFormat) -> None:
        """Parse the turn's reply to messages, as the harness will send them back, and note its tool
        calls.

        To be called before the call is released.
        """
        answer = self.call.answer
        assert answer is not None, "it has a reply"
        self.shown = wire.reply_messages(answer.body)
        for message in self.shown:
            if message.tool_calls:
                session.lineage.note(self.call.exchange_id, self.shown, summary=False)
                break


@dataclass(slots=True, eq=False)
class Tip:
    """The last turn of a session of which the next one may be an extension."""

    question: Question
    """The last one that was read with all its messages."""
    known: KnownHead
    """The head of its request."""
    pool: EnginePool
    route: Route
    members: dict[str, Any]
    """The fields of all requests that go on from here but those in `_MESSAGES`."""
    rest: bytes
    """See `question_rest`."""
    body: memoryview
    """The last request's body up to the end of its last message."""
    tail: bytes
    """The rest of that body, and of all that follow."""
    call: Call
    link: bytes
    """Digest of the chain behind its reply."""
    shown: tuple[Message, ...]
    """Its reply as a faithful harness sends it back."""
    newest: tuple[memoryview, bytes] | None = None
    """`body` and `link` of the request that `next` read last."""
    turns: list[LinearTurn] = field(default_factory=list)
    """Those that are not settled, oldest first."""

    def next(self, data: bytes, at: int, session: GatewaySession) -> Question | None:
        """Parse the request `data[at:]` if it continues the last reply; `None` = it does not, or is
        unusual.

        The returned question's `request` has only that reply and the messages after it.
        """
        start, end = at + len(self.body), len(data) - len(self.tail)
        grows = 0 < end - start <= LONG_BYTES and data[start] == _COMMA
        if not grows or not data.endswith(self.tail) or not data.startswith(self.body, at):
            return None
        asked, parent, count = self.question, self.call, len(self.shown)
        spans = split_grown(data[start + 1 : end])
        messages = None if spans is None else asked.wire.read_new(spans)
        if messages is None or spans is None or tuple(messages[:count]) != self.shown:
            return None
        if parent.spans.kept + len(parent.spans.new) + len(spans) > MOST_ITEMS:
            return None  # `parse` refuses it
        link = self._link(messages[count:])
        if link is None or session.lineage.is_spawned(messages[count:]):
            return None
        if session.conversation.prompts_at(link):  # it was asked before
            return None
        self.newest = memoryview(data)[at:end], link
        digests = tuple([sha256(span).digest()[:16] for span in spans])
        request = ModelRequest(
            messages=tuple(messages),
            message_spans=spans,
            span_digests=digests,
            span_lengths=(1,) * len(spans),
            **self.members,
        )
        return Question(
            request,
            asked.wire,
            _UNREAD,
            Placement(PlacementKind.CHILD, parent.exchange_id, extend=True, new_from=count),
            asked.template_args,
            asked.served,
            blake2b(link + self.rest, digest_size=16).digest(),
            parent,
        )

    def _link(self, new: list[Message]) -> bytes | None:
        """Return the digest of the chain behind these messages.

        `None` = they are not texts of users after a text, nor the result of the reply's one call.
        """
        calls: tuple[ToolCall, ...] = ()
        for message in self.shown:
            calls += message.tool_calls
        link, results = self.link, 0
        for message in new:
            if message.role is Role.TOOL:
                results += 1
                known = len(calls) == 1 and calls[0].id is not None
                if not known or message.tool_call_id != calls[0].id:
                    return None
            elif message.role is not Role.USER:
                return None
            text = only_text(message.content)
            if text is None:
                return None
            if message.role is Role.TOOL:
                link = chain_after(link, message_atoms(message, self.question.request.dialect))
            elif text:
                link = text_after(link, AtomKind.USER, text)
        return link if new and results == len(calls) else None

    def begun(self, call: Call, question: Question) -> LinearTurn:
        """Link the call of the request that `next` read last to the call that it continues."""
        assert self.newest is not None, "the request was read"
        self.body, link = self.newest
        parent, before = self.call, self.call.turns
        assert before is not None, "a tip is made where they are counted"
        parent.continued = True
        call.continues = call.base_id = parent.exchange_id
        call.spans = parent.spans.grown(question.request.span_digests)
        call.turns = before.with_one_more()
        new, known = question.request.message_spans, self.question.request.message_spans
        spans = len(new) + (self.turns[-1].spans if self.turns else len(known))
        turn = LinearTurn(call, len(self.body), spans, link)
        self.turns.append(turn)
        return turn

    def goes_on(self, turn: LinearTurn, session: GatewaySession) -> bool:
        """Move the tip to a turn whose reply was delivered; `False` = what follows it needs a
        search.
        """
        assert turn.shown is not None, "it was sampled"
        after = _link_after(turn.link, turn.shown, self.question.request)
        if after is None or turn.call.finish is FinishReason.ABORT:
            return False
        if len(self.turns) >= MOST_TURNS:
            return False
        if session.conversation.turns_at(after):
            return False
        self.call, self.link, self.shown = turn.call, after, turn.shown
        return True


def _link_after(link: bytes, shown: tuple[Message, ...], request: ModelRequest) -> bytes | None:
    """Return the digest of the chain behind a reply; `None` = it says nothing that is seen."""
    text = only_text(shown[0].content) if len(shown) == 1 else None
    if text is not None and not shown[0].tool_calls:
        said = text.strip()
        return text_after(link, AtomKind.TEXT, said) if said else None
    atoms = [
        atom for atom in answer_atoms(shown, request.tools) if atom.kind is not AtomKind.EVIDENCE
    ]
    return chain_after(link, atoms) if atoms else None


def tip_of(
    session: GatewaySession, request: ModelRequest, known: KnownHead, models: Models
) -> Tip | None:
    """Return the session's tip: the state by which a request that only adds messages to the reply
    just given is read without a search.

    `None` = what follows needs a search.
    """
    if session.newest is None or session.newest[1].request is not request:
        return None
    (call, question, shown), session.newest = session.newest, None
    if not question.wire.grows or not _may_be_extended(call, question):
        return None
    found = known.said(session, request, models)
    begun = session.messages.newest(request.span_digests)
    link = _only_child(session, call, question)
    if found is None or begun is None or link is None or not known.is_fixed(request):
        return None
    names = [one.name for one in fields(ModelRequest) if one.name not in _MESSAGES]
    return Tip(
        question=replace(question, parent=None),
        known=known,
        pool=found[2],
        route=known.route,
        members={name: getattr(request, name) for name in names},
        rest=question_rest(request, question.canonical.tools_digest, question.template_args),
        body=begun.prefix,
        tail=bytes(begun.tail),
        call=call,
        link=link,
        shown=shown,
    )


def extends_delivered(question: Question, parent: Call) -> bool:
    """Return whether a question is the only one that goes on from a delivered reply of text."""
    placement = question.placement
    return (
        placement.kind is PlacementKind.CHILD
        and placement.extend
        and placement.tie is None
        and not placement.repeats
        and placement.new_from < len(question.request.messages)
        and parent.delivery is DeliveryState.DELIVERED
        and parent.finish is not FinishReason.ABORT
        and parent.turns is not None
        and parent.prompt is not None
        and not parent.images
    )


def _may_be_extended(call: Call, question: Question) -> bool:
    """Return whether the next request can be an ordinary extension of this one and its reply."""
    request = question.request
    return (
        call.delivery is DeliveryState.DELIVERED
        and call.finish is not FinishReason.ABORT
        and call.turns is not None
        and call.prompt is not None
        and request.prefill is None
        and not request.extra.get("store")
        and not question.canonical.pairing.orphans
    )


def _only_child(session: GatewaySession, call: Call, question: Question) -> bytes | None:
    """Return the digest of the chain behind a reply that no other of the session is like.

    `None` = there is another one, a call goes on from it or runs beside it, or it is no plain turn
    (no text or call, with images, a summary, a side call).
    """
    known = session.conversation.known(call.exchange_id)
    if known is None or known.children or not known.answer or known.shown is not known.answer:
        return None
    if session.running or call.images or call.asked.kind not in _TURNS:
        return None
    link = chain_after(question.canonical.chain[-1], known.answer)
    return link if session.conversation.turns_at(link) == [known] else None


def settle(session: GatewaySession) -> None:
    """Add the turns that were read without a search to the session's index, and drop its tip.

    The body of the last one contains the others: it is read once.
    """
    tip, session.tip = session.tip, None
    turns = [] if tip is None else [one for one in tip.turns if one.call.stage is not Stage.FAILED]
    if tip is None or not turns:
        return
    wire, template_args = tip.question.wire, tip.question.template_args
    body = b"".join((tip.body[: turns[-1].end], tip.tail))
    last = wire.parse(tip.route, body, session.messages)
    whole = canonical(last, session.atoms)
    messages = [*accumulate(last.span_lengths, initial=last.head_messages)]
    for turn in turns:
        call, key = turn.call, whole
        if turn is not turns[-1]:
            assert call.question is None, "only the reply of the last one may not be delivered"
            key = whole.until(messages[turn.spans])
        session.conversation.begin(call.exchange_id, key, continues=call.continues)
        if turn.shown is None and call.answer is not None:
            turn.read_reply(session, wire)
        if turn.shown is not None:
            lineage.index_reply(
                session,
                call.exchange_id,
                (last, key, template_args),  # all have its tools, and no prefill
                turn.shown,
                tokens=call.sampled()[1].size,
                kind=call.asked.kind,
            )
        if call.delivery is not None:
            session.conversation.mark(call.exchange_id, call.delivery)
        if (question := call.question) is not None:
            new_from = len(last.messages) - len(question.request.messages)
            placement = replace(question.placement, new_from=new_from + question.placement.new_from)
            call.question = replace(question, request=last, canonical=whole, placement=placement)

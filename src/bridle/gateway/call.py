"""One model call from its request to its delivery, as a state machine.

A `Call` does not do anything: `exchange` moves it through its stages, `retries` attaches and
detaches the clients that wait for it, `relay` reads its reply. What only an unanswered call needs
(request, reply) is dropped once it is delivered; what its children need (prompt, sampled ids)
stays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from bridle.capture.records import RequestRecord
from bridle.dialects.base import ReplyHead, WireFormat
from bridle.errors import RequestError
from bridle.gateway.live import LiveReply
from bridle.prompting.canonical import Canonical
from bridle.prompting.conversation import Placement
from bridle.prompting.prompt import PromptIds
from bridle.prompting.turns import TurnCounts
from bridle.types import JSON, DeliveryState, FinishReason, Kind, ModelRequest, Reply, Usage, record

if TYPE_CHECKING:
    from bridle.gateway.models import Served
    from bridle.types import Ids


class Stage(StrEnum):
    """Progress of a call."""

    PLACED = "placed"
    """Its place in the conversation is known; the prompt is not made yet."""
    SAMPLING = "sampling"
    """The engine has the prompt."""
    COMMITTING = "committing"
    """The reply is whole and is being written to the store."""
    COMMITTED = "committed"
    """Durable: the reply may leave."""
    FAILED = "failed"
    """Nothing was captured; `Call.error` says why."""


NEXT: Final[dict[Stage, frozenset[Stage]]] = {
    Stage.PLACED: frozenset({Stage.SAMPLING, Stage.FAILED}),
    Stage.SAMPLING: frozenset({Stage.COMMITTING, Stage.FAILED}),
    Stage.COMMITTING: frozenset({Stage.COMMITTED, Stage.FAILED}),
    Stage.COMMITTED: frozenset(),
    Stage.FAILED: frozenset(),
}
"""The transitions there are."""


DELIVERED: Final = frozenset({DeliveryState.DELIVERED, DeliveryState.SUPERSEDED})
"""States of a reply that no retry can join: it arrived, or its client asked for a new sample."""


@record()
class Asked:
    """Data of a request outside of its body."""

    retry_count: int = 0
    """`x-stainless-retry-count`; above 0 = some try of this call went before, sampled or not."""
    idempotency_key: str | None = None
    """A digest of it, which is stored: the key itself may be long, or not be text."""
    user_agent: str | None = None
    """`None` = it named none, or the call was read back from the store."""
    kind: Kind = Kind.AGENT
    kind_rule: str | None = None
    """The rule that decided the kind; `None` = the default."""
    unknown_betas: tuple[str, ...] = ()
    """Names in its beta headers that nobody here knows."""


@record()
class Question:
    """Data that a call needs only until its reply is delivered."""

    request: ModelRequest
    wire: WireFormat
    canonical: Canonical
    placement: Placement
    template_args: Hashable
    served: Served
    """The engine and renderer that answer it."""
    key: bytes
    """`Call.question_key`."""
    parent: Call | None = None
    """The call that it continued when it was placed."""


@record()
class Answer:
    """A committed reply, ready to be dressed for whoever waits."""

    reply: Reply
    usage: Usage
    body: bytes
    """The reply's JSON in the dialect's non-streamed shape."""


class SpanList:
    """The content digests of a request's raw messages, kept as a delta on the request before.

    The whole list lives only at the tip of a conversation; when a child takes it over, the parent
    keeps its delta. A later branch builds the list again by walking back. Memory is thus linear in
    new messages (law 9).
    """

    __slots__ = ("_whole", "base", "kept", "new")

    def __init__(
        self, base: SpanList | None, digests: tuple[bytes, ...], kept: int | None = None
    ) -> None:
        """`kept` is how many of the digests are those of `base`; `None` = they are compared."""
        if kept is None:
            before = () if base is None else base._whole or base.whole()  # noqa: SLF001 - see below
            kept = common_prefix(before, digests)
        self.kept = kept
        self.base = base = base if self.kept else None
        self.new = digests[self.kept :]
        self._whole: tuple[bytes, ...] | None = digests
        if base is not None and base.base is not None:
            base._whole = None  # noqa: SLF001 - another instance of this class

    def grown(self, new: tuple[bytes, ...]) -> SpanList:
        """Return the list of digests of a request that has `new` messages behind these."""
        before = self._whole or self.whole()
        return SpanList(self, before + new, len(before))

    def whole(self) -> tuple[bytes, ...]:
        """Return the digests of all messages, in order."""
        chain: list[SpanList] = []
        node: SpanList | None = self
        while node is not None and node._whole is None:  # noqa: SLF001 - see above
            chain.append(node)
            node = node.base
        digests = () if node is None else node._whole or ()  # noqa: SLF001 - see above
        for span_list in reversed(chain):
            digests = (*digests[: span_list.kept], *span_list.new)
        return digests

    def record(self, head: bytes, base_id: str | None, tools: bytes | None) -> RequestRecord:
        """Return the request as capture stores it; `base_id` is the exchange whose messages it
        continues.
        """
        return RequestRecord(
            head=head,
            base=base_id if self.kept else None,
            kept_spans=self.kept,
            spans=self.new,
            tools=tools,
        )


def common_prefix(left: tuple[bytes, ...], right: tuple[bytes, ...]) -> int:
    """Return how many leading digests of both are equal."""
    if left == right[: (size := len(left))]:
        return size
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))


NO_SPANS: Final = SpanList(None, ())


@dataclass(slots=True, eq=False)
class Call:
    """One exchange in the making, and what its children need of it afterwards."""

    exchange_id: str
    session_id: str
    started_at: float
    """Unix time, seconds."""
    clock_start: float
    """The same moment on the loop's clock."""
    question_key: bytes
    """`bridle.gateway.registry.question_key`; stays when `question` is dropped."""
    other: str | None = None
    """Name of the engine that answers, where that is not the policy."""
    asked: Asked = field(default_factory=Asked)
    grammar: JSON | None = None
    """The grammar that constrains its samples; `None` = nothing."""
    reserved: int = 0
    """Tokens of the session's budget that it may still sample."""
    stage: Stage = Stage.PLACED
    question: Question | None = None
    """`None` once the reply is delivered, and for calls that were read back from the store."""
    answer: Answer | None = None
    error: RequestError | None = None
    """The error that its clients get; of a committed call, that its reply was cut."""
    head: ReplyHead = field(default_factory=lambda: ReplyHead("", "", 0))
    """The part that all forms of the reply share; its `prompt_tokens` are 0 until the prompt is
    made."""
    prompt: PromptIds | None = None
    output_ids: Ids | None = None
    finish: FinishReason = FinishReason.STOP
    images: Sequence[JSON] = ()
    """Those of its prompt, as its exchange's `media` has them."""
    reasoned: bool = False
    """True if its reply has reasoning."""
    turns: TurnCounts | None = None
    """The lineage of the turns that its prompt shows; `None` = not counted."""
    spans: SpanList = NO_SPANS
    """Digests of the request's raw messages; none before the call is admitted."""
    continues: str | None = None
    """The exchange whose messages it continues."""
    base_id: str | None = None
    """The exchange that `spans` is a delta on."""
    _began: asyncio.Event | None = None
    _done: asyncio.Event | None = None
    live: LiveReply | None = None
    """The reply as it leaves while it is sampled; `None` = it leaves whole."""
    first_token_s: float | None = None
    """From the request to the first sampled token, seconds; `None` = there is none yet."""
    leash: asyncio.Timeout | None = None
    """Around the sampling; see `cut`."""
    task: asyncio.Task[None] | None = None
    flight: Flight | None = None
    """The object that carries it outside of a task; `None` = it has a task, or is over."""
    # Who waits, and what became of the reply; kept by `retries`.
    clients: int = 0
    """Live connections that wait for the reply or receive it."""
    retry_count: int = 0
    """The retry count of the client that came last."""
    idempotency_keys: frozenset[str] = frozenset()
    joined_by: tuple[JSON, ...] = ()
    """The requests that joined it, as `bridle.capture.records.Delivery` keeps them."""
    delivery: DeliveryState | None = None
    """The last delivery record; `None` = none yet."""
    partly_written: bool = False
    """True if some client got a part of the reply and then went."""
    continued: bool = False
    """True if a later request shows this reply."""
    grace: asyncio.TimerHandle | None = None
    """Runs while nobody waits for an undelivered call."""

    def enter(self, stage: Stage) -> None:
        """Set the call's stage; only to one that `NEXT` allows."""
        assert stage in NEXT[self.stage], f"{self.exchange_id}: {self.stage} -> {stage}"
        self.stage = stage
        if stage is Stage.COMMITTED or stage is Stage.FAILED:
            if self._began is not None:
                self._began.set()
            if self._done is not None:
                self._done.set()
            if self.live is not None:
                self.live.wake()

    @property
    def done(self) -> asyncio.Event:
        """Event that is set when the call is committed or has failed."""
        if self._done is None:
            self._done = asyncio.Event()
            if not self.in_flight:
                self._done.set()
        return self._done

    @property
    def began(self) -> asyncio.Event:
        """Event that is set at the first sampled token, and when the call ends."""
        if self._began is None:
            self._began = asyncio.Event()
            if self.first_token_s is not None or not self.in_flight:
                self._began.set()
        return self._began

    def note_first_token(self) -> None:
        """Record the time of the first sampled token, and wake those who wait for it."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.clock_start
            if self._began is not None:
                self._began.set()

    def on_leash(self) -> asyncio.Timeout:
        """Return a timeout for the sampling of a streamed reply, by which `cut` can end it."""
        self.leash = asyncio.timeout(None)
        return self.leash

    def cut(self) -> bool:
        """End the sampling of a call of which a part was sent: the tokens so far are kept.

        `False` = no part was sent, or it is not being sampled; then nothing is done.
        """
        if self.leash is None or self.live is None or not self.live.partly_sent:
            return False
        if not self.leash.expired():
            self.leash.reschedule(asyncio.get_running_loop().time())
        return True

    @property
    def in_flight(self) -> bool:
        """Return whether the call is neither committed nor failed."""
        return self.stage is not Stage.COMMITTED and self.stage is not Stage.FAILED

    @property
    def delivered(self) -> bool:
        """Return whether no retry can join the reply: it arrived, or it was asked for anew."""
        return self.delivery in DELIVERED

    def posed(self) -> Question:
        """Return the call's question (parsed request and its place); only before the reply is
        delivered.
        """
        assert self.question is not None, f"{self.exchange_id} is already delivered"
        return self.question

    def answered(self) -> Answer:
        """Return the call's committed reply; only until it is delivered."""
        assert self.answer is not None, f"{self.exchange_id} has no reply to give"
        return self.answer

    def sampled(self) -> tuple[PromptIds, Ids]:
        """Return the prompt and the sampled ids of a committed call."""
        assert self.prompt is not None, f"{self.exchange_id} has no prompt"
        assert self.output_ids is not None, f"{self.exchange_id} has no output"
        return self.prompt, self.output_ids

    def release(self) -> None:
        """Free the call's request and reply, which nobody can ask for any more."""
        self.question = None
        self.answer = None
        self.live = None


class Flight(Protocol):
    """A call on its way outside of a task (`bridle.gateway.plain`)."""

    def hand_over(self) -> None:
        """Continue the call in a task, which also answers its client."""

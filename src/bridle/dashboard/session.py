"""A session as captured, for people: its conversation as a tree, each exchange, its traces.

Everything is derived when it is first shown and kept with the session. What cannot be read (a
damaged text, a request that its dialect refuses) is a sentence on the page, never an error of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.capture.records import Delivery, Exchange, SessionCapture
from bridle.dialects.openai_chat_write import chat_messages
from bridle.errors import BridleError, StoreError
from bridle.lifecycle.results import SessionResult
from bridle.prompting.texts import decoder_of
from bridle.trajectory.graph import Graph, Node, grow
from bridle.trajectory.masks import Marks, mark
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.trajectory.transcript import Transcript
from bridle.trajectory.tree import branches, excerpt, explain_fork, speakers
from bridle.types import JSON, Kind

if TYPE_CHECKING:
    from bridle.types import Ids

EXCERPT = 160
"""Characters of a reply that a row of the tree shows."""


@dataclass(frozen=True, slots=True)
class Row:
    """An exchange in the tree."""

    exchange: Exchange
    depth: int
    """0 = the main line of a conversation."""
    fate: str
    """`trained`, or why its tokens do not train."""
    rejected: bool
    """Whether the harness read it and did not go on from it."""
    new: int
    """Ids of its prompt that no earlier exchange brought."""
    speakers: str
    """Who spoke in what is new."""
    said: str
    """The beginning of the reply."""
    delivery: Delivery | None
    at: float
    """Seconds after the session was opened."""

    @property
    def is_root(self) -> bool:
        """Return whether the prompt extends no other exchange."""
        return self.exchange.parent_id is None or self.exchange.kept == 0


@dataclass(frozen=True, slots=True)
class Lost:
    """An exchange without a place in the tree, or one that cannot be read."""

    exchange_id: str
    why: str
    sampled: int


@dataclass(frozen=True, slots=True)
class Detail:
    """An exchange with its messages."""

    row: Row
    earlier: Sequence[JSON]
    """Messages of the request that an earlier request had too; OpenAI Chat's form."""
    added: Sequence[JSON]
    """Those that are new with it."""
    reply: Sequence[JSON]
    tools: Sequence[JSON]
    missing: str | None
    """Why messages cannot be read; `None` = they can."""
    fork: Sequence[str]
    """Why its prompt does not extend the exchange that it continues; empty where it does."""
    traces: Sequence[tuple[int, int]]
    """(Number of a trace, position of its sampled tokens in it) where it is in one."""
    before: str | None
    """The exchange before it, in the order of capture."""
    after: str | None


class Session:
    """Captured session with its result."""

    def __init__(self, capture: SessionCapture, result: SessionResult, folder: Path) -> None:
        self.capture = capture
        self.result = result
        self.folder = folder
        """Of its run."""
        self.lock = threading.RLock()
        """To be held while anything of it is read: texts are unpacked when they are asked for."""

    @property
    def trajectory(self) -> Trajectory:
        """Return the trajectory that the session's own builder built."""
        return self.result.trajectory

    @cached_property
    def decode(self) -> Callable[[Ids], str] | None:
        """Ids -> text; `None` where the session's tokenizer is not at hand any more."""
        return decoder_of(self.capture.session.metadata)

    @cached_property
    def graph(self) -> Graph:
        return grow(self.capture.session.session_id, self.capture.exchanges)

    @cached_property
    def marks(self) -> Marks:
        """Return the mask reason of each exchange's tokens."""
        train = [Kind(kind) for kind in self.trajectory.metadata.get("train") or ()]
        masks = self.capture.session.metadata.get("rejected") == "mask"
        return mark(
            self.graph,
            self.capture.exchanges,
            self.capture.deliveries,
            train,
            mask_rejected=masks,
        )

    @cached_property
    def transcript(self) -> Transcript:
        return Transcript(self.capture.exchanges, self.capture.bodies)

    @cached_property
    def _order(self) -> list[tuple[int, Node]]:
        return branches(self.graph)

    @property
    def size(self) -> int:
        return len(self._order)

    def place(self, exchange_id: str) -> int | None:
        """Return the index of an exchange in the tree; `None` = it is not in the tree."""
        found = (n for n, (_, node) in enumerate(self._order) if _id(node) == exchange_id)
        return next(found, None)

    def rows(self, start: int, count: int) -> list[Row]:
        """A page of the tree, depth first."""
        return [self._row(depth, node) for depth, node in self._order[start : start + count]]

    @property
    def lost(self) -> list[Lost]:
        """Return the exchanges that are not in the tree, with the reason."""
        torn = [Lost(one.exchange_id, why, len(one.output_ids)) for one, why in self.graph.lost]
        return torn + [
            Lost(row.exchange_id, f"damaged: {row.why}", row.sampled)
            for row in self.capture.damaged
        ]

    def _row(self, depth: int, node: Node) -> Row:
        exchange = node.exchange
        reason = self.marks.by_exchange[exchange.exchange_id]
        return Row(
            exchange=exchange,
            depth=depth,
            fate=reason.key,
            rejected=exchange.exchange_id in self.marks.rejected,
            new=node.prompt_length - node.kept,
            speakers=speakers(exchange, self.transcript),
            said=excerpt(exchange, self.transcript, EXCERPT),
            delivery=self.capture.deliveries.get(exchange.exchange_id),
            at=exchange.started_at - self.capture.session.opened_at,
        )

    def detail(self, exchange_id: str) -> Detail | None:
        """An exchange with its messages; `None` = the tree has none of that id."""
        place = self.place(exchange_id)
        if place is None:
            return None
        depth, node = self._order[place]
        exchange = node.exchange
        earlier: list[JSON] = []
        added: list[JSON] = []
        reply: list[JSON] = []
        tools: list[JSON] = []
        missing = None
        try:
            messages = self.transcript.request(exchange).messages
            new = self.transcript.added(exchange)
            earlier = chat_messages(messages[: len(messages) - len(new)])
            added = chat_messages(new)
            tools = self.transcript.tools(exchange) or []
            reply = chat_messages(self.transcript.reply(exchange))
        except StoreError as error:
            missing = str(error)
        ids = [one.exchange_id for one in self.capture.exchanges]
        at = ids.index(exchange_id)
        return Detail(
            row=self._row(depth, node),
            earlier=earlier,
            added=added,
            reply=reply,
            tools=tools,
            missing=missing,
            fork=self._fork(exchange),
            traces=self._traces_with(exchange),
            before=ids[at - 1] if at else None,
            after=ids[at + 1] if at + 1 < len(ids) else None,
        )

    def _fork(self, exchange: Exchange) -> list[str]:
        """Why a conversation went on and its ids did not."""
        if exchange.continues is None or exchange.parent_id is not None:
            return []
        try:
            return explain_fork(self.capture, exchange.continues, exchange.exchange_id, self.decode)
        except BridleError as error:
            return [str(error)]

    def _traces_with(self, exchange: Exchange) -> list[tuple[int, int]]:
        found = []
        for number, trace in enumerate(self.trajectory.traces):
            for name, end in zip(trace.exchange_ids, trace.turn_ends, strict=False):
                if name == exchange.exchange_id:
                    start = max(0, end - len(exchange.output_ids))
                    found.append((number, len(trace.prompt_ids) + start))
        return found

    def raw(self, exchange_id: str, part: str) -> bytes | None:
        """The bytes of an exchange's `request` or `reply`; `None` = there are none.

        Raises `StoreError` for texts that are damaged.
        """
        found = next((e for e in self.capture.exchanges if e.exchange_id == exchange_id), None)
        if found is None:
            return None
        if part == "reply":
            return found.reply
        return self.transcript.body(found)


def composition(trace: Trace) -> dict[str, int]:
    """Count a trace's tokens: prompt, trained, and masked by reason."""
    counts = {"prompt": len(trace.prompt_ids)}
    for reason in MaskReason:
        if count := int((trace.reasons == reason).sum()):
            counts[reason.key] = counts.get(reason.key, 0) + count
    return counts


def _id(node: Node) -> str:
    return node.exchange.exchange_id

"""A captured session in detail: its conversation tree, its exchanges, the tokens of its traces.

Views are computed when they are first shown and kept with the session. Data that cannot be read (a
damaged text, a request that its dialect refuses) become a sentence on the page, not an error.

Tokens are shown in pages of at most `PAGE`, so that a browser can show a trace of any length. The
strip above them shows the whole trace in `CELLS` cells, each a link to its page. Messages are shown
in parts (`said`), and of a long text its beginning (`cut`).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import orjson

from bridle.capture.records import Delivery, Exchange, SessionCapture
from bridle.dialects.openai_chat_write import chat_messages
from bridle.errors import BridleError, StoreError
from bridle.gateway.replay import fork_points
from bridle.node.results import SessionResult
from bridle.prompting.texts import decoder_of
from bridle.trajectory.builders import Marks, mark
from bridle.trajectory.graph import ExchangeNode, Graph, grow
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.trajectory.transcript import Transcript, branches, excerpt, explain_fork, speakers
from bridle.types import JSON, Ids, Kind

EXCERPT = 160
"""Characters of a reply in a row of the tree."""


@dataclass(frozen=True, slots=True)
class TreeRow:
    """An exchange in the conversation tree."""

    exchange: Exchange
    depth: int
    """0 = the main line of a conversation."""
    fate: str
    """`trained`, or why its tokens do not train."""
    rejected: bool
    """True if the harness received the reply and did not continue from it."""
    new: int
    """Prompt ids that no earlier exchange had."""
    speakers: str
    """Roles of the new messages."""
    said: str
    """The beginning of the reply."""
    delivery: Delivery | None
    at: float
    """Seconds after the session was opened."""
    replies: int | None
    """Replies that a fork behind it begins with; `None` = no fork can begin there."""

    @property
    def is_root(self) -> bool:
        """Return whether the exchange's prompt extends no other exchange."""
        return self.exchange.parent_id is None or self.exchange.kept == 0


@dataclass(frozen=True, slots=True)
class UnplacedExchange:
    """An exchange that is not in the tree, or cannot be read."""

    exchange_id: str
    why: str
    sampled: int


@dataclass(frozen=True, slots=True)
class ExchangeDetail:
    """An exchange with its messages."""

    row: TreeRow
    earlier: Sequence[JSON]
    """Messages that an earlier request had too, in the form of OpenAI Chat."""
    added: Sequence[JSON]
    """Messages that are new in this request."""
    reply: Sequence[JSON]
    tools: Sequence[JSON]
    missing: str | None
    """Reason why messages cannot be read; `None` = they can."""
    fork: Sequence[str]
    """Reason why its prompt does not extend the exchange that it continues; empty where it does."""
    traces: Sequence[tuple[int, int]]
    """(Number of a trace, position of its sampled tokens in it) where it is in one."""
    before: str | None
    """The exchange before it, in the order of capture."""
    after: str | None


class CapturedSession:
    """A session's capture and result, with the views that pages show."""

    def __init__(self, capture: SessionCapture, result: SessionResult, folder: Path) -> None:
        self.capture = capture
        self.result = result
        self.folder = folder
        """The run folder."""
        self.lock = threading.RLock()
        """To be held while a page is rendered: texts are unpacked on access."""

    @property
    def trajectory(self) -> Trajectory:
        """Return the session's trajectory, built by the session's own builder."""
        return self.result.trajectory

    @cached_property
    def decode(self) -> Callable[[Ids], str] | None:
        """Return a function that decodes the session's token ids; `None` = its tokenizer is
        missing.
        """
        return decoder_of(self.capture.session.metadata)

    @cached_property
    def graph(self) -> Graph:
        return grow(self.capture.session.session_id, self.capture.exchanges)

    @cached_property
    def marks(self) -> Marks:
        """Return, for each exchange, why its tokens train or do not."""
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
    def fork_points(self) -> dict[str, int]:
        """Return the exchanges after which a fork can begin, each with the number of replies up to
        it.
        """
        return fork_points(self.capture)

    def replies(self) -> dict[int, TreeRow]:
        """Return the replies after which a fork can begin, by their number."""
        rows = [
            self._row(depth, node) for depth, node in self._order if _id(node) in self.fork_points
        ]
        return {row.replies: row for row in rows if row.replies is not None}

    @cached_property
    def transcript(self) -> Transcript:
        return Transcript(self.capture.exchanges, self.capture.bodies)

    @cached_property
    def _order(self) -> list[tuple[int, ExchangeNode]]:
        return branches(self.graph)

    @property
    def size(self) -> int:
        """Number of exchanges in the tree."""
        return len(self._order)

    def place(self, exchange_id: str) -> int | None:
        """Return the index of an exchange in the tree; `None` = it is not in the tree."""
        found = (n for n, (_, node) in enumerate(self._order) if _id(node) == exchange_id)
        return next(found, None)

    def rows(self, start: int, count: int) -> list[TreeRow]:
        """Return a page of the tree, depth first."""
        return [self._row(depth, node) for depth, node in self._order[start : start + count]]

    @property
    def lost(self) -> list[UnplacedExchange]:
        """Return the exchanges that are in no conversation tree, with the reason."""
        torn = [
            UnplacedExchange(one.exchange_id, why, len(one.output_ids))
            for one, why in self.graph.lost
        ]
        return torn + [
            UnplacedExchange(row.exchange_id, f"damaged: {row.why}", row.sampled)
            for row in self.capture.damaged
        ]

    def _row(self, depth: int, node: ExchangeNode) -> TreeRow:
        exchange = node.exchange
        reason = self.marks.by_exchange[exchange.exchange_id]
        return TreeRow(
            exchange=exchange,
            depth=depth,
            fate=reason.key,
            rejected=exchange.exchange_id in self.marks.rejected,
            new=node.prompt_length - node.kept,
            speakers=speakers(exchange, self.transcript),
            said=excerpt(exchange, self.transcript, EXCERPT),
            delivery=self.capture.deliveries.get(exchange.exchange_id),
            at=exchange.started_at - self.capture.session.opened_at,
            replies=self.fork_points.get(exchange.exchange_id),
        )

    def detail(self, exchange_id: str) -> ExchangeDetail | None:
        """Return an exchange with its messages; `None` = the tree has none of that id."""
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
        return ExchangeDetail(
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
        """Explain why the prompt does not extend the exchange that it continues."""
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
        """Return the bytes of the request or reply (`part`) of an exchange; `None` = there are
        none.

        Raises `StoreError` for damaged texts.
        """
        found = next((e for e in self.capture.exchanges if e.exchange_id == exchange_id), None)
        if found is None:
            return None
        if part == "reply":
            return found.reply
        return self.transcript.body(found)


def composition(trace: Trace) -> dict[str, int]:
    """Return how many tokens of a trace are prompt, trained, and masked for each reason."""
    counts = {"prompt": len(trace.prompt_ids)}
    for reason in MaskReason:
        if count := int((trace.reasons == reason).sum()):
            counts[reason.key] = counts.get(reason.key, 0) + count
    return counts


def _id(node: ExchangeNode) -> str:
    return node.exchange.exchange_id


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first difference between two conversations."""

    equal: int
    """Number of equal messages before it."""
    messages: tuple[JSON | None, JSON | None]
    """The first messages that differ; `None` = this conversation has ended."""
    before: str
    """The end of the text that both messages begin with."""
    texts: tuple[str, str]
    """The texts of both messages from the first different character on."""

    @property
    def is_equal(self) -> bool:
        return self.messages == (None, None)


def longest(trajectory: Trajectory) -> int:
    """Return the number of the trace with the most exchanges; 0 without a trace."""
    sizes = [len(trace.exchange_ids) for trace in trajectory.traces]
    return max(range(len(sizes)), key=sizes.__getitem__, default=0)


def conversation_of(trajectory: Trajectory | None) -> list[JSON]:
    """Return the messages of the longest trace; empty without a trace."""
    if trajectory is None or not trajectory.traces:
        return []
    trace = trajectory.traces[longest(trajectory)]
    return [*trace.prompt_messages, *trace.response_messages]


def compare(one: Sequence[JSON], two: Sequence[JSON]) -> Comparison:
    """Return the first message at which the role, text or tool calls of two conversations differ.

    Ids of tool calls do not count: they are random.
    """
    pairs = list(itertools.zip_longest(one, two))
    texts = [(_comparable(left), _comparable(right)) for left, right in pairs]
    equal = next((n for n, (left, right) in enumerate(texts) if left != right), len(pairs))
    if equal == len(pairs):
        return Comparison(equal, (None, None), "", ("", ""))
    left, right = texts[equal]
    differing = (n for n, (x, y) in enumerate(zip(left, right, strict=False)) if x != y)
    common = next(differing, min(len(left), len(right)))
    before = left[max(0, common - COMPARED) : common]
    return Comparison(equal, pairs[equal], before, (left[common:], right[common:]))


def _comparable(message: JSON | None) -> str:
    if message is None:
        return ""
    shown = said(message)
    calls = (f"{name}({arguments})" for name, _, arguments in shown.calls)
    return "\n".join([shown.role, shown.reasoning, *(text for _, text in shown.parts), *calls])


COMPARED = 160
"""Characters of the equal text that are shown before a difference."""

PAGE = 1000
"""Tokens per page."""

CELLS = 200
"""Cells of the strip."""

LEVELS = (-0.105, -0.693, -2.303, -4.605)
"""Logprobs at which the colour of a trained token changes: p = 0.9, 0.5, 0.1 and 0.01."""

WHITE = {"\n": "⏎\n", "\t": "⇥", "\r": "␍", "": "∅"}
"""Replacements of invisible characters."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token as a page shows it."""

    text: str
    style: str
    """CSS classes."""
    title: str
    """Tooltip with all facts."""
    ends: str | None = None
    """Id of the exchange whose sampled tokens end here."""


@dataclass(frozen=True, slots=True)
class StripCell:
    """A cell of the strip above the tokens."""

    start: int
    style: str
    here: bool
    """True if any of its tokens are on the page."""

    @property
    def page(self) -> int:
        """Return the start of the page that contains the cell's first token."""
        return self.start // PAGE * PAGE


@dataclass(frozen=True, slots=True)
class TokenPage:
    """A page of a trace's tokens."""

    start: int
    end: int
    total: int
    tokens: Sequence[ShownToken]
    cells: Sequence[StripCell]
    has_text: bool
    """True if ids could be decoded."""

    @property
    def before(self) -> int | None:
        """Return the first token of the previous page; `None` = this is the first page."""
        return max(0, self.start - PAGE) if self.start else None

    @property
    def after(self) -> int | None:
        """Return the first token of the next page; `None` = this is the last page."""
        return self.end if self.end < self.total else None

    @property
    def last(self) -> int:
        """Return the first token of the last page."""
        return max(0, (self.total - 1) // PAGE * PAGE)


def token_page(trace: Trace, at: int, decode: Callable[[Ids], str] | None) -> TokenPage:
    """Return the page of a trace's tokens that begins at token `at`, counted from the first prompt
    token.
    """
    ids = trace.ids
    total, prompt = len(ids), len(trace.prompt_ids)
    start = min(max(0, at), max(0, total - 1))
    end = min(total, start + PAGE)
    ends = {
        prompt + end_ - 1: name
        for name, end_ in zip(trace.exchange_ids, trace.turn_ends, strict=False)
    }
    tokens = [_token(trace, ids, place, decode, ends.get(place)) for place in range(start, end)]
    return TokenPage(start, end, total, tokens, _cells(trace, start, end), decode is not None)


def _token(
    trace: Trace, ids: Ids, place: int, decode: Callable[[Ids], str] | None, ends: str | None
) -> ShownToken:
    text = str(ids[place]) if decode is None else decode(ids[place : place + 1])
    index = place - len(trace.prompt_ids)
    facts = [f"#{place}", f"id {ids[place]}"]
    if decode is not None:
        facts.append(repr(text))
    if index < 0:
        style, why = "prompt", "prompt: before the first sampled token"
    else:
        reason = MaskReason(int(trace.reasons[index]))
        style, why = _style(trace, index, reason)
        if trace.versions[index] >= 0:
            facts.append(f"policy version {trace.versions[index]}")
        if trace.token_rewards is not None:
            facts.append(f"reward {trace.token_rewards[index]:g}")
    shown = f"{text} " if decode is None else "".join(WHITE.get(one, one) for one in text) or "∅"
    return ShownToken(shown, style, " · ".join([*facts, why]), ends)


def _style(trace: Trace, index: int, reason: MaskReason) -> tuple[str, str]:
    if reason is MaskReason.TRAINED:
        logprob = float(trace.response_logprobs[index])
        level = sum(logprob < limit for limit in LEVELS)
        return f"on l{level}", f"trained, logprob {logprob:.4f} (p {math.exp(logprob):.3f})"
    if reason is MaskReason.PROMPT:
        return "prompt", "given to the model"
    return "off", f"sampled, not trained: {reason.key}"


def _cells(trace: Trace, start: int, end: int) -> list[StripCell]:
    """Build the strip; each cell has the style of most of its tokens."""
    prompt = np.zeros(len(trace.prompt_ids), dtype=np.uint8)
    kinds = np.full(len(trace.reasons), 2, dtype=np.uint8)
    kinds[trace.reasons == MaskReason.TRAINED] = 1
    kinds[trace.reasons == MaskReason.PROMPT] = 0
    kinds = np.concatenate([prompt, kinds])
    total = len(kinds)
    count = min(CELLS, total)
    edges = [round(n * total / count) for n in range(count + 1)] if count else [0]
    return [
        StripCell(
            left,
            ("prompt", "on", "off")[int(np.bincount(kinds[left:right], minlength=3).argmax())],
            left < end and right > start,
        )
        for left, right in itertools.pairwise(edges)
    ]


LONGEST = 20_000
"""Most characters of a text on a page."""


def cut(text: object, most: int = LONGEST) -> str:
    """Truncate a text to `most` characters and say how many were left out."""
    whole = str(text)
    left = len(whole) - most
    return whole if left <= 0 else f"{whole[:most]}\n… {left} characters more"


def pretty(value: object) -> str:
    """Format a value, or a string that holds JSON, as indented JSON; other strings stay."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError:
            return str(value)
    try:
        return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
    except (orjson.JSONEncodeError, RecursionError):
        return str(value)


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message in the form of OpenAI Chat; missing fields are empty."""

    role: str
    name: str
    answers: str
    """Id of the tool call that it answers."""
    reasoning: str
    parts: Sequence[tuple[str, str]]
    """See `parts`."""
    calls: Sequence[tuple[str, str, str]]
    """(Name, id, arguments) of each tool call."""


def said(message: Mapping[str, object]) -> ShownMessage:
    """Return a message in the form that the page shows: role, reasoning, parts and tool calls."""

    def text(key: str) -> str:
        return str(message.get(key) or "")

    listed = message.get("tool_calls")
    return ShownMessage(
        role=text("role") or "unknown",
        name=text("name"),
        answers=text("tool_call_id"),
        reasoning=text("reasoning_content"),
        parts=parts(message.get("content")),
        calls=[_call(one) for one in listed] if isinstance(listed, list) else [],
    )


def _call(call: object) -> tuple[str, str, str]:
    known = call if isinstance(call, dict) else {}
    function = known.get("function")
    function = function if isinstance(function, dict) else {}
    return (
        str(function.get("name") or "?"),
        str(known.get("id") or ""),
        str(function.get("arguments") or ""),
    )


def parts(content: object) -> list[tuple[str, str]]:
    """Split a message's content into `(kind, text)`: `text`, `image` (a data URL) or `other`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [("text", content)] if content else []
    return (
        [_part(one) for one in content] if isinstance(content, list) else [("other", str(content))]
    )


def _part(part: object) -> tuple[str, str]:
    if isinstance(part, dict) and part.get("type") == "text":
        return "text", str(part.get("text", ""))
    if isinstance(part, dict) and part.get("type") == "image_url":
        url = str((part.get("image_url") or {}).get("url", ""))
        shown = ("data:image/png;", "data:image/jpeg;", "data:image/gif;", "data:image/webp;")
        return ("image", url) if url.startswith(shown) else ("other", f"image at {url[:200]}")
    return "other", cut(pretty(part), 500)

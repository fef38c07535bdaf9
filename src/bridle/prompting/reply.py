"""Sampled ids as a reply: what a parser of the `renderers` package found, with nothing lost.

Arguments come back as the very text that was sampled where it can be found in the call's own block.
A block with a readable name and end is a call even if its arguments are no JSON: they leave as they
were written. Any other block that does not parse stays in the text; text that a parser drops is
counted. An odd sample never raises: at worst all of it is text.

`LiveReader` reads a reply while it is sampled: what may be shown already, because no later token
can undo it. What it gives out is always a beginning of what `parse_reply` will say at the end. So
whatever may still change its meaning waits: bytes of a character that is not complete, white space
at the end of a part, the beginning of a stop string or of a spelled-out marker, and everything
behind a token that stands where this reader does not expect it. Calls are given out one by one,
when the token that closes them has been sampled.

`count_thoughts` counts the reasoning tokens of a reply for usage numbers: what stands between the
family's own opening and closing tokens, else the shortest run of ids whose text holds the
reasoning.

`PlainReplies` reads replies that are nothing but text without the family's parser. A parser looks
for reasoning and calls by control tokens, and at the end of the prompt for reasoning that it opens.
Where a reply holds no control token and the prompt ends as known, none of that is there; where it
holds some, the parser need not look at such a prompt. That is used for the families which tests
compare (`PLAIN_FAMILIES`), and each end is tried first, with texts that a parser may take for more
than text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from typing import Any

from bridle.errors import RenderError, boundary
from bridle.prompting.family import Parsed, ParsedCall, Parser, ReplyMarks
from bridle.prompting.tokenizer import PromptTokenizer
from bridle.types import JSON, FinishReason, Reply, ToolCall

_PARSED = frozenset({"ok", "unknown_tool", "invalid_json"})
"""Statuses of calls that have a name and arguments; `invalid_json` also marks XML arguments that
are plain strings, and those have both."""

_UNPARSED = frozenset({"invalid_json", "unclosed_block"})
"""Statuses of calls whose parser did not get as far as the name."""

_ARGUMENT_KEYS = ("arguments", "parameters")

_DECODER = json.JSONDecoder()
_USUAL = re.compile(
    r"""[ \t\n\r]*\{[ \t\n\r]*"name"[ \t\n\r]*:[ \t\n\r]*"[^"\\\x00-\x1f]*"[ \t\n\r]*,"""
    r"""[ \t\n\r]*"(?:arguments|parameters)"[ \t\n\r]*:[ \t\n\r]*"""
)
"""A JSON call up to its arguments, as nearly all are written."""

_BROKEN = re.compile(
    r"""\{\s*["']name["']\s*:\s*(["'])([^"'\\]+)\1\s*,\s*"""
    r"""["'](?:arguments|parameters)["']\s*:\s*(.*)""",
    re.DOTALL,
)
"""Name and arguments in the text of a JSON call that no JSON parser reads."""


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=[^>]+>.*?</parameter>", re.DOTALL)
"""An XML call, and one whole parameter of it."""


_PARSING = boundary(RenderError, "parsing")


def parse_reply(  # noqa: PLR0913 - one fact of the reply each
    family: Parser,
    tokenizer: PromptTokenizer,
    output_ids: list[int],
    *,
    tools: list[JSON] | None,
    prompt_tail: list[int],
    finish: FinishReason,
    stop_text: str | None,
    new_id: Callable[[], str] | None,
    bare: bool = False,
) -> Reply:
    """Parse one sampled reply; never raises.

    Args:
        family: The parser of the model family.
        tokenizer: Decodes the ids.
        output_ids: As sampled, end token included.
        tools: The request's tools; XML formats need their schemas.
        prompt_tail: The prompt's last ids: they say whether reasoning is open already.
        finish: Why sampling ended.
        stop_text: The stop string that ended it; it and what follows is not shown.
        new_id: Makes the ids of calls; `None` = they stay in the text as they were sampled.
        bare: A call of this family is a JSON object without any markup, and the whole reply.
    """
    stop_ids = set(family.get_stop_token_ids())
    end = len(output_ids)
    for place, id_ in enumerate(output_ids):
        if id_ in stop_ids:
            end = place
            break
    try:
        with _PARSING:
            parsed = family.parse_response(output_ids, tools=tools, prompt_ids=prompt_tail)
    except RenderError:  # e.g. nesting that no JSON parser takes
        text = tokenizer.decode(output_ids[:end])
        return Reply(_until(text, stop_text), None, (), finish, stop_text=stop_text)
    if not (parsed.tool_calls or parsed.reasoning_content or stop_text or bare):
        unseen = len(output_ids[end + 1 :])
        return Reply(parsed.content.lstrip(), None, (), finish, tokens_unseen=unseen)
    spans = [call.token_span for call in parsed.tool_calls if call.token_span is not None]
    # White space before a part means nothing, and some families keep it only where a part is open.
    ended = finish is FinishReason.STOP and stop_text is None
    read = [_read(call, ended=ended) for call in parsed.tool_calls]
    left = [
        call
        for call, found in zip(parsed.tool_calls, read, strict=True)
        if new_id is None or found is None
    ]
    content = _content(tokenizer, parsed.content, left, output_ids[:end]).lstrip()
    if bare and ended and not read and (found := _bare_call(content)) is not None:
        read, content = [found], content if new_id is None else ""
    reasoning = (parsed.reasoning_content or "").strip() or None
    if stop_text and stop_text not in content and reasoning:
        reasoning = _until(reasoning, stop_text) or None
    return Reply(
        content=_until(content, stop_text),
        reasoning=reasoning,
        tool_calls=() if new_id is None else tuple(_calls(read, new_id)),
        finish_reason=finish,
        tokens_unseen=_unseen(tokenizer, spans, output_ids, end),
        stop_text=stop_text,
        reasoning_tokens=count_thoughts(tokenizer, output_ids[:end], reasoning),
        calls_unread=read.count(None) if finish is FinishReason.STOP else 0,
        calls_as_text=sum(found is not None for found in read) if new_id is None else 0,
    )


def read_calls(
    family: Parser, region: list[int], *, tools: list[JSON] | None, new_id: Callable[[], str]
) -> list[ToolCall]:
    """Return the complete tool calls in ids that begin where calls begin; none where the parser
    fails.
    """
    try:
        with boundary(RenderError, "parsing"):
            parsed = family.parse_response(region, tools=tools, prompt_ids=[])
    except RenderError:
        return []
    return list(_calls([_read(call, ended=False) for call in parsed.tool_calls], new_id))


def argument_text(raw: str, arguments: object) -> str:
    """Return a call's arguments as they were sampled (their text inside `raw`), else as JSON of the
    parsed value.
    """
    if isinstance(arguments, str):
        return arguments
    if (found := _USUAL.match(raw)) is not None:
        try:
            value, end = _DECODER.raw_decode(raw, found.end())
        except (ValueError, RecursionError):
            value, end = None, 0
        if end and value == arguments and raw[end:].strip(" \t\n\r") == "}":
            return raw[found.end() : end]
    for key in _ARGUMENT_KEYS:
        held = member(raw, key)
        if held is not None and held[1] == arguments:
            return held[0]
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def member(raw: str, key: str) -> tuple[str, Any] | None:
    """Return a member of the JSON object in the text `raw`: its exact text and its value.

    `None` = `raw` is no such object or has no such member.
    """
    decoder = json.JSONDecoder()
    found: tuple[str, Any] | None = None
    try:
        at = _skip(raw, 0)
        if raw[at] != "{":
            return None
        at = _skip(raw, at + 1)
        while raw[at] != "}":
            name, at = decoder.raw_decode(raw, at)
            at = _skip(raw, _skip(raw, at) + 1)  # the colon
            value, end = decoder.raw_decode(raw, at)
            if name == key:
                found = raw[at:end], value
            at = _skip(raw, end)
            at = _skip(raw, at + 1) if raw[at] == "," else at
    except (ValueError, IndexError, RecursionError):
        return None
    return found


def _calls(read: Sequence[tuple[str, str] | None], new_id: Callable[[], str]) -> Iterator[ToolCall]:
    return (ToolCall(new_id(), *found) for found in read if found is not None)


def _read(call: ParsedCall, *, ended: bool) -> tuple[str, str] | None:
    """Return name and arguments of a call; `None` = its name or its end cannot be read.

    `ended`: the model ended its turn, and with it a block that it left open.
    """
    status = call.status.value
    if status == "unclosed_block" and not ended:
        return None
    if (opened := _open_xml(call.raw, read=bool(call.name))) is not None:
        return opened
    if isinstance(call.name, str) and call.name:
        if status in _PARSED or status == "unclosed_block":
            return call.name, argument_text(call.raw, call.arguments)
        raw = call.raw.strip()
        if status == "malformed_structure" and raw.startswith(call.name):
            return call.name, raw.removeprefix(call.name).strip()
        return None
    broken = _BROKEN.match(call.raw.strip()) if status in _UNPARSED else None
    return None if broken is None else (broken[2], _broken_arguments(broken[3]))


def _bare_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a reply that is one broken JSON call; `None` = it is text."""
    broken = _BROKEN.fullmatch(text.strip())
    if broken is None or not broken[3].endswith("}"):
        return None
    arguments = _broken_arguments(broken[3])
    whole = broken[3].removesuffix("}").rstrip() == arguments
    return (broken[2], arguments) if whole else None


def _open_xml(raw: str, *, read: bool) -> tuple[str, str] | None:
    """Return name and raw arguments of an XML call that its parser did not `read`, or not whole.

    `None` = it is no such call.
    """
    if (function := _FUNCTION.fullmatch(raw.strip())) is None:
        return None
    name, body = function[1], function[2].strip()
    body = body.removesuffix("</function>").rstrip()
    outside = _PARAMETER.sub("", body).strip()
    opens = not read or "<parameter=" in outside or (outside and outside == body)
    return (name, body) if opens else None


def _broken_arguments(text: str) -> str:
    """Return the arguments of a JSON call, from their first character to the end of the call."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        if text[_skip(text, end) :][:1] in ("", ",", "}"):
            return text[:end]
    except (ValueError, RecursionError):
        pass
    return text.strip().removesuffix("}").rstrip()


def _content(
    tokenizer: PromptTokenizer, text: str, left: Sequence[ParsedCall], ids: Sequence[int]
) -> str:
    """Return the visible text, with the blocks of calls that are none put back behind it."""
    pieces = [text]
    for call in left:
        span = call.token_span
        block = call.raw if span is None else tokenizer.decode(ids[span[0] : span[1]])
        pieces.append(block.strip())
    return "\n".join(piece for piece in pieces if piece)


def _unseen(
    tokenizer: PromptTokenizer, spans: list[tuple[int, int]], ids: Sequence[int], end: int
) -> int:
    """Count the ids that no part of the reply shows: words beside calls, and all after the end."""
    unseen = max(0, len(ids) - end - 1)
    ends = [*(span[0] for span in spans[1:]), end]
    for (_, left), right in zip(spans, ends if spans else (), strict=True):
        between = [id_ for id_ in ids[left:right] if id_ not in tokenizer.control_ids]
        if between and tokenizer.decode(between).strip():
            unseen += len(between)
    return unseen


def _until(text: str, stop_text: str | None) -> str:
    return text.partition(stop_text)[0] if stop_text else text


def _skip(text: str, at: int) -> int:
    return int(WHITESPACE.match(text, at).end())


_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Tokens that open and close reasoning, in the families that have such."""


def count_thoughts(tokenizer: PromptTokenizer, ids: Sequence[int], reasoning: str | None) -> int:
    """Return how many of the sampled `ids` are `reasoning`, without its opening and closing tokens.

    `ids` end before the turn's end token; `reasoning` is the text that a parser found in them.
    """
    text = (reasoning or "").strip()
    if not text:
        return 0
    for opener, closer in _PAIRS:
        close, begin = tokenizer.added.get(closer), tokenizer.added.get(opener)
        if close is not None:
            end = ids.index(close) if close in ids else len(ids)
            return end - (ids.index(begin) + 1 if begin in ids[:end] else 0)
    return _run_of(tokenizer, ids, text)


def _run_of(tokenizer: PromptTokenizer, ids: Sequence[int], text: str) -> int:
    """Return the length of the shortest run of `ids` whose text holds `text`; that of `text` alone
    if there is none.
    """

    def held(start: int, end: int) -> bool:
        return text in tokenizer.decode(ids[start:end])

    if not held(0, len(ids)):
        return len(tokenizer.encode(text))
    end = bisect_left(range(len(ids) + 1), True, key=lambda count: held(0, count))  # noqa: FBT003 - a value
    start = bisect_left(range(end + 1), True, key=lambda first: not held(first, end))  # noqa: FBT003 - a value
    return end - (start - 1)


PLAIN_FAMILIES = frozenset(
    {"gemma4", "deepseek-v3", "inkling", "kimi-k2", "prime-qwen3", "qwen3", "qwen3-vl"}
)
"""Families whose calls are no text. For any other, also one of a later `renderers`, the parser is
asked, because no list of texts tells that it takes none for a call."""

End = tuple[int, ...]
_Outcome = tuple[str, str, list[object]]
"""Content, reasoning and calls."""
Strip = Callable[[str], str]

_CALL = '{"name": "look", "arguments": {"path": "a.txt"}}'
_TEXTS = (
    *("I did it.", " \n\t\u2003two  words \r\n\x0b", "\n", "0", "null", "\u00e9\U0001f642"),
    *("<think>hm</think>ok", "hm</think>ok", "<think>hm", "[THINK]hm[/THINK]ok", "thought\nhm"),
    *(_CALL, f"ok\n{_CALL}", _CALL.replace("arguments", "parameters"), f"[{_CALL}]"),
    *(f"```json\n{_CALL}\n```", f"<tool_call>{_CALL}</tool_call>", f"<tool_call>{_CALL}"),
    "<tool_call>look\n<arg_key>path</arg_key><arg_value>a.txt</arg_value></tool_call>",
    "<tool_call><function=look><parameter=path>a.txt</parameter></function></tool_call>",
    "<minimax:tool_call><invoke name='look'></invoke></minimax:tool_call>",
    *("functions.look:0{}", "[look(path='a')]", "[TOOL_CALLS]look{}", "<|python_tag|>look()"),
    *("call:look{path:a}", "<|channel|>final<|message|>hi", "<|channel>thought\nhm"),
    *("<|channel>thought\n<channel|>ok", "<channel|>ok", "assistant\nhi"),
    *("<|im_start|>assistant\nhi", "<|tool_calls_section_begin|>x"),
)
"""Texts that some parser may read otherwise than as they stand."""

_STRIPS: tuple[Strip, ...] = (str, str.strip, str.lstrip, str.rstrip)


@dataclass(slots=True)
class TextReply:
    """A `Parsed` of text only."""

    content: str
    reasoning_content: str | None = None
    tool_calls: list[ParsedCall] = field(default_factory=list)


class PlainReplies:
    """Reads replies of text only as one parser does."""

    def __init__(self, parser: Parser, tokenizer: PromptTokenizer) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._stops = frozenset(parser.get_stop_token_ids())
        self._marks = self._stops | tokenizer.control_ids
        self._strips: dict[tuple[End, bool], Strip | None] = {}
        """The cut of a text's white space behind an end of a prompt, with and without tools;
        `None` = text may be more than text there."""
        self._closed: dict[tuple[End, bool], bool] = {}
        """True if a reply behind an end is read as one without a prompt."""

    def read(self, ids: list[int], end: End, tools: list[JSON] | None) -> Parsed | None:
        """Return the parse of sampled `ids`, if it depends only on them and on the prompt's last
        ids (`end`).

        `None` = the parser needs the whole prompt.
        """
        if self._words(ids):
            text = self.text(ids, end, tools)
            return None if text is None else TextReply(text)
        key = end, tools is None
        if key not in self._closed:
            self._closed[key] = self._tried_closed(end, tools)
        if not self._closed[key]:
            return None
        return self._parser.parse_response(ids, tools=tools, prompt_ids=[])

    def text(self, ids: list[int], end: End, tools: list[JSON] | None) -> str | None:
        """Return the text of a reply that is text only, if its parse depends only on `ids` and on
        the prompt's last ids (`end`); else `None`.
        """
        if not (words := self._words(ids)):
            return None
        key = end, tools is None
        if key not in self._strips:
            self._strips[key] = self._tried(end, tools)
        strip = self._strips[key]
        return None if strip is None else strip(self._tokenizer.text(words))

    def _words(self, ids: list[int]) -> list[int]:
        """Return a reply's ids without its end; none where a control token is among them."""
        words = ids[:-1] if ids and ids[-1] in self._stops else ids
        return words if self._marks.isdisjoint(words) else []

    def _tried_closed(self, end: End, tools: list[JSON] | None) -> bool:
        encode, escape = self._tokenizer.encode, self._tokenizer.escape
        texts = [encode(escape(text)) for text in _TEXTS]
        replies = [encode(text) for text in _TEXTS]  # their markers are control tokens
        asked = [(texts[0], reply) for reply in replies] + [(text, replies[6]) for text in texts]
        return all(
            self._outcome(ids, [*before, *end], tools) == self._outcome(ids, [], tools)
            for before, ids in asked
        )

    def _outcome(
        self, ids: list[int], prompt: list[int], tools: list[JSON] | None
    ) -> _Outcome | None:
        """Return the parser's result; `None` = it refused."""
        try:
            with boundary(RenderError, "trying a parser"):
                said = self._parser.parse_response(ids, tools=tools, prompt_ids=prompt)
        except RenderError:
            return None
        calls: list[object] = [
            (c.raw, c.name, c.arguments, c.token_span, c.status) for c in said.tool_calls
        ]
        return said.content, said.reasoning_content or "", calls

    def _tried(self, end: End, tools: list[JSON] | None) -> Strip | None:
        encode, escape = self._tokenizer.encode, self._tokenizer.escape
        texts = [encode(escape(text)) for text in _TEXTS]
        replies = [*texts, encode("\U0001f642")[:1]]  # a part of a character
        stops = sorted(self._stops)
        replies += [[*ids, stops[at % len(stops)]] for at, ids in enumerate(replies) if stops]
        asked = [(texts[0], reply) for reply in replies] + [(text, replies[-1]) for text in texts]
        found = list(_STRIPS)
        for before, ids in asked:
            said = self._outcome(ids, [*before, *end], tools)
            if said is None or said[2] or said[1].strip():
                return None
            text = self._tokenizer.decode([id_ for id_ in ids if id_ not in self._stops])
            found = [strip for strip in found if strip(text) == said[0]]
        return found[0] if found else None


# ---- while it is sampled


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Text that a decoder shows for a character whose last bytes are still to come."""

CHARACTER_MOST = 4
"""Most tokens of one character: one for each byte."""

INCOMPLETE_MOST = 64
"""Number of tokens that may wait for a character; then the rest of the reply waits for its end."""

CALLS_MOST = 4096
"""Number of tokens of calls up to which each call is read when it is complete. All are read anew
each time, so beyond that they are read when there is an eighth more of them."""


@dataclass(slots=True)
class ReplyDelta:
    """Part of a reply that became certain: reasoning, then text, then calls. May be empty."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class _Part(Enum):
    START = auto()
    """Nothing but white space so far."""
    REASONING = auto()
    TEXT = auto()
    CALLS = auto()
    HELD = auto()
    """The rest is known at the end."""


class LiveReader:
    """A reader of one reply: takes its ids in any pieces, returns what may be shown.

    Args:
        marks: The family's tokens.
        tokenizer: Decodes.
        thinking: Whether the prompt left reasoning open.
        stop_ids: Ids that end a turn.
        stops: Stop strings; they and what follows is not shown.
        read_calls: The calls of ids that begin with an opener, the later with all earlier ones.
    """

    def __init__(
        self,
        marks: ReplyMarks,
        tokenizer: PromptTokenizer,
        *,
        thinking: bool,
        stop_ids: frozenset[int],
        stops: Sequence[str],
        read_calls: Callable[[list[int]], list[ToolCall]],
    ) -> None:
        self._marks = marks
        self._part = _Part.REASONING if thinking else _Part.START
        self._stop_ids = stop_ids
        self._held = (*stops, *marks.held)
        self._held_starts = frozenset(held[:1] for held in self._held)
        self._read_calls = read_calls
        self._marks_part = frozenset(tokenizer.control_ids) | stop_ids
        self._text = _Decoder(tokenizer)
        self._buffer = ""
        """Decoded, but not certain yet."""
        self._fresh = True
        """True if nothing of this part was given out."""
        self._region: list[int] = []
        """Ids from the first opener on."""
        self._read_next = 0
        """Number of those ids from which the calls are read again."""
        self.calls: list[ToolCall] = []
        """The calls that were given out."""

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Take sampled ids; return the part of the reply that is certain with them."""
        piece = ReplyDelta()
        if self._part is not _Part.CALLS and self._marks_part.isdisjoint(ids):
            self._plain([*ids], piece)
            return piece
        run: list[int] = []
        for id_ in ids:
            if self._part is _Part.HELD:
                break
            if self._part is _Part.CALLS:
                self._call(id_, piece)
            elif id_ in self._marks_part:
                self._plain(run, piece)
                run = []
                self._marker(id_, piece)
            else:
                run.append(id_)
        self._plain(run, piece)
        return piece

    def _plain(self, run: list[int], piece: ReplyDelta) -> None:
        """Take ordinary ids of the present part."""
        if not run or self._part is _Part.HELD:
            return
        self._take(self._text.push(run), piece)
        if self._text.stuck:
            self._part = _Part.HELD

    def _take(self, text: str, piece: ReplyDelta) -> None:
        self._buffer += text
        if self._fresh:
            self._buffer = self._buffer.lstrip()
        if self._part is _Part.START and self._buffer:
            self._part = _Part.TEXT
        if "" not in self._held_starts and self._held_starts.isdisjoint(self._buffer):
            self._give(len(self._buffer), piece)
            return
        found = [at for held in self._held if (at := self._buffer.find(held)) >= 0]
        if found:
            self._give(min(found), piece)
            self._part = _Part.HELD
        else:
            self._give(len(self._buffer) - marker_prefix_length(self._buffer, self._held), piece)

    def _give(self, most: int, piece: ReplyDelta) -> None:
        """Give out at most so many characters, and no white space at the end."""
        shown = self._buffer[:most].rstrip()
        if not shown:
            return
        self._buffer = self._buffer[len(shown) :]
        self._fresh = False
        if self._part is _Part.REASONING:
            piece.reasoning += shown
        else:
            piece.text += shown

    def _end_part(self, piece: ReplyDelta) -> None:
        """End the part: all of it is certain but white space at its end."""
        self._take(self._text.rest(), piece)
        if not self._is_held():
            self._give(len(self._buffer), piece)
            self._buffer, self._fresh = "", True

    def _is_held(self) -> bool:
        return self._part is _Part.HELD

    def _marker(self, id_: int, piece: ReplyDelta) -> None:
        """Handle a control token outside of calls."""
        if self._is_held():
            return
        marks = self._marks
        if id_ in marks.openers and self._part is not _Part.REASONING:
            self._end_part(piece)
            if not self._is_held():
                self._part = _Part.CALLS
                self._call(id_, piece)
        elif id_ == marks.think_end and self._part is _Part.REASONING:
            self._end_part(piece)
            if not self._is_held():
                self._part = _Part.START
                self._marks = ReplyMarks(None, None, marks.openers, marks.closers, marks.held)
        elif id_ == marks.think and self._part is _Part.START and marks.think_end is not None:
            before = self._buffer + self._text.rest()
            self._buffer = ""
            self._part = _Part.HELD if before.strip() else _Part.REASONING
        else:
            self._part = _Part.HELD

    def _call(self, id_: int, piece: ReplyDelta) -> None:
        """Handle one more id behind an opener."""
        if id_ in self._stop_ids:
            self._part = _Part.HELD
            return
        self._region.append(id_)
        size = len(self._region)
        if id_ in self._marks.closers and size >= self._read_next:
            self._read_next = size + size // 8 if size > CALLS_MOST else 0
            new = self._read_calls(self._region)[len(self.calls) :]
            self.calls += new
            piece.calls += new


class _Decoder:
    """Text of ids that come in pieces, such that all pieces together are the text of all ids."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        """The ids of the last piece, as left context, and those whose text is not given out."""
        self._context = 0
        """Number of them that are context."""
        self._shown = ""
        """Text of the context."""

    @property
    def stuck(self) -> bool:
        """Return whether it waits for a character that does not end."""
        return len(self._ids) - self._context > INCOMPLETE_MOST

    def push(self, ids: list[int]) -> str:
        """Return the text that became certain."""
        self._ids += ids
        for waiting in range(min(CHARACTER_MOST, len(self._ids) - self._context)):
            text = self._tokenizer.decode(self._ids[: len(self._ids) - waiting])
            if not text.endswith(REPLACEMENT):
                return self._advance(text, waiting)
        return ""

    def rest(self) -> str:
        """Return the rest, with an incomplete character replaced, and drop the context."""
        text = self._tokenizer.decode(self._ids)[len(self._shown) :]
        self._ids, self._context, self._shown = [], 0, ""
        return text

    def _advance(self, text: str, waiting: int) -> str:
        """Give out `text` of all ids but the last `waiting`."""
        piece = text[len(self._shown) :]
        self._ids = self._ids[self._context :]
        self._context = len(self._ids) - waiting
        self._shown = self._tokenizer.decode(self._ids[: self._context])
        return piece


def marker_prefix_length(text: str, markers: Sequence[str]) -> int:
    """Return how many of the text's last characters may be the beginning of one of the markers."""
    size = first = len(text)
    for marker in markers:
        at = text.find(marker[:1], max(size - len(marker) + 1, 0), first)
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[:1], at + 1, first)
        first = first if at < 0 else at
    return size - first

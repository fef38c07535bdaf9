"""Replies that are nothing but text, read without the family's parser.

A parser looks for reasoning and calls by control tokens, and at the end of the prompt for reasoning
that it opens. Where a reply holds no control token and the prompt ends as known, none of that is
there; where it holds some, the parser need not look at such a prompt. That is used for the families
which tests compare (`FAMILIES`), and each end is tried first, with texts that a parser may take for
more than text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bridle.errors import RenderError, boundary
from bridle.prompting.family import Parsed, ParsedCall, Parser
from bridle.prompting.tokenizer import PromptTokenizer
from bridle.types import JSON

FAMILIES = frozenset(
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
        """Return the parser's result for `ids` under a prompt with this end; `None` = unknown."""
        key = end, tools is None
        words = ids[:-1] if ids and ids[-1] in self._stops else ids
        if not words or not self._marks.isdisjoint(words):
            if key not in self._closed:
                self._closed[key] = self._tried_closed(end, tools)
            if not self._closed[key]:
                return None
            return self._parser.parse_response(ids, tools=tools, prompt_ids=[])
        if key not in self._strips:
            self._strips[key] = self._tried(end, tools)
        strip = self._strips[key]
        return None if strip is None else TextReply(strip(self._tokenizer.decode(words)))

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

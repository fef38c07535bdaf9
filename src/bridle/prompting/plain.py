"""Replies that are nothing but text, read without the family's parser.

A parser looks for reasoning and calls by control tokens, and at the end of the prompt for reasoning
that it opens. Where a reply holds no control token and the prompt ends as known, none of that is
there. That is used for the families which tests compare (`FAMILIES`), and each end is tried first,
with texts that a parser may take for more than text.
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
class Said:
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
        self._ends: dict[tuple[End, bool], Strip | None] = {}
        """How a text's white space is cut behind an end of a prompt, with and without tools;
        `None` = text may be more than text there."""

    def read(self, ids: list[int], end: End, tools: list[JSON] | None) -> Parsed | None:
        """What the parser would say of `ids` under a prompt with this end; `None` = ask it."""
        words = ids[:-1] if ids and ids[-1] in self._stops else ids
        if not words or not self._marks.isdisjoint(words):
            return None
        key = end, tools is None
        if key not in self._ends:
            self._ends[key] = self._tried(end, tools)
        strip = self._ends[key]
        return None if strip is None else Said(strip(self._tokenizer.decode(words)))

    def _tried(self, end: End, tools: list[JSON] | None) -> Strip | None:
        encode, escape = self._tokenizer.encode, self._tokenizer.escape
        texts = [encode(escape(text)) for text in _TEXTS]
        replies = [*texts, encode("\U0001f642")[:1]]  # a part of a character
        stops = sorted(self._stops)
        replies += [[*ids, stops[at % len(stops)]] for at, ids in enumerate(replies) if stops]
        asked = [(texts[0], reply) for reply in replies] + [(text, replies[-1]) for text in texts]
        found = list(_STRIPS)
        for before, ids in asked:
            try:
                with boundary(RenderError, "trying a parser"):
                    said = self._parser.parse_response(ids, tools=tools, prompt_ids=[*before, *end])
            except RenderError:
                return None
            if said.tool_calls or (said.reasoning_content or "").strip():
                return None
            text = self._tokenizer.decode([id_ for id_ in ids if id_ not in self._stops])
            found = [strip for strip in found if strip(text) == said.content]
        return found[0] if found else None

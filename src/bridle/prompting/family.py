"""Choice of the renderer (package `renderers`) that has a tokenizer's wire format.

That package knows models by their exact names; fine-tunes and tokenizers of one's own have none. So
each family is tried: one whose tokens are all there, and which renders a fixed set of conversations
to the very ids of the folder's own chat template, is the right one. None is no error: the template
itself renders then (`template`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeAlias, cast

from bridle.errors import RenderError, boundary
from bridle.prompting.template import ChatTemplate, tool_parser_of
from bridle.prompting.tokenizer import PromptTokenizer
from bridle.types import JSON

History: TypeAlias = Literal["exact", "template"]


class ParsedCall(Protocol):
    """One attempt at a call, as `renderers.base.ParsedToolCall` has it."""

    raw: str
    """Text of the block, without its markers in most formats."""
    name: str | None
    arguments: Any
    token_span: tuple[int, int] | None
    """Half-open, into the ids before the end token."""
    status: StrEnum


class Parsed(Protocol):
    """A reply as `renderers.base.ParsedResponse` has it."""

    content: str
    reasoning_content: str | None
    tool_calls: list[ParsedCall]


class Bridged(Protocol):
    """Result of a bridge: previous ids and suffix."""

    token_ids: list[int]


class Parser(Protocol):
    """The half of a `Family` that reads sampled turns."""

    def parse_response(
        self, token_ids: list[int], *, tools: list[JSON] | None, prompt_ids: list[int]
    ) -> Parsed:
        """Parse a sampled turn."""

    def get_stop_token_ids(self) -> Sequence[int]:
        """Return ids that end a turn."""


class Family(Parser, Protocol):
    """A renderer of the `renderers` package, as far as it is used here (it ships no types)."""

    def render_ids(
        self, messages: list[JSON], *, tools: list[JSON] | None, add_generation_prompt: bool
    ) -> list[int]:
        """Return ids of a whole conversation."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[JSON],
        *,
        tools: list[JSON] | None,
    ) -> Bridged | None:
        """Return the next prompt on top of these very ids; `None` = it refuses."""


_TOOLS: list[JSON] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a file <here>.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]
_SYSTEM: JSON = {"role": "system", "content": "Be brief."}
_USER: JSON = {"role": "user", "content": "Hello there"}
_TOLD: JSON = {"role": "assistant", "content": "Hi."}
_CALLED: JSON = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [
        {
            "type": "function",
            "id": "call_1",
            "function": {"name": "look", "arguments": {"path": "a.txt"}},
        }
    ],
}
_RESULT: JSON = {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "text"}

PROBES: tuple[tuple[str, list[JSON], list[JSON] | None], ...] = (
    ("user", [_USER], None),
    ("system", [_SYSTEM, _USER], None),
    ("turns", [_SYSTEM, _USER, _TOLD, _USER], None),
    ("tools", [_SYSTEM, _USER], _TOOLS),
    ("tools without system", [_USER], _TOOLS),
    ("call and result", [_SYSTEM, _USER, _CALLED, _RESULT], _TOOLS),
    ("parallel results", [_USER, _CALLED, _RESULT, _RESULT, _USER], _TOOLS),
)
"""Conversations that every family and template should agree on: name, messages, tools."""


_SIGNS = {"gpt-oss": "<|channel|>"}
"""A token without which a family is not tried: this one would download its own vocabulary."""


_SWITCHES = ("enable_thinking", "thinking")
"""Names that families have for the setting that turns thinking on or off."""


def family_names() -> list[str]:
    """Return the families that can be asked for by name."""
    from renderers.base import MODEL_RENDERER_MAP  # type: ignore[import-untyped]

    return list(dict.fromkeys(MODEL_RENDERER_MAP.values()))


def make_family(
    name: str, tokenizer: PromptTokenizer, *, thinking: bool | None, history: History
) -> Family:
    """Return a family's renderer for this tokenizer. `RenderError` if its tokens are not there.

    With `history="exact"` it extends over user messages too, keeping all reasoning.
    """
    if name not in family_names():
        raise RenderError(f"unknown family {name!r}; known: {', '.join(family_names())}")
    with boundary(RenderError, f"the tokenizer is not of the family {name!r}"):
        from renderers.base import create_renderer
        from renderers.configs import config_from_name  # type: ignore[import-untyped]

        default = config_from_name(name)
        settings: JSON = {}
        if history == "exact":
            settings["thinking_retention"] = "all"
        if thinking is not None:
            fields = type(default).model_fields
            settings |= {name: thinking for name in _SWITCHES if name in fields}
        return cast("Family", create_renderer(tokenizer, type(default)(**settings)))


def find_family(
    tokenizer: PromptTokenizer, template: ChatTemplate
) -> tuple[str, bool | None] | None:
    """Return the first family that renders every probe as the template does, and how it thinks.

    That is `None` where family and template agree by themselves, else the setting of the family
    that the template has for its default. `None` for both = no family.
    """
    for name in family_names():
        if _SIGNS.get(name) not in {None, *tokenizer.added}:
            continue
        for thinking in (None, False, True):
            try:
                family = make_family(name, tokenizer, thinking=thinking, history="exact")
            except RenderError:
                break
            if not any(differences(family, template)):
                return name, thinking
    return None


def differences(family: Family, template: ChatTemplate) -> Iterator[str]:
    """Yield names of the probes that the family renders otherwise than the template.

    A probe that the template refuses is no difference.
    """
    for name, messages, tools in PROBES:
        try:
            wanted = template.render(messages, tools, thinking=None)
        except RenderError:
            continue
        try:
            with boundary(RenderError, f"rendering {name!r}"):
                ids = family.render_ids(messages, tools=tools, add_generation_prompt=True)
        except RenderError:
            ids = []
        if ids != wanted:
            yield name


class _PlainParser:
    """The package's default parser, which looks for `<think>` behind ChatML's header only."""

    def __init__(self, parser: Parser, tokenizer: PromptTokenizer) -> None:
        self._parser = parser
        self._tokenizer = tokenizer

    def parse_response(
        self, token_ids: list[int], *, tools: list[JSON] | None, prompt_ids: list[int]
    ) -> Parsed:
        """See `Parser.parse_response`; a prompt that ends in `<think>` opens reasoning."""
        if self._tokenizer.decode(prompt_ids).rstrip().endswith(_THINK[0]):
            prompt_ids = self._tokenizer.encode(_THINK[0])
        return self._parser.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def get_stop_token_ids(self) -> Sequence[int]:
        return self._parser.get_stop_token_ids()


def plain_parser(tokenizer: PromptTokenizer) -> Parser:
    """Return a parser for a template of no known family, chosen by the markup that the template
    names.
    """
    from renderers import (  # type: ignore[import-untyped]
        DefaultRenderer,
        DefaultRendererConfig,
    )

    source = str(tokenizer.fast.chat_template or "")
    config = DefaultRendererConfig(
        tool_parser=tool_parser_of(source),
        reasoning_parser="think" if "</think>" in source else None,
    )
    return _PlainParser(DefaultRenderer(tokenizer, config), tokenizer)


def check_reasoning(parser: Parser, tokenizer: PromptTokenizer, template: ChatTemplate) -> None:
    """Read `x</think>y` under the generation prompt of a template that leaves `<think>` open.

    Raises `RenderError` where the parser takes `x` for text: a harness would be shown reasoning.
    """
    try:
        asked = template.text([_USER], None, thinking=None, generation=False)
        prompt = template.text([_USER], None, thinking=None)
    except RenderError:
        return  # a request tells what the template has against its messages
    begun = prompt.removeprefix(asked)
    opened, closed = _THINK
    if begun.rfind(opened) <= begun.rfind(closed):
        return
    ids = tokenizer.encode(f"x{closed}y")
    parsed = parser.parse_response(ids, tools=None, prompt_ids=tokenizer.encode(prompt))
    if ((parsed.reasoning_content or "").strip(), parsed.content.strip()) != ("x", "y"):
        raise RenderError(
            f"the chat template begins a turn with {begun!r}, and no parser reads reasoning "
            f"behind it; end its generation prompt with {opened}"
        )


@dataclass(frozen=True, slots=True)
class ReplyMarks:
    """The control tokens that separate the parts of a reply while it is still being sampled."""

    think: int | None
    """Opens reasoning; `None` = the vocabulary has no such token."""
    think_end: int | None
    openers: frozenset[int]
    """From one of these on, a reply is calls; empty = its parser knows no calls."""
    closers: frozenset[int]
    """After one of these a call may be whole."""
    held: tuple[str, ...] = ()
    """Texts that the parser takes for more than text, also when they are spelled out."""


_THINK = ("<think>", "</think>")
_TAGGED = ("<tool_call>",), ("</tool_call>",)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁end｜>",)  # noqa: RUF001 - its tokens
_KIMI = ("<|tool_calls_section_begin|>",), ("<|tool_call_end|>",)
_CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(["qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8"], _TAGGED),
    **dict.fromkeys(["qwen3-vl", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"], _TAGGED),
    **dict.fromkeys(["glm-4.5", "glm-5", "glm-5.1", "glm-5.3"], _TAGGED),
    **dict.fromkeys(["laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"], _TAGGED),
    **dict.fromkeys(["deepseek-v3", "deepseek-r1"], _DEEPSEEK),
    **dict.fromkeys(["kimi-k2", "kimi-k2.5"], _KIMI),
    "minimax-m2": (("<minimax:tool_call>",), ("</minimax:tool_call>",)),
}
"""Family -> tokens that open and close calls. Families that are not here call in ordinary text
(llama-3, deepseek-v4) or in channels of their own: their replies are known at the end only."""

_PLAIN_CALLS = {"qwen3": _TAGGED, "qwen3.5": _TAGGED, "glm": _TAGGED, "deepseek-v3": _DEEPSEEK}
"""The same for the tool parsers of `plain_parser`."""


def live_marks(name: str | None, tokenizer: PromptTokenizer) -> ReplyMarks | None:
    """Return the marks by which replies of family `name` (`None` = `plain_parser`'s) are read live.

    `None` = they can't: a call does not begin with a token of its own.
    """
    held: tuple[str, ...] = _THINK
    calls: tuple[tuple[str, ...], tuple[str, ...]] | None
    if name is None:
        parser = tool_parser_of(str(tokenizer.fast.chat_template or ""))
        calls = ((), ()) if parser is None else _PLAIN_CALLS.get(parser)
        held = (*_THINK, *tokenizer.fast.all_special_tokens)
    else:
        calls = _CALLS.get(name)
    added = tokenizer.added
    if calls is None or not {*calls[0], *calls[1]} <= set(added):
        return None
    think, think_end = (added.get(token) for token in _THINK)
    openers, closers = (frozenset(added[token] for token in tokens) for tokens in calls)
    return ReplyMarks(think, think_end, openers, closers, held)

"""Choice of the renderer (package `renderers`) that has a tokenizer's wire format.

That package knows models by their exact names; fine-tunes and tokenizers of one's own have none. So
each family is tried: one whose tokens are all there, and which renders a fixed set of conversations
to the very ids of the folder's own chat template, is the right one. None is no error: the template
itself renders then (`ChatTemplate`): whole prompts, and extensions as a difference of two
renderings.

What follows a sampled turn is what the template writes after it: render a short stand-in
conversation that ends in an assistant turn, once alone and once with the new messages; the second
text, cut behind the turn's end token, is the suffix. It starts right behind a control token, so
its ids do not depend on what is before; that is checked on fixed conversations before any use. This
needs no knowledge of the model family, takes assistant messages that a harness wrote itself, turns
that were cut, and reasoning that was left open. The prompt so far is never touched, so a suffix
costs only its new messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeAlias, cast

from bridle.errors import RenderError, boundary
from bridle.prompting.tokenizer import MARK, PromptTokenizer
from bridle.types import JSON

STAND_IN = MARK + "2"
"""Content of the stand-in turn; escaped text never holds it."""

_STAND_IN_NAME = MARK + "3"
"""Name of a stand-in call; where a suffix shows it, the suffix is not used."""

_ASKED: JSON = {"role": "user", "content": "x"}

_CHECKS: tuple[list[JSON], ...] = (
    [_ASKED],
    [{"role": "user", "content": "\n\nab\n"}, {"role": "user", "content": "c d"}],
    [{"role": "assistant", "content": "answer"}, _ASKED],
)
"""New messages that `check` extends by; the last holds an assistant message."""


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: PromptTokenizer, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self.close = self._find_close()
        """The token that ends an assistant turn, as text; `None` = the template has none."""
        self.extends = self.close is not None and self._check()
        """True if extensions by difference are right with this template."""

    def text(
        self,
        messages: Sequence[JSON],
        tools: Sequence[JSON] | None,
        *,
        thinking: bool | None,
        generation: bool = True,
    ) -> str:
        """Return the prompt as text, control tokens included; with `generation` the next turn is
        begun.

        Raises `RenderError` with the template's own message for messages that it refuses.
        """
        switches = {} if thinking is None else {"enable_thinking": thinking}
        with boundary(RenderError, "the chat template refuses these messages"):
            text = self._tokenizer.fast.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                add_generation_prompt=generation,
                tokenize=False,
                **switches,
            )
        return str(text)

    def render(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, *, thinking: bool | None
    ) -> list[int]:
        """Return the ids of a whole prompt, ready to sample."""
        return self._tokenizer.encode(self.text(messages, tools, thinking=thinking))

    def extend(
        self,
        new_messages: Sequence[JSON],
        tools: Sequence[JSON] | None,
        *,
        closed: bool,
        thinking: bool | None,
    ) -> list[int] | None:
        """Return the ids of new messages behind a sampled turn; `None` = this template cannot be
        extended by these messages.

        `closed` says whether the sampled turn ends with an end token; if not, one is added.
        """
        if not self.extends or self.close is None:
            return None
        try:
            after = self._after_close(new_messages, tools, thinking=thinking)
        except RenderError:
            return None  # the full prompt tells what is wrong with the messages
        if after is None:
            return None
        ids = self._tokenizer.encode(after)
        return ids if closed else [self._tokenizer.added[self.close], *ids]

    def _after_close(
        self, new_messages: Sequence[JSON], tools: Sequence[JSON] | None, *, thinking: bool | None
    ) -> str | None:
        """Return the template's text from the last turn's end token to the end of the prompt."""
        assert self.close is not None
        stand_in = [_ASKED, _stand_in(new_messages)]
        alone = self.text(stand_in, tools, thinking=thinking, generation=False)
        whole = self.text([*stand_in, *new_messages], tools, thinking=thinking)
        _, found, ending = alone.rpartition(STAND_IN)
        _, again, behind = whole.rpartition(STAND_IN)
        end = ending.rfind(self.close) + len(self.close)
        if not (found and again) or end < len(self.close) or not behind.startswith(ending):
            return None
        return None if _STAND_IN_NAME in behind[end:] else behind[end:]

    def _find_close(self) -> str | None:
        """Return the end token that stands right behind an assistant's text."""
        stand_in = [_ASKED, {"role": "assistant", "content": STAND_IN}]
        try:
            text = self.text(stand_in, None, thinking=None, generation=False)
        except RenderError:
            return None
        ending = text.rpartition(STAND_IN)[2].lstrip()
        for name, id_ in self._tokenizer.added.items():
            if id_ in self._stop_ids and ending.startswith(name):
                return name
        return None

    def _check(self) -> bool:
        """Return whether end token plus suffix tokenize as the whole text does."""
        assert self.close is not None
        for new_messages in _CHECKS:
            stand_in = [_ASKED, _stand_in(new_messages)]
            try:
                whole = self.text([*stand_in, *new_messages], None, thinking=None)
                after = self._after_close(new_messages, None, thinking=None)
            except RenderError:
                continue  # not every template takes every conversation
            if after is None:
                return False
            before = whole[: len(whole) - len(after)]
            encode = self._tokenizer.encode
            if encode(before) + encode(after) != encode(whole):
                return False
        return True


def _stand_in(new_messages: Sequence[JSON]) -> JSON:
    """Return an assistant turn that makes the calls which the new messages answer."""
    turn: JSON = {"role": "assistant", "content": STAND_IN}
    calls = []
    for message in new_messages:
        if message["role"] != "tool":
            break
        function: JSON = {"name": message.get("name") or _STAND_IN_NAME, "arguments": {}}
        calls.append(
            {"type": "function", "id": message.get("tool_call_id", ""), "function": function}
        )
    if calls:
        turn["tool_calls"] = calls
    return turn


def tool_parser_of(template: str) -> str | None:
    """Return the name of the tool parser of the package `renderers` that reads this template's
    calls; `None` = its calls have no form that is known.
    """
    signs = {
        "<function=": "qwen3.5",
        "<arg_key>": "glm",
        "tool▁calls▁begin": "deepseek-v3",
        "<tool_call>": "qwen3",
    }
    return next((name for sign, name in signs.items() if sign in template), None)


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
        """Parse a sampled turn: text, reasoning and tool calls."""

    def get_stop_token_ids(self) -> Sequence[int]:
        """Return the ids that end a turn."""


class WholeRenderer(Parser, Protocol):
    """The half of a `Family` that needs no prompt before."""

    def render_ids(
        self, messages: list[JSON], *, tools: list[JSON] | None, add_generation_prompt: bool
    ) -> list[int]:
        """Return the ids of a whole conversation."""


class Family(WholeRenderer, Protocol):
    """A renderer of the `renderers` package, as far as it is used here (it ships no types)."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[JSON],
        *,
        tools: list[JSON] | None,
    ) -> Bridged | None:
        """Return the next prompt, which begins with these very prompt and completion ids; `None` =
        the family refuses.
        """


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
    """Return the model families (of the package `renderers`) that can be asked for by name."""
    from renderers.base import MODEL_RENDERER_MAP  # type: ignore[import-untyped]

    return list(dict.fromkeys(MODEL_RENDERER_MAP.values()))


def make_family(
    name: str, tokenizer: PromptTokenizer, *, thinking: bool | None, history: History
) -> Family:
    """Return a model family's renderer for this tokenizer. `RenderError` if it lacks the family's
    tokens.

    With `history="exact"` it extends over user messages too, keeping all reasoning.
    """
    if name not in family_names():
        raise RenderError(f"unknown model family {name!r}; known: {', '.join(family_names())}")
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
    """Return the first model family that renders every probe as the chat template does, and the
    setting of thinking under which it does.

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


def differences(family: WholeRenderer, template: ChatTemplate) -> Iterator[str]:
    """Yield the names of the probe conversations that family and chat template render differently.

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
    """Return a reply parser for a chat template of no known family, by the markup in the
    template.
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
    """Check that a reply parser takes `x` in `x</think>y` for reasoning, where the template's
    generation prompt leaves `<think>` open.

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
    """Return the marks by which replies of a model family can be parsed while they are sampled.

    `name=None` is a template of no known family. `None` = they can't be: a call does not begin with
    a token of its own.
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

"""A family that renders with a placeholder id for each long text, which is tokenised afterwards.

The renderers of the `renderers` package keep lists beside the ids (which message, whether sampled,
whether content), an entry per token, made in Python; nobody here reads them, and for a root they
take as long as the tokenizer itself. Ids of a text are the same wherever it is tokenised, and
renderers only put them in their place. `with_placeholders` compares both ways on fixed
conversations, and leaves a family as it is where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from bridle.errors import RenderError, boundary
from bridle.prompting.family import Bridged, Family, Parsed
from bridle.prompting.layouts import Layouts
from bridle.prompting.plain import PlainReplies
from bridle.prompting.tokenizer import PLACEHOLDER_CHARS, PromptTokenizer
from bridle.types import JSON

_LONG = "Some words about a file, and what stands in it. " * (PLACEHOLDER_CHARS // 40)
_CALL: JSON = {"name": "look", "arguments": {"path": "a.txt"}}
_TURNS: list[JSON] = [
    {"role": "system", "content": f"1 {_LONG}"},
    {"role": "user", "content": f"2 {_LONG}"},
    {
        "role": "assistant",
        "content": f"3 {_LONG}",
        "tool_calls": [{"type": "function", "id": "call_1", "function": _CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": f"4 {_LONG}"},
    {"role": "user", "content": f"\n5 {_LONG}\n"},
]
_PROBES = (_TURNS, _TURNS[:2], _TURNS[1:2], [*_TURNS[1:2], *_TURNS[2:4]])


@dataclass(slots=True)
class _Ids:
    """A bridge's result."""

    token_ids: list[int]


class PlaceholderFamily:
    """A family that never sees the tokens of long texts."""

    def __init__(self, family: Family, tokenizer: PromptTokenizer, *, plain: bool = False) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._marked = "</think>" in tokenizer.added
        """True if the end of reasoning is a token of its own, not text that must be looked for."""
        self._stops = family.get_stop_token_ids()
        self._open = tokenizer.control_ids - frozenset(self._stops)
        self._layouts = Layouts(tokenizer)
        self._plain = PlainReplies(family, tokenizer) if plain else None

    def render_ids(
        self, messages: list[JSON], *, tools: list[JSON] | None, add_generation_prompt: bool
    ) -> list[int]:
        ids = self._tokenizer.laid_out(
            lambda: self._family.render_ids(
                messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        )
        assert ids is not None, "a family lays out whole prompts, or raises"
        return ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[JSON],
        *,
        tools: list[JSON] | None,
    ) -> Bridged | None:
        before = [*previous_prompt_ids, *previous_completion_ids]
        ids = self.suffix(previous_prompt_ids, previous_completion_ids, new_messages, tools)
        return None if ids is None else _Ids(before + ids)

    def suffix(
        self, prompt: list[int], completion: list[int], new: list[JSON], tools: list[JSON] | None
    ) -> list[int] | None:
        """The ids of a bridge behind those that it is given; `None` = it refuses.

        The family is asked only where no layout is known.
        """

        def ask(tail: list[int], sampled: list[int], new: list[JSON]) -> list[int] | None:
            return self._suffix(tail, sampled, new, tools=tools)

        return self._layouts.suffix(prompt, completion, new, tools=tools is not None, ask=ask)

    def known_suffix(
        self, end: list[int], completion: list[int], new: list[JSON], *, tools: bool
    ) -> list[int] | None:
        """The same by a layout; `end` is the last ids of the prompt. `None` = none is known."""
        return self._layouts.known(end, completion, new, tools=tools)

    def parse_response(
        self, token_ids: list[int], *, tools: list[JSON] | None, prompt_ids: list[int]
    ) -> Parsed:
        if self._plain is not None and (end := self._layouts.end(prompt_ids)) is not None:
            said = self._plain.read(token_ids, end, tools)
            if said is not None:
                return said
        return self._family.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stops)

    def _suffix(
        self, tail: list[int], sampled: list[int], new: list[JSON], *, tools: list[JSON] | None
    ) -> list[int] | None:
        """The family's own suffix. Of a turn that is all plain text it is shown only the end."""
        control = self._tokenizer.control_ids
        shown = sampled
        if self._marked and control.isdisjoint(shown[:-1]) and self._open.isdisjoint(shown[-1:]):
            shown = shown[-2:]
        return suffix_of(self._family, tail, shown, new, tools)


def suffix_of(
    family: Family,
    prompt: list[int],
    completion: list[int],
    new: list[JSON],
    tools: list[JSON] | None,
) -> list[int] | None:
    """The ids of a family's bridge behind those that it is given; `None` = it refuses."""
    if isinstance(family, PlaceholderFamily):
        return family.suffix(prompt, completion, new, tools)
    found = family.bridge_to_next_turn(prompt, completion, new, tools=tools)
    before = [*prompt, *completion]
    if found is None or found.token_ids[: len(before)] != before:
        return None  # a family that does not keep what was sampled is of no use
    return found.token_ids[len(before) :]


def with_placeholders(family: Family, tokenizer: PromptTokenizer, *, plain: bool = False) -> Family:
    """Return `family` with placeholders for long texts, or itself where that changes its ids.

    `plain` replies, which hold no control token, are then read without its parser.
    """
    made = PlaceholderFamily(family, tokenizer, plain=plain)
    return made if _agree(family, made) else family


def _agree(family: Family, made: PlaceholderFamily) -> bool:
    """Return whether both render the fixed conversations to the same ids."""
    asked: list[list[int]] = []
    for messages in _PROBES:
        wanted = _outcome(_rendered, family, messages)
        if wanted is not None:
            if _outcome(_rendered, made, messages) != wanted:
                return False
            asked.append(wanted)
    stops = list(family.get_stop_token_ids())[:1]
    for prompt, new in product(asked[-1:], (_TURNS[3:], _TURNS[3:4], _TURNS[4:])):
        for sampled in ([*prompt[:8], *stops], prompt[:8]):
            wanted = _outcome(_bridged, family, prompt, sampled, new)
            if wanted is None or wanted[: len(prompt) + len(sampled)] != prompt + sampled:
                continue  # no use is made of it
            if _outcome(_bridged, made, prompt, sampled, new) != wanted:
                return False
    return bool(asked)


def _rendered(family: Family, messages: list[JSON]) -> list[int]:
    return family.render_ids(messages, tools=None, add_generation_prompt=True)


def _bridged(
    family: Family, prompt: list[int], sampled: list[int], new: list[JSON]
) -> list[int] | None:
    found = family.bridge_to_next_turn(prompt, sampled, new, tools=None)
    return None if found is None else found.token_ids


def _outcome(lay: Callable[..., list[int] | None], *asked: object) -> list[int] | None:
    """Return the rendered ids; `None` = refused."""
    try:
        with boundary(RenderError, "laying out"):
            return lay(*asked)
    except RenderError:
        return None

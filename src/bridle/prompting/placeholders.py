"""A family that renders with a placeholder id for each long text, which is tokenised afterwards.

The renderers of the `renderers` package keep lists beside the ids (which message, whether sampled,
whether content), an entry per token, made in Python; nobody here reads them, and for a root they
take as long as the tokenizer itself. Ids of a text are the same wherever it is tokenised, and
renderers only put them in their place. `with_placeholders` compares both ways on fixed
conversations, and leaves a family as it is where they differ.

Suffixes of a prompt come from a layout that was learned from the family's own bridge. Most turns of
an agent have one shape: a reply that ends alike, then a tool's result. The family puts other texts
between the same ids each time. A layout holds these ids and the places of the texts. It is learned
from a bridge over probe texts, and is used only if it gives the family's ids for further probes,
which hold whatever a family may look for in a text, and for the request itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product
from typing import TypeAlias

from bridle.errors import RenderError, boundary
from bridle.prompting.family import Family, Parsed, WholeRenderer
from bridle.prompting.reply import PlainReplies
from bridle.prompting.tokenizer import PLACEHOLDER_CHARS, PromptTokenizer
from bridle.types import JSON, Ids

Suffix: TypeAlias = Callable[[list[int], list[int], list[JSON]], list[int] | None]
"""The ids that a family puts behind the last ids of a prompt and a reply; `None` = it refuses."""

KEPT = 256
"""Shapes that are remembered for each end; for later ones the family is asked."""
END = 24
"""Number of ids that show the end of a prompt that a layout is known for."""
MOST_ENDS = 16
"""Number of times that the end of a prompt is learned."""
MOST_MESSAGES = 8
MOST_MARKS = 32
"""Control tokens of a reply, beyond which its shape is not remembered."""

_FIELDS = ("content", "tool_call_id", "name")
_SPACE = " \n\t\r\x0b\x0c\x1c\x85\u2003\n "
_WORDS = "some words about a file, and what stands in it " * (PLACEHOLDER_CHARS // 40)
_SPELLED = (
    "a few words",
    "<think> <tool_call> <|channel>thought\n",
    "</think> </tool_call> <channel|> <|im_end|>",
    "\n",
)
"""Ordinary tokens of a prompt or a reply, in which a family may look for markers."""
_TEXTS = (
    "{0} plain",
    "7{0}",
    '{{"text": "{0}"}}',
    '["{0}", 1]',
    "<think>{0}",
    "{0}</think>\n\n{0}",
    "<tool_response>{0}</tool_response>",
    "<tool_response>\n{0}\n</tool_response>\n",
    "{0} /no_think",
    "{0}/nothink",
    "\n{0}\n",
    "--- {0}\n+++ b\n@@ -1 +1 @@\n",
    "<image>{0}",
)
"""Texts on which a family may decide something; the first word differs at each place."""

Shape: TypeAlias = tuple[tuple[int, ...], tuple[tuple[str, int, int], ...], bool]


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of one field of a new message inside a text."""

    message: int
    field: str
    stripped: bool


_Text: TypeAlias = tuple[tuple[tuple[str, _Slot], ...], str]
"""Each slot of a text with what stands before it, and what stands behind the last one."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Ids, and texts that are tokenised with the new messages' own words in their slots."""

    first: list[int]
    pieces: tuple[tuple[_Text, list[int]], ...]
    """Texts, and the ids behind each."""

    def ids(self, messages: list[JSON], tokenizer: PromptTokenizer) -> list[int]:
        """Return the ids of messages of this layout: the fixed ids, and between them the texts,
        tokenised.
        """
        ids = self.first.copy()
        for (slots, text), behind in self.pieces:
            whole = ""
            for before, slot in slots:
                value: str = messages[slot.message][slot.field]
                whole += before + (value.strip() if slot.stripped else value)
            ids += tokenizer.encode(whole + text)
            ids += behind
        return ids


class Layouts:
    """The layouts of one family with one tokenizer."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends: dict[tuple[int, ...], dict[Shape, Layout | None]] = {}
        """For the ids that end a prompt: the layouts by shape; `None` = this shape has none."""
        self._sizes: list[tuple[tuple[int, ...], list[int], int]] = []
        """These ends, each also as a list and with its length."""
        self._looked = 0
        """Number of times that an end was looked for."""
        self._least = min(tokenizer.control_ids, default=0)
        """Ids below it are no control tokens."""
        self._fillers = [tokenizer.encode(tokenizer.escape(text)) for text in _SPELLED]

    def suffix(
        self, tail: list[int], sampled: list[int], messages: list[JSON], *, tools: bool, ask: Suffix
    ) -> list[int] | None:
        """Return the ids that new messages add to a prompt: by a known layout, else those that
        `ask` returns.

        `tools` says whether the request has any. A refusal is never remembered.
        """
        tokenizer = self._tokenizer
        shape = self._shape(sampled, messages, tools=tools)
        end = None if shape is None else self.end(tail)
        known = {} if end is None else self._ends[end]
        layout = None if shape is None else known.get(shape)
        if layout is not None:
            return layout.ids(messages, tokenizer)
        ids = tokenizer.laid_out(lambda: ask(tail, sampled, messages))
        if ids is None or shape is None or shape in known:
            return ids
        try:
            with boundary(RenderError, "learning a layout"):
                if end is None and self._looked < MOST_ENDS:
                    self._learn_end(tail, sampled, messages, ask)
                elif end is not None and len(known) < KEPT:
                    layout = self._learned(end, shape[0], sampled, messages, ask)
                    right = layout is not None and layout.ids(messages, tokenizer) == ids
                    known[shape] = layout if right else None
        except RenderError:  # the family takes this request, and does not take every probe
            known[shape] = None
        return ids

    def known(
        self, tail: list[int], output_ids: Ids, messages: list[JSON], *, tools: bool
    ) -> list[int] | None:
        """Return the ids that new messages add to a prompt by a known layout; `None` = none is
        known.

        `tail` are the last `END` ids of the prompt.
        """
        if (end := self.end(tail)) is None:
            return None
        if output_ids.size > 1:
            words = output_ids[:-1]
            if words[words.argmax()] < self._least:  # in half the time of `max`
                output_ids = output_ids[-2:]  # they count as one
        if (shape := self._shape(output_ids.tolist(), messages, tools=tools)) is None:
            return None
        layout = self._ends[end].get(shape)
        return None if layout is None else layout.ids(messages, self._tokenizer)

    def _shape(self, sampled: list[int], messages: list[JSON], *, tools: bool) -> Shape | None:
        """Return the facts that decide on a layout, beside the end of the prompt; `None` = none is
        kept.

        A reply counts by its control tokens, in order, and -1 for ordinary ones between them.
        """
        if len(messages) > MOST_MESSAGES:
            return None
        fields: list[tuple[str, int, int]] = []
        places: dict[object, int] = {None: -1}
        for message in messages:
            content = message["content"]
            if content.__class__ is not str or not content or content.isspace():
                return None
            call = name = -1
            if "tool_call_id" in message:
                call = places.setdefault(message["tool_call_id"], len(places))
            if "name" in message:
                name = places.setdefault(message["name"], len(places))
            fields += ((message["role"], call, name),)
        control = self._tokenizer.control_ids
        if len(sampled) > 1 and control.isdisjoint(sampled[:-1]):
            sampled = sampled[-2:]
        marks: list[int] = []
        for id_ in sampled:
            mark = id_ if id_ in control else -1
            if mark >= 0 or not marks or marks[-1] >= 0:
                marks += (mark,)
        if len(marks) > MOST_MARKS or "" in places:
            return None
        return tuple(marks), tuple(fields), tools

    def end(self, tail: list[int]) -> tuple[int, ...] | None:
        """Return the last ids of a prompt up to a text token (generation prompt, header) if they
        are known.

        `tail` are the prompt's last ids; `None` = they end in a way that was not seen before.
        """
        control = self._tokenizer.control_ids
        for end, listed, size in self._sizes:
            if tail[-size:] == listed and len(tail) > size and tail[-size - 1] not in control:
                return end
        return None

    def _learn_end(
        self, tail: list[int], sampled: list[int], messages: list[JSON], ask: Suffix
    ) -> None:
        """Remember the ids behind the last new text: the next prompt ends in them."""
        self._looked += 1
        probes = _with(messages, _texts(0, _WORDS))
        layout = self._laid(tail, sampled, probes, ask)
        if layout is None:
            return
        control = self._tokenizer.control_ids
        last = len(layout.pieces[-1][1] if layout.pieces else layout.first)
        ids = layout.ids(probes, self._tokenizer)
        at = next((at for at in range(len(ids) - last, len(ids)) if ids[at] in control), 0)
        while at and ids[at - 1] in control:
            at -= 1
        if at:  # text of a message holds no control token, so that none can look alike
            self._ends = {**self._ends, tuple(ids[at:]): {}}
            self._sizes = [(end, list(end), len(end)) for end in self._ends]

    def _learned(
        self,
        end: tuple[int, ...],
        marks: tuple[int, ...],
        sampled: list[int],
        messages: list[JSON],
        ask: Suffix,
    ) -> Layout | None:
        """Return the layout of a shape; `None` where the family looks at more than the shape."""
        words = self._fillers[0]
        layout = self._laid([*words, *end], sampled, _with(messages, _texts(0, _WORDS)), ask)
        if layout is None:
            return None
        before = [(words, filler) for filler in self._fillers]
        before += [(filler, words) for filler in self._fillers]
        for turn, (asked, said) in enumerate(before + [(words, words)] * len(_TEXTS)):
            reply = [id_ for mark in marks for id_ in (said if mark < 0 else [mark])]
            escape = self._tokenizer.escape
            probes = [
                {field: escape(text) for field, text in message.items()}
                for message in _with(messages, _texts(turn, "a short one"))
            ]
            wanted = ask([*asked, *end], reply, probes)
            if wanted is None or layout.ids(probes, self._tokenizer) != wanted:
                return None
        return layout

    def _laid(
        self, tail: list[int], sampled: list[int], probes: list[JSON], ask: Suffix
    ) -> Layout | None:
        """Return the layout that the family makes of probe texts; `None` = it refuses."""
        slots: dict[str, _Slot] = {}
        for index, message in enumerate(probes):
            for field in _FIELDS:
                if field in message:
                    text: str = message[field]
                    slots.setdefault(text, _Slot(index, field, stripped=False))
                    slots.setdefault(text.strip(), _Slot(index, field, stripped=True))
        with self._tokenizer.placeholders() as texts:
            ids = ask(tail, sampled, probes)
        if ids is None:
            return None
        found = re.compile("(" + "|".join(map(re.escape, slots)) + ")")
        first: list[int] = []
        pieces: list[tuple[_Text, list[int]]] = []
        for id_ in ids:
            plain = pieces[-1][1] if pieces else first
            parts = [] if id_ >= 0 else found.split(texts[-id_ - 1])
            if len(parts) <= 1:
                plain += [id_] if id_ >= 0 else self._tokenizer.encode(parts[0])
                continue
            # Of what was split every second part is a slot.
            held = zip(parts[:-1:2], [slots[part] for part in parts[1::2]], strict=True)
            pieces.append(((tuple(held), parts[-1]), []))
        return Layout(first, tuple(pieces))


def _texts(turn: int, words: str) -> Iterator[str]:
    """Yield different texts for the fields of a turn's messages; in turn 0 with space around."""
    for place in count():
        if turn == 0:
            yield f"{_SPACE}{place} {words}{place}{_SPACE}"
        else:
            yield _TEXTS[(turn + place) % len(_TEXTS)].format(f"{place} {words}")


def _with(messages: list[JSON], texts: Iterator[str]) -> list[JSON]:
    """Return the messages with other texts; ids and names that were the same stay the same."""
    given: dict[str, str] = {}
    made: list[JSON] = []
    for message in messages:
        probe: JSON = {"role": message["role"]}
        for field in _FIELDS:
            if field == "content":
                probe[field] = next(texts)
            elif (value := message.get(field)) is not None:
                if value not in given:
                    given[value] = next(texts)
                probe[field] = given[value]
        made.append(probe)
    return made


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


class PlaceholderFamily:
    """A family that never sees the tokens of long texts."""

    def __init__(self, family: Family, tokenizer: PromptTokenizer, *, plain: bool = False) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._marked = "</think>" in tokenizer.added
        """True if the end of reasoning is a token of its own, not text that must be looked for."""
        self._stops = family.get_stop_token_ids()
        self._open = tokenizer.control_ids - frozenset(self._stops)
        self.layouts = Layouts(tokenizer)
        self._plain = PlainReplies(family, tokenizer) if plain else None

    def render_ids(
        self, messages: list[JSON], *, tools: list[JSON] | None, add_generation_prompt: bool
    ) -> list[int]:
        """Return the ids of a whole conversation, whose long texts are tokenised apart."""
        ids = self._tokenizer.laid_out(
            lambda: self._family.render_ids(
                messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        )
        assert ids is not None, "a family lays out whole prompts, or raises"
        return ids

    def suffix(
        self, prompt: list[int], completion: list[int], new: list[JSON], tools: list[JSON] | None
    ) -> list[int] | None:
        """Return the ids that new messages add behind prompt and completion; `None` = the family
        refuses.

        The family is asked only where no layout is known.
        """

        def ask(tail: list[int], sampled: list[int], new: list[JSON]) -> list[int] | None:
            return self._suffix(tail, sampled, new, tools=tools)

        return self.layouts.suffix(prompt, completion, new, tools=tools is not None, ask=ask)

    def parse_response(
        self, token_ids: list[int], *, tools: list[JSON] | None, prompt_ids: list[int]
    ) -> Parsed:
        """Parse a sampled turn; one without control tokens without the family's parser where
        possible.
        """
        if self._plain is not None and (end := self.layouts.end(prompt_ids)) is not None:
            said = self._plain.read(token_ids, end, tools)
            if said is not None:
                return said
        return self._family.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def text(
        self, token_ids: list[int], *, tools: list[JSON] | None, prompt_ids: list[int]
    ) -> str | None:
        """Return the text of a sampled turn that is text only; `None` = `parse_response` must parse
        it.

        Of the prompt the last `END` ids are enough.
        """
        if self._plain is None or (end := self.layouts.end(prompt_ids)) is None:
            return None
        return self._plain.text(token_ids, end, tools)

    def get_stop_token_ids(self) -> list[int]:
        return list(self._stops)

    def _suffix(
        self, tail: list[int], sampled: list[int], new: list[JSON], *, tools: list[JSON] | None
    ) -> list[int] | None:
        """Return the family's own suffix.

        Of a turn that is all plain text it is shown only the end.
        """
        control = self._tokenizer.control_ids
        shown = sampled
        if self._marked and control.isdisjoint(shown[:-1]) and self._open.isdisjoint(shown[-1:]):
            shown = shown[-2:]
        return suffix_of(self._family, tail, shown, new, tools)


def suffix_of(
    family: Family | PlaceholderFamily,
    prompt: list[int],
    completion: list[int],
    new: list[JSON],
    tools: list[JSON] | None,
) -> list[int] | None:
    """Return the ids that a model family's renderer adds for new messages behind prompt and
    completion.

    `None` = it refuses.
    """
    if isinstance(family, PlaceholderFamily):
        return family.suffix(prompt, completion, new, tools)
    found = family.bridge_to_next_turn(prompt, completion, new, tools=tools)
    before = [*prompt, *completion]
    if found is None or found.token_ids[: len(before)] != before:
        return None  # a family that does not keep what was sampled is of no use
    return found.token_ids[len(before) :]


def with_placeholders(
    family: Family, tokenizer: PromptTokenizer, *, plain: bool = False
) -> Family | PlaceholderFamily:
    """Return `family` with placeholders for long texts, or itself where that changes its ids.

    With `plain`, replies without control tokens are parsed without the family's parser.
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
            wanted = _outcome(suffix_of, family, prompt, sampled, new, None)
            if wanted is None:
                continue  # no use is made of it
            if _outcome(suffix_of, made, prompt, sampled, new, None) != wanted:
                return False
    return bool(asked)


def _rendered(family: WholeRenderer, messages: list[JSON]) -> list[int]:
    return family.render_ids(messages, tools=None, add_generation_prompt=True)


def _outcome(lay: Callable[..., list[int] | None], *asked: object) -> list[int] | None:
    """Return the rendered ids; `None` = refused."""
    try:
        with boundary(RenderError, "laying out"):
            return lay(*asked)
    except RenderError:
        return None

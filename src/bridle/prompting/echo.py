"""Classification of the difference between an echoed assistant turn and the delivered one. Pure.

Asked only when the chain has already said that they are not equal, and only under an equal prompt
(or with an id of ours in the turn), so a wrong answer here can merge nothing across prompts.

Harnesses validate arguments before they run a tool, and echo the validated ones: defaults filled
in, unknown keys dropped, `"5"` as 5, `null` for a missing key. `explains` recognises these by the
tool's schema: the call means the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any, Final

from bridle.prompting.arguments import canonical_json, parsed_object, text_bytes
from bridle.prompting.canonical import Atom, AtomKind, digest
from bridle.types import JSON, ToolSpec


class Drift(StrEnum):
    """Change that a harness made to a delivered turn."""

    WHITESPACE = "whitespace"
    """White space in the text."""
    REWRITTEN_ARGS = "rewritten_args"
    """Malformed arguments of a call were repaired or replaced; same text, same names."""
    NORMALISED_ARGS = "normalised_args"
    """Valid arguments differ by what their schema explains: defaults, types, unknown keys, null."""
    EDITED_ARGS = "edited_args"
    """Valid arguments mean something else."""
    TEXT_DROPPED = "text_dropped"
    """Text beside calls is gone; ids prove every call of the reply."""
    THOUGHT_INLINED = "thought_inlined"
    """Reasoning came back as text between `<think>` tags."""
    REWRITTEN_CALL = "rewritten_call"
    """A call was renamed (an unknown or malformed one turned into an "invalid" tool)."""
    TEXT_APPENDED = "text_appended"
    """It wrote something into the text beside ours."""
    CALLS_AS_TEXT = "calls_as_text"
    """Calls were turned into text."""
    PARTIAL = "partial"
    """Only the beginning of the turn was kept."""
    CHANGED = "changed"
    """Anything else, of a turn that an id proves to be ours."""


EXTENDABLE = frozenset(
    {
        Drift.WHITESPACE,
        Drift.REWRITTEN_ARGS,
        Drift.NORMALISED_ARGS,
        Drift.REWRITTEN_CALL,
        Drift.TEXT_DROPPED,
        Drift.THOUGHT_INLINED,
    }
)
"""Rewritten turns over which extending is right: the policy said its own tokens, the harness's own
words follow. The others show the model something else than it said."""

WEAK = (
    Drift.WHITESPACE,
    Drift.THOUGHT_INLINED,
    Drift.TEXT_APPENDED,
    Drift.CALLS_AS_TEXT,
)
"""Relations that text alone may prove, where no id came back; tried in this order."""


_THOUGHT = re.compile(r"<(think|thinking)>(.*?)</\1>", re.DOTALL)


def drift_of(
    echo: Sequence[Atom],
    answer: Sequence[Atom],
    *,
    tools: Sequence[ToolSpec] = (),
    reasoning: Collection[bytes] = (),
) -> Drift:
    """Return the kind of difference between an echoed turn and the delivered answer.

    Args:
        echo: The turn's atoms as they came back (TEXT, CALL).
        answer: The atoms that were delivered; not equal to `echo`.
        tools: The request's tools, whose schemas explain normalised arguments.
        reasoning: Digests of the answer's reasoning.
    """
    if is_beginning(echo, answer):
        return Drift.PARTIAL
    said, shown = _squeezed(answer), _squeezed(echo)
    called, recalled = _calls(answer), _calls(echo)
    same_calls = [call.digest for call in called] == [call.digest for call in recalled]
    if len(called) == len(recalled):
        if said == shown:
            return Drift.WHITESPACE if same_calls else _calls_drift(called, recalled, tools)
        if not shown and all(
            o.ids and o.ids == e.ids for o, e in zip(called, recalled, strict=True)
        ):
            changed = None if same_calls else _calls_drift(called, recalled, tools)
            return Drift.TEXT_DROPPED if changed in {None, *EXTENDABLE} else Drift.EDITED_ARGS
        if same_calls and _is_inlined(echo, said, reasoning):
            return Drift.THOUGHT_INLINED
    if said in shown and called and not recalled:
        return Drift.CALLS_AS_TEXT
    return Drift.TEXT_APPENDED if said and said in shown and same_calls else Drift.CHANGED


def _calls_drift(
    called: Sequence[Atom], recalled: Sequence[Atom], tools: Sequence[ToolSpec]
) -> Drift:
    """Classify the difference of equally many calls; the first difference in meaning decides."""
    if [call.text for call in called] != [call.text for call in recalled]:
        return Drift.REWRITTEN_CALL
    schemas = {tool.name: tool.parameters or {} for tool in tools}
    found = Drift.NORMALISED_ARGS
    for ours, theirs in zip(called, recalled, strict=True):
        if ours.digest == theirs.digest:
            continue
        if ours.arguments is None or theirs.arguments is None:
            return Drift.EDITED_ARGS
        if (sampled := parsed_object(ours.arguments)) is None:
            found = Drift.REWRITTEN_ARGS
            continue
        echoed = parsed_object(theirs.arguments)
        schema = schemas.get(ours.text or "", {})
        if echoed is None or not explains(schema, sampled, echoed):
            return Drift.EDITED_ARGS
    return found


def _is_inlined(echo: Sequence[Atom], said: str, reasoning: Collection[bytes]) -> bool:
    """Return whether the echo's text is the answer's with its own reasoning between tags."""
    text = "".join(atom.text or "" for atom in echo if atom.kind is AtomKind.TEXT)
    thoughts = [found[2].strip() for found in _THOUGHT.finditer(text)]
    if not thoughts or "".join(_THOUGHT.sub("", text).split()) != said:
        return False
    return all(
        digest("reasoning", text_bytes(thought.strip())) in reasoning for thought in thoughts
    )


def is_beginning(echo: Sequence[Atom], answer: Sequence[Atom]) -> bool:
    """Return whether `echo` is a proper prefix of `answer`; its last text may be cut."""
    if not echo or len(echo) > len(answer):
        return False
    *whole, last = echo
    if [atom.digest for atom in whole] != [atom.digest for atom in answer[: len(whole)]]:
        return False
    other = answer[len(whole)]
    if last.digest == other.digest:
        return len(echo) < len(answer)
    texts = last.kind is AtomKind.TEXT and other.kind is AtomKind.TEXT
    return texts and (other.text or "").startswith(last.text or "")


def has_text(answer: Sequence[Atom]) -> bool:
    """Return whether the answer has text by which its echo can be recognised."""
    return any(atom.kind is AtomKind.TEXT for atom in answer)


def _calls(atoms: Sequence[Atom]) -> list[Atom]:
    return [atom for atom in atoms if atom.kind is AtomKind.CALL]


def _squeezed(atoms: Sequence[Atom]) -> str:
    """Return all text without white space."""
    texts = (atom.text or "" for atom in atoms if atom.kind is AtomKind.TEXT)
    return "".join("".join(texts).split())


MAX_DEPTH: Final = 50
"""Deeper values are compared as they are."""


def explains(schema: JSON, sampled: Any, echoed: Any) -> bool:  # noqa: ANN401 - any JSON values
    """Return whether validating `sampled` by `schema` may give `echoed`."""
    return _Comparison(schema).explains(schema, sampled, echoed, 0)


class _Comparison:
    """One comparison; each pair of values is compared once, and tried once by each schema.

    Values and schemas are known by their `id`: all of them live as long as the comparison.
    """

    def __init__(self, root: JSON) -> None:
        self._root = root
        self._equal: dict[tuple[int, int], bool] = {}
        self._explained: dict[tuple[int, int, int], bool] = {}

    def explains(self, schema: object, sampled: Any, echoed: Any, depth: int) -> bool:  # noqa: ANN401 - any JSON values
        pair = id(sampled), id(echoed)
        if pair not in self._equal:
            self._equal[pair] = canonical_json(sampled) == canonical_json(echoed)
        if self._equal[pair]:
            return True
        found = _resolved(self._root, schema)
        if found is None or depth > MAX_DEPTH:
            return False
        key = id(found), *pair
        if key not in self._explained:
            self._explained[key] = False  # while a schema that refers to itself is tried
            self._explained[key] = self._tried(found, sampled, echoed, depth)
        return self._explained[key]

    def _tried(self, schema: JSON, sampled: Any, echoed: Any, depth: int) -> bool:  # noqa: ANN401 - any JSON values
        choices = [one for key in ("anyOf", "oneOf") for one in _listed(schema, key)]
        if any(self.explains(one, sampled, echoed, depth + 1) for one in choices):
            return True
        if isinstance(sampled, dict) and isinstance(echoed, dict):
            return self._same_object(schema, sampled, echoed, depth)
        if isinstance(sampled, list) and isinstance(echoed, list):
            pairs = zip(sampled, echoed, strict=False)
            items = schema.get("items")
            same = (self.explains(items, one, other, depth + 1) for one, other in pairs)
            return len(sampled) == len(echoed) and all(same)
        return _is_scalar(sampled) and _is_scalar(echoed) and _coerced(sampled) == _coerced(echoed)

    def _same_object(self, schema: JSON, sampled: JSON, echoed: JSON, depth: int) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return False
        required = _listed(schema, "required")
        for key in sampled.keys() | echoed.keys():
            declared = _resolved(self._root, properties.get(key))
            if key not in echoed:  # dropped
                if declared is not None and not _is_missing(declared, sampled[key]):
                    return False
            elif key not in sampled:  # filled
                if declared is None or (key in required and not _is_missing(declared, echoed[key])):
                    return False
            elif not self.explains(declared, sampled[key], echoed[key], depth + 1):
                return False
        return True


def _listed(schema: JSON, key: str) -> list[Any]:
    """Return the list under a key; empty where something else stands there."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _is_missing(declared: JSON, value: object) -> bool:
    """Return whether a key with this value has the meaning of its absence."""
    if value is None:
        return True
    return "default" in declared and canonical_json(declared["default"]) == canonical_json(value)


def _resolved(root: JSON, schema: object) -> JSON | None:
    """Return the schema behind a reference within `root`; `None` = there is none."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict):
            return None
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for name in reference.removeprefix("#").strip("/").split("/"):
            schema = schema.get(name) if isinstance(schema, dict) else None
    return None


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float | bool)


def _coerced(value: str | float | bool) -> object:  # noqa: FBT001 - a JSON value
    """Return a scalar as a validator may read it."""
    text = value.strip().lower() if isinstance(value, str) else value
    if isinstance(text, bool) or text in ("true", "false"):
        return ("flag", text in (True, "true"))
    try:
        return ("number", float(text))
    except (OverflowError, ValueError):
        return ("value", value)

"""Differences between a sampled call and its echo that the tool's schema explains. Pure.

Harnesses validate arguments before they run a tool, and echo what validation made of them: defaults
filled in, unknown keys dropped, `"5"` as 5, `null` for a missing key. The call means the same.
"""

from __future__ import annotations

from typing import Any, Final

from bridle.prompting.arguments import canonical_json
from bridle.types import JSON

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
    """The list under a key; empty where something else stands there."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _is_missing(declared: JSON, value: object) -> bool:
    """Return whether a key with this value has the meaning of its absence."""
    if value is None:
        return True
    return "default" in declared and canonical_json(declared["default"]) == canonical_json(value)


def _resolved(root: JSON, schema: object) -> JSON | None:
    """The schema behind a reference within `root`; `None` = there is none."""
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
    """A scalar as a validator may read it."""
    text = value.strip().lower() if isinstance(value, str) else value
    if isinstance(text, bool) or text in ("true", "false"):
        return ("flag", text in (True, "true"))
    try:
        return ("number", float(text))
    except (OverflowError, ValueError):
        return ("value", value)

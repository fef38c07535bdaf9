"""Which differences between a sampled call and its echo the tool's schema explains. Pure.

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
    """Whether validating `sampled` by `schema` may give `echoed`."""
    return _explains(schema, schema, sampled, echoed, 0)


def _explains(root: JSON, schema: object, sampled: Any, echoed: Any, depth: int) -> bool:  # noqa: ANN401 - any JSON values
    if canonical_json(sampled) == canonical_json(echoed):
        return True
    schema = _resolved(root, schema)
    if schema is None or depth > MAX_DEPTH:
        return False
    choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if any(_explains(root, one, sampled, echoed, depth + 1) for one in choices):
        return True
    if isinstance(sampled, dict) and isinstance(echoed, dict):
        return _same_object(root, schema, sampled, echoed, depth)
    if isinstance(sampled, list) and isinstance(echoed, list):
        pairs = zip(sampled, echoed, strict=False)
        items = schema.get("items")
        same = (_explains(root, items, one, other, depth + 1) for one, other in pairs)
        return len(sampled) == len(echoed) and all(same)
    return _is_scalar(sampled) and _is_scalar(echoed) and _coerced(sampled) == _coerced(echoed)


def _same_object(root: JSON, schema: JSON, sampled: JSON, echoed: JSON, depth: int) -> bool:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return False
    required = schema.get("required") or ()
    for key in sampled.keys() | echoed.keys():
        declared = _resolved(root, properties.get(key))
        if key not in echoed:  # dropped
            if declared is not None and not _is_missing(declared, sampled[key]):
                return False
        elif key not in sampled:  # filled
            if declared is None or (key in required and not _is_missing(declared, echoed[key])):
                return False
        elif not _explains(root, declared, sampled[key], echoed[key], depth + 1):
            return False
    return True


def _is_missing(declared: JSON, value: object) -> bool:
    """Whether a key with this value means what its absence means."""
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


def _coerced(value: object) -> object:
    """A scalar as a validator may read it."""
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in {"true", "false"}:
            return ("flag", text.lower() == "true")
        try:
            return ("number", float(text))
        except ValueError:
            return ("text", value)
    if isinstance(value, bool):
        return ("flag", value)
    return ("number", float(value)) if isinstance(value, int | float) else value

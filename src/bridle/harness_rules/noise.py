"""Comparison of a prompt with the captured one, which may differ in texts that vary by run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridle.harness_rules.base import Varying

VARYING = (
    Varying("session_folder", re.compile(r"/bridle-[a-z0-9_]{8}/[0-9a-f]{8}\b")),
    Varying(
        "date",
        re.compile(
            r"(?i)\b(?:current|today's)[ _]date(?:time| and time)?(?:>|:| is:?) ?"
            r"(?:\d{4}-\d\d-\d\d(?:T[\d:.]+(?:Z|[+-]\d\d:\d\d)?)?|\w+,? \w+ \d+,? \d{4})"
        ),
    ),
)
"""Texts of many harnesses: the folder of a session in runtime `local`, and the date of the run."""


def differing(old: str, new: str, rules: Sequence[Varying]) -> tuple[str, ...] | None:
    """Name the rules whose texts are all that two texts differ in; `None` = they differ in more."""
    names: list[str] = []
    for rule in rules:
        if rule.pattern.findall(old) != rule.pattern.findall(new):
            names.append(rule.name)
        old, new = (rule.pattern.sub(f"<{rule.name}>", text) for text in (old, new))
    return tuple(names) if old == new else None

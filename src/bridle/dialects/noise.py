"""Named and audited rules that take noise out of a request before the model sees it.

Each rule says what it removes and why that means nothing to the model. What a rule removed stands
in `ModelRequest.extra["removed"][rule]`, so that the exchange records it and `kinds` can read it;
the request as it came stays in the record in any case. A rule that is switched off leaves the
request as it is, or refuses what cannot be served.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bridle.errors import RequestError


@dataclass(frozen=True, slots=True)
class NoiseRule:
    """One kind of thing that is removed."""

    name: str
    what: str
    why: str


BILLING = NoiseRule(
    "claude_billing_header",
    "the first system block of a Messages request, if its text starts with "
    "`x-anthropic-billing-header:`",
    "Claude Code writes its version and a checksum of the prompt there for its provider's "
    "accounting. It differs between the conversations of one group, says nothing to the model, and "
    "spoils the shared prefix.",
)
SERVER_TOOLS = NoiseRule(
    "server_tools",
    "tools that the provider itself would run (web search, code execution, Google built-ins)",
    "Only the provider can run them; a model that was shown one would call what nobody answers.",
)
RULES: dict[str, NoiseRule] = {rule.name: rule for rule in (BILLING, SERVER_TOOLS)}
"""Every rule by its name; all are on unless a dialect is built without them."""


@dataclass(frozen=True, slots=True)
class Varying:
    """A text that a harness writes anew in each run; a fork may differ from its capture in it."""

    name: str
    pattern: re.Pattern[str]


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


def split_billing(texts: Sequence[str], rules: Collection[str]) -> tuple[int, dict[str, list[str]]]:
    """Count the leading system blocks to skip, and tell what that removes."""
    if BILLING.name in rules and texts and texts[0].startswith("x-anthropic-billing-header:"):
        return 1, {BILLING.name: [texts[0]]}
    return 0, {}


def allow_removed(removed: Mapping[str, list[str]], rules: Collection[str], path: str) -> None:
    """Refuse a request whose tools could only be served by a rule that is off."""
    tools = removed.get(SERVER_TOOLS.name)
    if tools and SERVER_TOOLS.name not in rules:
        message = f"Tools that the provider runs are not available here: {', '.join(tools)}."
        raise RequestError(message, param=path)

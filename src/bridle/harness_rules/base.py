"""Rules about one harness: how its kinds of call are recognised, and which texts vary by run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from bridle.types import Kind, ModelRequest, Role

Headers: TypeAlias = Mapping[str, str]
"""Request headers with lower-case names."""


@dataclass(frozen=True, slots=True)
class KindRule:
    """A test of one request that decides its kind of call."""

    name: str
    kind: Kind
    why: str
    applies: Callable[[Headers, ModelRequest], bool]
    universal: bool = False
    """True if it is tried for every harness, because it looks at a header or field that no other
    program sends. A rule that reads contents is tried for the harnesses whose rows name it only: a
    task about titles or commit messages looks the same."""

    @classmethod
    def declared(
        cls,
        name: str,
        kind: Kind,
        *,
        system_contains: str | None = None,
        last_user_contains: str | None = None,
        model: str | None = None,
        user_agent: str | None = None,
    ) -> KindRule:
        """Return a user's own rule (`bridle.config.CallRule`): every given condition must hold."""

        def applies(headers: Headers, request: ModelRequest) -> bool:
            return (
                (system_contains or "") in system_text(request)
                and (last_user_contains or "") in last_user_text(request)
                and fnmatchcase(request.model, model or "*")
                and (user_agent or "").lower() in headers.get("user-agent", "").lower()
            )

        return cls(name, kind, "Declared for the session's harness.", applies)


@dataclass(frozen=True, slots=True)
class Varying:
    """A text that a harness writes anew in each run; a fork may differ from its capture in it."""

    name: str
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRules:
    """The row of one harness."""

    adapter: str | None = None
    """`module:Class` of its adapter; `None` = Bridle does not run it, but recognises its calls."""
    user_agents: tuple[str, ...] = ()
    """Parts of the `User-Agent` headers that it sends, in lower case. Several harnesses send that
    of a bare SDK: they are recognised by the session's harness only."""
    kinds: tuple[KindRule, ...] = ()
    """Rules about the contents of its calls."""
    summary_requests: tuple[str, ...] = ()
    """Texts of the last user message by which it asks for a summary of the conversation."""
    summary_prompts: tuple[str, ...] = ()
    """Texts of the system message of such a call, where it has no tools."""
    noise: tuple[Varying, ...] = ()
    shell_tools: tuple[str, ...] = ()
    """Names of its tools that run a command, in lower case, the preferred one first."""


def last_user_text(request: ModelRequest) -> str:
    """Return the text of the last message if it is a user's, else an empty text."""
    last = request.messages[-1]
    return last.text if last.role is Role.USER else ""


def system_text(request: ModelRequest) -> str:
    """Return the text of the first message if it is the system's, else an empty text."""
    first = request.messages[0]
    return first.text if first.role is Role.SYSTEM else ""


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

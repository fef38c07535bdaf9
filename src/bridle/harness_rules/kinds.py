"""The kind of a call: agent, sub-agent, compaction or side call.

Rules are tried in order and the first that applies decides. `agent` is the default; a call without
tools is no other kind for that reason alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from bridle.harness_rules.base import Headers, KindRule
from bridle.harness_rules.table import HARNESS_RULES, KIND_RULES
from bridle.types import Kind, ModelRequest


def kind_of(
    headers: Headers,
    request: ModelRequest,
    harness: str | None = None,
    declared: Sequence[KindRule] = (),
) -> tuple[Kind, str | None]:
    """Return the kind of a call and the name of the rule that decided; `None` = the default.

    Rules that the session `declared` come first. A rule of ours that reads contents is tried only
    where the session's `harness` or the user agent names a harness whose row has it.
    """
    for rule in (*declared, *_rules_of(headers.get("user-agent", ""), harness)):
        if rule.applies(headers, request):
            return rule.kind, rule.name
    return Kind.AGENT, None


def decided_by_head(headers: Headers, harness: str | None, declared: Sequence[KindRule]) -> bool:
    """Return whether requests with one head and one `ModelRequest.extra` are of one kind."""
    rules = (*declared, *_rules_of(headers.get("user-agent", ""), harness))
    return all(rule.universal for rule in rules)


@lru_cache(maxsize=64)
def _rules_of(agent: str, harness: str | None) -> tuple[KindRule, ...]:
    agent = agent.lower()
    senders = {
        name
        for name, row in HARNESS_RULES.items()
        if name == harness or any(mark in agent for mark in row.user_agents)
    }
    own = {rule.name for name in senders for rule in HARNESS_RULES[name].kinds}
    return tuple(rule for rule in KIND_RULES if rule.universal or rule.name in own)

"""Named and audited rules that take noise out of a request before the model sees it.

Each rule says what it removes and why that means nothing to the model. The removed texts are in
`ModelRequest.extra["removed"][rule]`, for the exchange's record and for `bridle.harness_rules`; the
record has the original request, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
"""Every rule by its name."""


def split_billing(texts: Sequence[str]) -> tuple[int, dict[str, list[str]]]:
    """Count the leading system blocks to skip as billing headers (`BILLING`).

    Also returns the removed texts, by the name of the rule.
    """
    if texts and texts[0].startswith("x-anthropic-billing-header:"):
        return 1, {BILLING.name: [texts[0]]}
    return 0, {}

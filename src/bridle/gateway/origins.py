"""Origin of a conversation without a mark: a sampled call or summary of the same session.

The dialects' rules know the marks that harnesses put on the wire. What they leave open is settled
here by `Lineage`, which knows what the session's own replies said.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from bridle.gateway.call import Asked
from bridle.gateway.registry import GatewaySession
from bridle.prompting.conversation import Placement, PlacementKind
from bridle.types import Kind, ModelRequest

SPAWNED: Final = "spawned"
"""The rule that makes a call a sub-agent's by the instruction that a call of ours gave it."""

SUMMARISED: Final = "summarised"
"""Root reason of what goes on from a summary of ours."""


def after_summary(
    session: GatewaySession, request: ModelRequest, placement: Placement
) -> Placement:
    """A root (`placement`) whose text holds a summary of ours continues what wrote it."""
    parent = session.lineage.summarised_by(request.messages)
    if parent not in session.calls:
        return placement
    return replace(placement, kind=PlacementKind.FORK, parent=parent, reason=SUMMARISED)


def of_subagent(
    session: GatewaySession, request: ModelRequest, placement: Placement, asked: Asked
) -> Asked:
    """A call that no mark tells apart is a sub-agent's if its task is in a call of ours.

    So are those that continue one.
    """
    if asked.kind is not Kind.AGENT or asked.kind_rule is not None:
        return asked
    parent = None if placement.parent is None else session.calls.get(placement.parent)
    new = placement.new_from if placement.extend else 0
    inherits = parent is not None and parent.asked.kind is Kind.SUBAGENT
    if inherits or session.lineage.is_spawned(request.messages[new:]):
        return replace(asked, kind=Kind.SUBAGENT, kind_rule=SPAWNED)
    return asked

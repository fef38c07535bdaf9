"""The lineage of calls: replies are indexed, and the turns that later requests show are counted.

The dialects' rules know the marks that harnesses put on the wire. Where a conversation has none,
its origin is a sampled call or a summary of the same session, which `Lineage` finds by what the
session's own replies said.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Final

import numpy as np

from bridle.gateway.call import Asked, Call, Question
from bridle.gateway.recording import issued_ids
from bridle.gateway.registry import GatewaySession
from bridle.prompting.canonical import Canonical, answer_atoms, joined_atoms
from bridle.prompting.conversation import Placement, PlacementKind
from bridle.prompting.prompt import PromptIds
from bridle.prompting.turns import TurnCounts, count_turns
from bridle.types import Kind, Message, ModelRequest


def index_reply(
    session: GatewaySession,
    exchange_id: str,
    asked: tuple[ModelRequest, Canonical, Hashable],
    shown: tuple[Message, ...],
    *,
    tokens: int,
    kind: Kind,
) -> None:
    """Index a committed reply, so that requests that contain it are recognised as its continuation.

    `asked` is its request, the canonical form and the template arguments of it; `shown` is the
    reply as its dialect's messages, `tokens` how many were sampled.
    """
    request, key, template_args = asked
    session.conversation.commit(
        exchange_id,
        key,
        answer_atoms(shown, request.tools),
        issued_ids(shown),
        joined=() if request.prefill is None else joined_atoms(request, shown),
        template_args=template_args,
        tokens=tokens,
    )
    session.lineage.note(exchange_id, shown, summary=kind is Kind.COMPACTION)


def turns_shown(
    session: GatewaySession, question: Question, parent: Call | None
) -> TurnCounts | None:
    """Return the counts of assistant turns (verbatim, re-rendered, foreign) of a request whose
    prompt extends `parent`.

    Without a `parent` all turns are counted anew. `None` = the counts of the parent are not known
    (a capture file of an older version).
    """
    request, before = question.request, None
    if parent is not None and (before := parent.turns) is None:
        return None
    messages = request.messages if request.prefill is None else request.messages[:-1]
    placement = question.placement
    return count_turns(
        session.conversation,
        messages,
        question.canonical,
        first=placement.new_from,
        before=before,
        rewritten=placement.parent if placement.drift and parent is None else None,
    )


def turns_under(session: GatewaySession, call: Call, prompt: PromptIds) -> TurnCounts | None:
    """Return the counts of assistant turns of a call whose `prompt` was not made from its parent's
    ids.

    An engine that rendered the messages itself may have come to the same ids.
    """
    question = call.posed()
    if not question.placement.extend:
        return call.turns
    parent = session.calls.get(question.placement.parent or "")
    return turns_shown(session, question, standing(prompt, parent))


def standing(prompt: PromptIds, parent: Call | None) -> Call | None:
    """Return `parent` if a prompt that was not made from its ids begins with all of them, else
    `None`.
    """
    if parent is None or parent.prompt is None:
        return None
    before, output_ids = parent.sampled()
    ids = np.concatenate((before.array(), output_ids))
    return parent if np.array_equal(prompt.array()[: len(ids)], ids) else None


SPAWNED: Final = "spawned"
"""The rule that makes a call a sub-agent's by the instruction that a call of ours gave it."""

SUMMARISED: Final = "summarised"
"""Root reason of what goes on from a summary of ours."""


def after_summary(
    session: GatewaySession, request: ModelRequest, placement: Placement
) -> Placement:
    """Return the placement of a root as a continuation, if its text contains a summary of this
    session.

    It then continues the exchange that wrote the summary.
    """
    parent = session.lineage.summarised_by(request.messages)
    if parent not in session.calls:
        return placement
    return replace(placement, kind=PlacementKind.FORK, parent=parent, reason=SUMMARISED)


def of_subagent(session: GatewaySession, question: Question, asked: Asked) -> Asked:
    """Return `asked` with the kind of a sub-agent if the call's task is an argument of an earlier
    tool call of the session, or if it continues a sub-agent's call.

    A call whose kind is marked is left alone.
    """
    if asked.kind is not Kind.AGENT or asked.kind_rule is not None:
        return asked
    parent, placement = question.parent, question.placement
    new = placement.new_from if placement.extend else 0
    inherits = parent is not None and parent.asked.kind is Kind.SUBAGENT
    if inherits or session.lineage.is_spawned(question.request.messages[new:]):
        return replace(asked, kind=Kind.SUBAGENT, kind_rule=SPAWNED)
    return asked

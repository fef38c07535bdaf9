"""The lineage of calls: replies are indexed, and the turns that later requests show are counted."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from bridle.gateway.call import Call, Question
from bridle.gateway.recording import issued_ids
from bridle.gateway.registry import GatewaySession
from bridle.prompting.canonical import Canonical, answer_atoms, joined_atoms
from bridle.prompting.prompt import PromptIds
from bridle.prompting.turns import TurnCounts
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
    """Have a committed reply found by the requests that show it.

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
    """The counts of a request whose prompt extends `parent`; `None` = it is a root.

    `None` is returned where those of the parent are not known (a capture file of an older version).
    """
    request, before = question.request, None
    if parent is not None and (before := parent.turns) is None:
        return None
    messages = request.messages if request.prefill is None else request.messages[:-1]
    placement = question.placement
    return session.conversation.turns.count(
        messages,
        question.canonical,
        first=placement.new_from,
        before=before,
        rewritten=placement.parent if placement.drift and parent is None else None,
    )


def turns_under(session: GatewaySession, call: Call, prompt: PromptIds) -> TurnCounts | None:
    """The counts of a call whose `prompt` was not made from its parent's ids.

    An engine that rendered the messages itself may have come to the same ids.
    """
    question = call.posed()
    if not question.placement.extend:
        return call.turns
    parent = session.calls.get(question.placement.parent or "")
    return turns_shown(session, question, standing(prompt, parent))


def standing(prompt: PromptIds, parent: Call | None) -> Call | None:
    """`parent`, if a prompt that was not made from its ids begins with all of them."""
    if parent is None or parent.prompt is None:
        return None
    before, output_ids = parent.sampled()
    ids = np.concatenate((before.array(), output_ids))
    return parent if np.array_equal(prompt.array()[: len(ids)], ids) else None

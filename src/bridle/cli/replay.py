"""A captured session as a scripted engine's script, so that any harness bug can be replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridle.trajectory.graph import Node, grow
from bridle.trajectory.transcript import Transcript
from bridle.types import JSON, Role

if TYPE_CHECKING:
    from bridle.capture.records import Exchange, SessionCapture


def script_of(capture: SessionCapture) -> JSON:
    """One conversation per leaf, longest first, with the exact ids that were sampled.

    A conversation is recognised by the system and the first user text of its root, so of branches
    of one root the longest plays. Replay needs the tokenizer of the run.
    """
    graph = grow(capture.session.session_id, capture.exchanges)
    transcript = Transcript(capture.exchanges, capture.bodies)
    paths = [_path(node) for node in graph.nodes.values() if node.is_leaf]
    paths.sort(key=len, reverse=True)
    return {"conversations": [_conversation(path, transcript) for path in paths]}


def _path(leaf: Node) -> list[Exchange]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return [node.exchange for node in reversed(path)]


def _conversation(path: list[Exchange], transcript: Transcript) -> JSON:
    messages = transcript.request(path[0]).messages
    said = {role: [m.text for m in messages if m.role is role] for role in Role}
    when = {"system_contains": said[Role.SYSTEM][:1], "user_contains": said[Role.USER][:1]}
    return {
        "when": {name: texts for name, texts in when.items() if any(texts)},
        "skip": len(said[Role.ASSISTANT]),
        "turns": [_turn(exchange, transcript) for exchange in path],
    }


def _turn(exchange: Exchange, transcript: Transcript) -> JSON:
    """The exact ids; the text beside them is for the reader of the script only."""
    turn: JSON = {"token_ids": exchange.output_ids.tolist()}
    if text := " ".join(message.text for message in transcript.reply(exchange)):
        turn["content"] = text
    if exchange.finish_reason == "length":
        turn["finish"] = "length"
    return turn

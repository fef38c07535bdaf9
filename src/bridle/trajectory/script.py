"""A captured session as a script of the scripted engine (`bridle show SESSION --as-script`). Pure.

A harness that meets this script samples the same ids again, so a session is replayed without its
model. Replay needs the tokenizer of the run. `tests/cli/test_show.py` replays one.
"""

from __future__ import annotations

from bridle.capture.records import Exchange, SessionCapture
from bridle.trajectory.graph import ExchangeNode, grow
from bridle.trajectory.transcript import Transcript
from bridle.types import JSON, Role


def script_of(capture: SessionCapture) -> JSON:
    """Convert a session to a script: a conversation per leaf, longest first, with the sampled ids.

    Conversations are recognised by the system and first user text of their root, so that of several
    branches of a root the longest is replayed.
    """
    graph = grow(capture.session.session_id, capture.exchanges)
    transcript = Transcript(capture.exchanges, capture.bodies)
    paths = [_path(node) for node in graph.nodes.values() if node.is_leaf]
    paths.sort(key=len, reverse=True)
    return {"conversations": [_conversation(path, transcript) for path in paths]}


def _path(leaf: ExchangeNode) -> list[Exchange]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return [node.exchange for node in reversed(path)]


def _conversation(path: list[Exchange], transcript: Transcript) -> JSON:
    messages = transcript.request(path[0]).messages
    texts = {role: [m.text for m in messages if m.role is role] for role in Role}
    when = {"system_contains": texts[Role.SYSTEM][:1], "user_contains": texts[Role.USER][:1]}
    return {
        "when": {name: found for name, found in when.items() if any(found)},
        "skip": len(texts[Role.ASSISTANT]),
        "turns": [_turn(exchange, transcript) for exchange in path],
    }


def _turn(exchange: Exchange, transcript: Transcript) -> JSON:
    """Return a turn with its ids; the text is for readers of the script only."""
    turn: JSON = {"token_ids": exchange.output_ids.tolist()}
    if text := " ".join(message.text for message in transcript.reply(exchange)):
        turn["content"] = text
    if exchange.finish_reason == "length":
        turn["finish"] = "length"
    return turn

"""The golden exchanges of `tests/golden`, read from their folders."""

import json
from pathlib import Path

from tests.dialects.exchange import HEAD, USAGE

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.anthropic import Anthropic
from bridle.dialects.base import StoredReply
from bridle.types import Dialect, FinishReason, ModelRequest, Reply, ToolCall

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(
    path.parent.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("*/*/PROVENANCE")
)
PATHS = {
    Dialect.OPENAI_CHAT: "/v1/chat/completions",
    Dialect.OPENAI_RESPONSES: "/v1/responses",
    Dialect.ANTHROPIC: "/v1/messages?beta=true",
}


def dialect_of(folder: str) -> Dialect:
    return Dialect(folder.split("/", maxsplit=1)[0])


def turn_of(folder: str):
    return json.loads((GOLDEN / folder / "turn.json").read_text())


def request_of(folder: str) -> ModelRequest:
    """The request as the gateway reads it, with its thread's history where it continues one."""
    dialect, turn = dialect_of(folder), turn_of(folder)
    path, _, query = turn.get("path", PATHS.get(dialect)).partition("?")
    route = recognise("POST", path, query, {})
    assert route is not None
    assert route.dialect is dialect
    body = (GOLDEN / folder / "request.json").read_bytes()
    if before := turn.get("continues"):
        began = request_of(before)
        reply = DIALECTS[dialect].reply_json(began, HEAD, reply_of(before), USAGE)
        kept = StoredReply(began.message_spans, reply, began.head, began.tools_span)
        body = Anthropic().continued(body, kept)
    return DIALECTS[dialect].parse(route, body, {})


def reply_of(folder: str) -> Reply:
    turn = turn_of(folder)
    return Reply(
        turn["content"],
        turn.get("reasoning"),
        tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in turn.get("tool_calls", [])),
        FinishReason(turn.get("finish", "stop")),
        stop_text=turn.get("stop_text"),
    )

"""Golden exchanges: what real clients send, what we make of it, and what they get.

Each folder of `tests/golden/DIALECT/FEATURE` holds `request.json` as it came over the wire,
`turn.json` (the reply to dress, the path where the dialect needs one), and what becomes of them:
`internal.json`, `reply.json`, `reply_messages.json`, `stream.sse`. PROVENANCE names the client
whose shape it is. `BRIDLE_TEST_REGOLD=1` writes the results anew; the change is reviewed as a diff.
"""

import dataclasses
import json
import os
from pathlib import Path

import msgspec
import pytest
from tests.dialects.exchange import HEAD, USAGE, live, synthetic

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.sse import SseParser
from bridle.prompting.canonical import canonical
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


def shown(value):  # noqa: PLR0911 - one return for each kind of value
    """A request as JSON: without what only repeats the raw bytes."""
    match value:
        case ModelRequest():
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            for raw in ("head", "message_spans", "span_digests", "tools_span"):
                del fields[raw]
            return {key: shown(item) for key, item in fields.items()}
        case dict():
            return {key: shown(item) for key, item in value.items()}
        case list() | tuple():
            return [shown(item) for item in value]
        case msgspec.Raw():
            return json.loads(bytes(value))
        case frozenset():
            return sorted(value)
        case _ if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return {key: shown(item) for key, item in fields.items() if given(item)}
        case _:
            return value


def given(value) -> bool:
    return value is not None and value is not False and value != ()


def reply_of(turn) -> Reply:
    return Reply(
        turn["content"],
        turn.get("reasoning"),
        tuple(ToolCall(c["id"], c["name"], c["arguments"]) for c in turn.get("tool_calls", [])),
        FinishReason(turn.get("finish", "stop")),
        stop_text=turn.get("stop_text"),
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_golden_exchange_is_read_and_written_as_before(folder):
    place = GOLDEN / folder
    dialect = Dialect(folder.split("/")[0])
    turn = json.loads((place / "turn.json").read_text())
    path, _, query = turn.get("path", PATHS.get(dialect)).partition("?")
    route = recognise("POST", path, query, {})
    assert route is not None
    assert route.dialect is dialect
    wire = DIALECTS[dialect]
    request = wire.parse(route, (place / "request.json").read_bytes(), {})
    reply = reply_of(turn)
    whole = wire.reply_json(request, HEAD, reply, USAGE)
    stream = live(wire.stream(request, HEAD), reply)
    results = {
        "internal.json": pretty(shown(request)),
        "reply.json": pretty(json.loads(whole)),
        "reply_messages.json": pretty(shown(wire.reply_messages(whole))),
        "stream.sse": stream.decode(),
    }
    for name, text in results.items():
        if os.environ.get("BRIDLE_TEST_REGOLD"):
            (place / name).write_bytes(text.encode())
        assert (place / name).read_bytes().decode() == text, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_result_of_a_real_client_is_an_orphan(folder):
    place = GOLDEN / folder
    dialect = Dialect(folder.split("/")[0])
    path = json.loads((place / "turn.json").read_text()).get("path", PATHS.get(dialect))
    route = recognise("POST", path.partition("?")[0], "", {})
    assert route is not None
    request = DIALECTS[dialect].parse(route, (place / "request.json").read_bytes(), {})
    assert canonical(request, {}).pairing.orphans == []


def pretty(value) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_synthetic_stream_says_what_a_live_one_says(folder):
    place = GOLDEN / folder
    dialect = Dialect(folder.split("/")[0])
    turn = json.loads((place / "turn.json").read_text())
    path, _, query = turn.get("path", PATHS.get(dialect)).partition("?")
    wire = DIALECTS[dialect]
    route = recognise("POST", path, query, {})
    assert route is not None
    request = wire.parse(route, (place / "request.json").read_bytes(), {})
    last = [
        SseParser().feed(make(wire.stream(request, HEAD), reply_of(turn)))[-1:]
        for make in (live, synthetic)
    ]
    if dialect is Dialect.OPENAI_RESPONSES:  # its events are numbered
        told = [json.loads(event.data)["response"] for [event] in last]
    else:
        told = [event.data for event_list in last for event in event_list]
    assert told[:1] == told[1:]

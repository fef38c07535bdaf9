"""Golden exchanges: what real clients send, what we make of it, and what they get.

Each folder of `tests/golden/DIALECT/FEATURE` holds `request.json` as it came over the wire,
`turn.json` (the reply to dress; also the path where the dialect needs one, and as `continues` the
folder of the exchange whose thread this one continues), and what becomes of them: `internal.json`,
`reply.json`, `reply_messages.json`, `stream.sse`. PROVENANCE names the client whose shape it is.
`BRIDLE_TEST_REGOLD=1` writes the results anew; the change is reviewed as a diff.
"""

import dataclasses
import json
import os

import msgspec
import pytest
from tests.dialects.exchange import HEAD, USAGE, live, synthetic
from tests.dialects.golden import FOLDERS, GOLDEN, dialect_of, reply_of, request_of
from tests.dialects.sse import SseParser

from bridle.dialects import DIALECTS
from bridle.prompting.canonical import canonical
from bridle.types import Dialect, ModelRequest


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_golden_exchange_is_read_and_written_as_before(folder):
    place, wire = GOLDEN / folder, DIALECTS[dialect_of(folder)]
    request, reply = request_of(folder), reply_of(folder)
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
def test_every_tool_result_in_recorded_client_requests_has_its_call(folder):
    assert canonical(request_of(folder), {}).pairing.orphans == []


def pretty(value) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"


@pytest.mark.parametrize("folder", FOLDERS)
def test_synthetic_stream_equals_live_stream(folder):
    dialect, request, reply = dialect_of(folder), request_of(folder), reply_of(folder)
    last = [
        SseParser().feed(make(DIALECTS[dialect].stream(request, HEAD), reply))[-1:]
        for make in (live, synthetic)
    ]
    if dialect is Dialect.OPENAI_RESPONSES:  # its events are numbered
        parsed = [json.loads(event.data)["response"] for [event] in last]
    else:
        parsed = [event.data for event_list in last for event in event_list]
    assert parsed[:1] == parsed[1:]

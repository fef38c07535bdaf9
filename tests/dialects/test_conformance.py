"""Laws of reading in every dialect, over bodies that real clients' shapes seed."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.dialects.exchange import HEAD, USAGE, live

from bridle.dialects import DIALECTS, recognise
from bridle.errors import RequestError
from bridle.types import Dialect, FinishReason, Message, Reply, Role, TextPart, ToolCall

GOLDEN = Path(__file__).parents[1] / "golden"
PATHS = {
    Dialect.OPENAI_CHAT: "/v1/chat/completions",
    Dialect.OPENAI_RESPONSES: "/v1/responses",
    Dialect.ANTHROPIC: "/v1/messages",
    Dialect.GOOGLE: "/v1beta/models/my-model:generateContent",
}
HISTORY = {
    Dialect.OPENAI_CHAT: "messages",
    Dialect.OPENAI_RESPONSES: "input",
    Dialect.ANTHROPIC: "messages",
    Dialect.GOOGLE: "contents",
}
SEEDS = {
    dialect: [
        body
        for path in sorted(GOLDEN.glob(f"{dialect.value}/*/request.json"))
        if HISTORY[dialect] in (body := json.loads(path.read_bytes()))
    ]
    for dialect in PATHS
}
ALL = pytest.mark.parametrize("dialect", list(PATHS), ids=str)
SLOW_START = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def read(dialect, body, memo=None):
    route = recognise("POST", PATHS[dialect], "", {})
    assert route is not None
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return DIALECTS[dialect].parse(route, raw, {} if memo is None else memo)


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


def with_place(value, path, new):
    """A copy of `value` with `new` at `path`."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    inner = value.get(path[0]) if isinstance(value, dict) else value[path[0]]
    copy[path[0]] = with_place(inner, path[1:], new)
    return copy


def answered(dialect, body):
    """Status and text of what a client gets: a reply, or an error; also all that it may stream."""
    wire = DIALECTS[dialect]
    try:
        request = read(dialect, body)
    except RequestError as refused:
        status, _, shown = wire.error(refused)
        return status, shown, b""
    call = ToolCall("call_1", request.tools[0].name if request.tools else "f", '{"a":1}')
    reply = Reply("text", "why", (call,), FinishReason.STOP)
    return (
        200,
        wire.reply_json(request, HEAD, reply, USAGE),
        live(wire.stream(request, HEAD), reply),
    )


def is_well_formed(dialect, status, shown, streamed):
    """Return whether that is a reply, whole and streamed, or an error in the provider's shape."""
    if status == 200:
        return bool(DIALECTS[dialect].reply_messages(shown)) and bool(streamed)
    return 400 <= status < 500 and bool(json.loads(shown)["error"]["message"])


# ---- reading


@ALL
@given(body=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(dialect, body):
    with pytest.raises(RequestError) as raised:
        read(dialect, body)
    status, headers, shown = DIALECTS[dialect].error(raised.value)
    assert status == 400
    assert headers["Content-Type"] == "application/json"
    assert json.loads(shown)["error"]["message"]


@ALL
@given(body=json_values)
def test_any_json_is_read_or_refused(dialect, body):
    with pytest.raises(RequestError):
        read(dialect, body)


@ALL
@SLOW_START
@given(data=st.data())
def test_a_body_with_anything_anywhere_is_read_or_refused(dialect, data):
    body = data.draw(st.sampled_from(SEEDS[dialect]))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(body))[1:] or [()]))
        body = with_place(body, path, data.draw(json_values))
    assert is_well_formed(dialect, *answered(dialect, body))


@ALL
def test_nesting_beyond_every_parser_is_refused(dialect):
    deep = b"[" * 50_000 + b"]" * 50_000
    with pytest.raises(RequestError):
        read(dialect, deep)
    for seed in SEEDS[dialect]:
        body = json.dumps({**seed, "extra": "@"}).encode().replace(b'"@"', deep)
        with pytest.raises(RequestError, match="nested too deeply"):
            read(dialect, body)


@ALL
@SLOW_START
@given(data=st.data())
def test_deep_nesting_anywhere_is_read_or_refused(dialect, data):
    depth = data.draw(st.sampled_from([60, 250, 330, 480, 700, 900, 950]))
    deep = data.draw(st.sampled_from(["[]", '{"a":@}'])).replace("[]", "[@]")
    nested = "1"
    for _ in range(depth):
        nested = deep.replace("@", nested)
    body = data.draw(st.sampled_from(SEEDS[dialect]))
    path = data.draw(st.sampled_from(list(places(body))[1:]))
    where = (*path, "x") if isinstance(at(body, path), dict) else path
    marked = json.dumps(with_place(body, where, "@@")).replace('"@@"', nested)
    assert is_well_formed(dialect, *answered(dialect, marked.encode()))


def at(value, path):
    """Return what stands at `path`."""
    for step in path:
        value = value[step]
    return value


@ALL
def test_unknown_fields_pass_and_change_nothing(dialect):
    for seed in SEEDS[dialect]:
        history = seed[HISTORY[dialect]]
        odd = {"x_unknown": {"deep": [1, None]}}
        marked = [
            {**item, **odd} if not str(item.get("type", "")).endswith("patch_call_output") else item
            for item in history
        ]
        plain = read(dialect, seed)
        request = read(dialect, {**seed, HISTORY[dialect]: marked, **odd})
        assert request.messages == plain.messages
        assert (request.tools, request.sampling) == (plain.tools, plain.sampling)
        assert json.loads(request.head)["x_unknown"] == odd["x_unknown"]


@ALL
def test_a_request_is_the_same_with_and_without_the_memo(dialect):
    memo = {}
    for seed in SEEDS[dialect]:
        fresh = read(dialect, seed)
        assert read(dialect, seed, memo) == fresh
        assert read(dialect, seed, memo) == fresh
        assert sum(fresh.span_lengths) + fresh.head_messages == len(fresh.messages)
        assert len(fresh.span_lengths) == len(fresh.span_digests) == len(fresh.message_spans)


@ALL
def test_a_span_in_the_memo_is_not_decoded_again(dialect):
    memo = {}
    [seed, *_] = SEEDS[dialect]
    read(dialect, seed, memo)
    result = Message(Role.USER, (TextPart("from the memo"),))
    poisoned = dict.fromkeys(memo, (result,))
    body = read(dialect, seed, poisoned).messages
    assert {message.text for message in body if message.role is Role.USER} == {"from the memo"}


@ALL
def test_the_raw_spans_and_the_head_give_the_body_back(dialect):
    key = HISTORY[dialect]
    for seed in SEEDS[dialect]:
        request = read(dialect, seed)
        history = json.loads(b"[" + b",".join(request.message_spans) + b"]")
        tools = {} if request.tools_span is None else {"tools": json.loads(request.tools_span)}
        again = {**json.loads(request.head), key: history, **tools}
        tools_sent = {"tools": seed["tools"]} if seed.get("tools") else {}
        rest = {name: value for name, value in seed.items() if name not in ("tools", key)}
        assert again == {**rest, **tools_sent, key: _as_sent(seed[key])}


@ALL
def test_a_body_put_together_from_the_record_reads_as_the_original(dialect):
    for seed in SEEDS[dialect]:
        request = read(dialect, seed)
        again = read(
            dialect,
            DIALECTS[dialect].body(request.head, request.message_spans, request.tools_span),
        )
        assert again == request


def _as_sent(history):
    """Lone surrogates do not survive: no tokenizer takes one."""
    text = json.dumps(history, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(text.decode("utf-16", "replace"))


WRONG = [
    ("openai_chat/developer_and_missing_content", "messages[0].content", 7),
    ("openai_chat/developer_and_missing_content", "messages[1].role", "boss"),
    ("openai_chat/developer_and_missing_content", "messages[1].content[1].text", 7),
    ("openai_chat/developer_and_missing_content", "messages[2].tool_calls[0].function.name", 7),
    ("openai_chat/developer_and_missing_content", "tools[0].function.parameters", 7),
    ("openai_chat/developer_and_missing_content", "stream", "yes"),
    ("openai_chat/media_and_schema", "temperature", "hot"),
    ("openai_chat/media_and_schema", "temperature", 1e400),
    ("openai_chat/media_and_schema", "n", 2),
    ("openai_responses/codex_turn", "input[0].content[0].text", 7),
    ("openai_responses/codex_turn", "input[3].role", "boss"),
    ("openai_responses/codex_turn", "tools[0].name", 7),
    ("openai_responses/codex_turn", "tools[1].tools[0].name", None),
    ("openai_responses/instructions_and_bare_items", "max_output_tokens", 0.5),
    ("anthropic/claude_code_turn", "messages[2].content[0].content", 7),
    ("anthropic/claude_code_turn", "messages[1].content[1].text", []),
    ("anthropic/claude_code_turn", "max_tokens", 0),
    ("anthropic/media_and_documents", "stop_sequences[0]", 7),
    ("google/gemini_cli_turn", "contents[0].parts[0].text", 7),
    ("google/gemini_cli_turn", "contents[1].role", "boss"),
    ("google/gemini_cli_turn", "generationConfig.temperature", True),
    ("google/gemini_cli_turn", "tools[0].functionDeclarations[0].name", ""),
]


@pytest.mark.parametrize(("seed", "path", "value"), WRONG)
def test_a_wrong_value_is_refused_by_its_path(seed, path, value):
    body = json.loads((GOLDEN / seed / "request.json").read_bytes())
    steps = [
        int(s) if s.isdigit() else s for s in path.replace("[", ".").replace("]", "").split(".")
    ]
    dialect = Dialect(seed.split("/")[0])
    with pytest.raises(RequestError) as raised:
        read(dialect, with_place(body, steps, value))
    assert raised.value.param == path
    assert (raised.value.status, raised.value.code) == (400, "invalid_request_error")


@ALL
@pytest.mark.parametrize("history", [[], None, "missing", 7, [7]])
def test_a_request_without_messages_is_refused(dialect, history):
    body = {"model": "m", HISTORY[dialect]: history}
    if history == "missing":
        del body[HISTORY[dialect]]
    with pytest.raises(RequestError) as raised:
        read(dialect, body)
    assert raised.value.param is not None or "role" in str(raised.value)


# ---- all text is kept

words = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters='"\\'),
    min_size=1,
    max_size=12,
)
turns = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "result"]), words), min_size=1, max_size=8
)


def conversation(dialect, result):
    """The turns in one dialect's own form."""
    body = {"model": "m", "max_tokens": 5}
    items = []
    for index, (who, text) in enumerate(result):
        call = f"call_{index}"
        match dialect, who:
            case Dialect.OPENAI_CHAT, "result":
                items.append({"role": "tool", "tool_call_id": call, "content": text})
            case Dialect.OPENAI_CHAT, _:
                items.append({"role": who, "content": [{"type": "text", "text": text}]})
            case Dialect.ANTHROPIC, "result":
                block = {"type": "tool_result", "tool_use_id": call, "content": text}
                items.append({"role": "user", "content": [block]})
            case Dialect.ANTHROPIC, _:
                items.append({"role": who, "content": text})
            case Dialect.OPENAI_RESPONSES, "result":
                items.append({"type": "function_call_output", "call_id": call, "output": text})
            case Dialect.OPENAI_RESPONSES, _:
                items.append({"role": who, "content": text})
            case _, "result":
                response = {"name": "f", "response": {"output": text}}
                items.append({"role": "user", "parts": [{"functionResponse": response}]})
            case _:
                role = "model" if who == "assistant" else "user"
                items.append({"role": role, "parts": [{"text": text}]})
    return {**body, HISTORY[dialect]: items}


ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "result": Role.TOOL}


@ALL
@given(result=turns)
def test_texts_keep_their_role_and_order_in_every_dialect(dialect, result):
    result = [*result, ("user", "Go on.")]
    request = read(dialect, conversation(dialect, result))
    parts = [
        (message.role, part.text)
        for message in request.messages
        for part in message.content
        if isinstance(part, TextPart)
    ]
    assert parts == [(ROLES[who], text) for who, text in result]


NULLS = {
    Dialect.OPENAI_CHAT: ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    Dialect.OPENAI_RESPONSES: ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
    Dialect.ANTHROPIC: ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    Dialect.GOOGLE: ({"contents": [{"role": "user", "parts": None}]}, "contents[0].parts"),
}


@ALL
def test_null_in_place_of_a_users_content_is_refused_by_its_name(dialect):
    changed, field = NULLS[dialect]
    with pytest.raises(RequestError, match="got null instead") as refused:
        read(dialect, json.dumps({**SEEDS[dialect][0], **changed}).encode())
    assert refused.value.param == field

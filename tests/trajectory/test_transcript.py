"""A trace's messages: the first request, then what was sampled and what the harness added."""

import copy
import json

import pytest
from tests.capture.made import MadeSession, content_digest

from bridle.capture.records import Exchange, RequestRecord
from bridle.dialects.openai_chat_write import chat_messages
from bridle.errors import StoreError
from bridle.trajectory.transcript import Messages, Transcript
from bridle.types import Dialect


class Recorded:
    """Exchanges of one conversation in a dialect, with spans given as JSON values."""

    def __init__(self, dialect, head, tools=None):
        self.dialect, self.head = dialect, json.dumps(head).encode()
        self.bodies: dict[bytes, bytes] = {}
        self.tools = None if tools is None else self.keep(tools)
        self.exchanges: list[Exchange] = []

    def keep(self, value):
        raw = json.dumps(value).encode()
        self.bodies[content_digest(raw)] = raw
        return content_digest(raw)

    def call(self, spans, reply, *, kept=None, base="last"):
        last = self.exchanges[-1] if self.exchanges and base == "last" else None
        before = 0 if last is None else last.request.kept_spans + len(last.request.spans)
        request = RequestRecord(
            self.head,
            None if last is None else last.exchange_id,
            before if kept is None else kept,
            tuple(self.keep(span) for span in spans),
            self.tools,
        )
        made = MadeSession()
        exchange = made.call(
            exchange_id=f"x{len(self.exchanges)}",
            dialect=self.dialect,
            request=request,
            reply=b"" if reply is None else json.dumps(reply).encode(),
        )
        self.exchanges.append(exchange)
        return exchange

    def transcript(self):
        return Transcript(self.exchanges, self.bodies)


def chat_reply(message):
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def tool_call(arguments):
    function = {"name": "bash", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function}


def a_chat():
    chat = Recorded(Dialect.OPENAI_CHAT, {"model": "m"})
    chat.call(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        chat_reply({"role": "assistant", "content": None, "tool_calls": [tool_call('{"a": 1}')]}),
    )
    chat.call(
        [  # the harness writes our call's arguments its own way
            {"role": "assistant", "content": "", "tool_calls": [tool_call('{"a":1}')]},
            {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
            {"role": "user", "content": "go on"},
        ],
        chat_reply({"role": "assistant", "content": "done"}),
    )
    return chat


def test_prompt_messages_are_those_of_the_first_request():
    chat = a_chat()
    assert chat.transcript().prompt_messages(chat.exchanges[0]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_response_messages_are_the_replies_and_the_messages_that_the_harness_added():
    chat = a_chat()
    messages = chat.transcript().response_messages(chat.exchanges)
    assert [m["role"] for m in messages] == ["assistant", "tool", "user", "assistant"]
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert (messages[2]["content"], messages[3]["content"]) == ("go on", "done")


def test_added_messages_of_a_request_leave_out_the_sampled_reply():
    chat = a_chat()
    transcript = chat.transcript()
    assert [str(m.role) for m in transcript.added(chat.exchanges[0])] == ["system", "user"]
    assert [str(m.role) for m in transcript.added(chat.exchanges[1])] == ["tool", "user"]


def test_an_assistant_message_written_by_the_harness_is_kept_in_the_response():
    chat = a_chat()
    chat.call(
        [
            {"role": "assistant", "content": "done"},
            {"role": "assistant", "content": "(the harness notes)"},
            {"role": "user", "content": "and?"},
        ],
        chat_reply({"role": "assistant", "content": "yes"}),
    )
    contents = [m["content"] for m in chat.transcript().response_messages(chat.exchanges)]
    assert contents[-4:] == ["done", "(the harness notes)", "and?", "yes"]


def test_prompt_messages_of_a_request_that_keeps_a_part_of_its_base_are_complete():
    chat = a_chat()
    chat.call([{"role": "user", "content": "again"}], None, kept=1)
    last = chat.exchanges[-1]
    assert [m["content"] for m in chat.transcript().prompt_messages(last)] == ["Be brief.", "again"]


def test_an_exchange_without_a_stored_reply_has_no_reply_message():
    chat = a_chat()
    last = chat.call([], None)
    assert chat.transcript().reply(last) == ()
    assert chat.transcript().response_messages([last]) == []


def test_anthropic_messages_are_converted_to_chat_messages():
    tools = [{"name": "bash", "description": "Run.", "input_schema": {"type": "object"}}]
    recorded = Recorded(
        Dialect.ANTHROPIC, {"model": "m", "max_tokens": 9, "system": "Be brief."}, tools
    )
    use = {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"a": 1}}
    recorded.call(
        [{"role": "user", "content": "hi"}],
        {"id": "msg_1", "type": "message", "role": "assistant", "content": [use]},
    )
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"}
    recorded.call(
        [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ],
        {"role": "assistant", "type": "message", "content": [{"type": "text", "text": "done"}]},
    )
    transcript = recorded.transcript()
    first = recorded.exchanges[0]
    assert [m["role"] for m in transcript.prompt_messages(first)] == ["system", "user"]
    messages = transcript.response_messages(recorded.exchanges)
    assert [m["role"] for m in messages] == ["assistant", "tool", "user", "assistant"]
    assert messages[0]["tool_calls"][0]["function"]["name"] == "bash"
    shown = transcript.tools(first)
    assert shown is not None
    assert shown[0]["function"] == {
        "name": "bash",
        "description": "Run.",
        "parameters": {"type": "object"},
    }


def test_responses_items_are_converted_to_chat_messages():
    recorded = Recorded(Dialect.OPENAI_RESPONSES, {"model": "m", "instructions": "Be brief."})
    call = {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"}
    said = {"type": "output_text", "text": "Looking."}
    item = {"type": "message", "role": "assistant", "content": [said]}
    recorded.call(
        [{"role": "user", "content": "hi"}], {"object": "response", "output": [item, call]}
    )
    recorded.call(
        [item, call, {"type": "function_call_output", "call_id": "c1", "output": "ok"}],
        {"object": "response", "output": [item]},
    )
    messages = recorded.transcript().response_messages(recorded.exchanges)
    roles = [m["role"] for m in messages]
    assert roles[-2:] == ["tool", "assistant"]
    assert set(roles[:-2]) == {"assistant"}
    assert recorded.transcript().tools(recorded.exchanges[0]) is None


def test_google_contents_are_converted_to_chat_messages():
    recorded = Recorded(Dialect.GOOGLE, {"systemInstruction": {"parts": [{"text": "Be brief."}]}})
    parts = [{"functionCall": {"name": "bash", "args": {"a": 1}}}]
    reply = {"candidates": [{"content": {"role": "model", "parts": parts}}]}
    recorded.call([{"role": "user", "parts": [{"text": "hi"}]}], reply)
    answer = {"functionResponse": {"name": "bash", "response": {"output": "ok"}}}
    recorded.call(
        [{"role": "model", "parts": parts}, {"role": "user", "parts": [answer]}],
        {"candidates": [{"content": {"role": "model", "parts": [{"text": "done"}]}}]},
    )
    messages = recorded.transcript().response_messages(recorded.exchanges)
    assert [m["role"] for m in messages] == ["assistant", "tool", "assistant"]


@pytest.mark.parametrize("fault", ["body", "tools", "base", "json", "reply"])
def test_an_unreadable_request_or_reply_raises_an_error_with_its_exchange_id(fault):
    chat = a_chat()
    chat.tools = chat.keep([])
    chat.call([{"role": "user", "content": "last"}], {"choices": 5} if fault == "reply" else None)
    last = chat.exchanges[-1]
    match fault:
        case "body":
            del chat.bodies[last.request.spans[0]]
        case "tools":
            del chat.bodies[chat.tools]
        case "base":
            del chat.exchanges[1]
        case "json":
            chat.bodies[last.request.spans[0]] = b"{"
    with pytest.raises(StoreError, match="exchange x2: cannot read its re"):
        chat.transcript().response_messages([last, last])


def test_reading_messages_terminates_when_request_bases_form_a_cycle():
    chat = a_chat()
    first = chat.exchanges[0].request
    ring = RequestRecord(first.head, "x1", 5, first.spans, None)
    made = MadeSession()
    chat.exchanges[0] = made.call(exchange_id="x0", request=ring)
    assert chat.transcript().prompt_messages(chat.exchanges[1])


# ---- read when used


def test_messages_are_read_lazily_and_once():
    read = []

    def reading():
        read.append(True)
        return [{"role": "user"}, {"role": "tool"}]

    messages = Messages(reading)
    assert read == []
    assert messages == [{"role": "user"}, {"role": "tool"}]
    assert messages != []
    assert messages != 3
    assert messages[1:] == [messages[1]] == [{"role": "tool"}]
    assert repr(messages) == "[{'role': 'user'}, {'role': 'tool'}]"
    assert isinstance(copy.copy(messages), list)
    assert (len(messages), messages.missing, read) == (2, None, [True])


def test_unreadable_messages_are_an_empty_list_with_the_error():
    def reading():
        raise StoreError("x0: gone")

    messages = Messages(reading)
    assert (len(messages), messages.missing) == (0, "x0: gone")


def test_tools_are_none_when_absent_and_an_empty_list_when_sent_empty():
    chat = a_chat()
    assert chat.transcript().trace(chat.exchanges)["tools"] is None
    chat = Recorded(Dialect.OPENAI_CHAT, {"model": "m"}, tools=[])
    chat.call([{"role": "user", "content": "hi"}], None)
    assert chat.transcript().trace(chat.exchanges)["tools"] == []


def test_turn_messages_index_each_reply_in_the_response_messages():
    chat = a_chat()
    path = chat.exchanges
    texts = chat.transcript().trace(path)
    for exchange, start in zip(path, texts["turn_messages"], strict=True):
        reply = chat_messages(chat.transcript().reply(exchange))
        assert texts["response_messages"][start : start + len(reply)] == reply

from tests.dialects.exchange import CALLS, HEAD, NOTHING, THOUGHT, USAGE

from bridle.dialects.openai_responses_write import (
    Dress,
    call_item,
    output_items,
    response_json,
    status_of,
    usage_json,
)
from bridle.types import FinishReason, Reply, ToolCall, Usage


def test_items_are_numbered_by_their_place():
    items = output_items(HEAD, Dress(), CALLS)
    assert [item["type"] for item in items] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [item["id"][-3:] for item in items] == ["000", "001", "002", "003"]
    assert [item["type"] for item in output_items(HEAD, Dress(), NOTHING)] == ["message"]
    only = Reply("", "why", (), FinishReason.STOP)
    assert [item["type"] for item in output_items(HEAD, Dress(), only)] == ["reasoning"]


def test_reasoning_is_shown_and_sealed_as_it_was_asked_for():
    plain = output_items(HEAD, Dress(), THOUGHT)[0]
    assert (plain["summary"], "encrypted_content" in plain) == ([], False)
    shown = output_items(HEAD, Dress(summary=True, encrypted=True), THOUGHT)[0]
    assert shown["summary"][0]["text"] == THOUGHT.reasoning
    assert shown["encrypted_content"]


def test_calls_go_out_in_the_type_of_their_tool():
    dress = Dress(
        freeform=frozenset({"ns__p"}),
        wire={
            "ns__p": {"namespace": "ns", "name": "p"},
            "ns__f": {"namespace": "ns", "name": "f"},
            "shell": {"type": "shell"},
        },
    )

    def item(name, arguments, **fields):
        return call_item(HEAD, dress, 1, ToolCall("call_1", name, arguments, **fields))

    custom = item("ns__p", '{"input": "x"}')
    assert (custom["type"], custom["name"], custom["namespace"]) == ("custom_tool_call", "p", "ns")
    assert custom["input"] == "x"
    assert item("q", "raw", custom=True)["input"] == "raw"
    function = item("ns__f", "{}")
    assert (function["name"], function["namespace"]) == ("f", "ns")
    assert item("shell", '{"commands":[]}')["type"] == "shell_call"
    assert item("shell", "{}")["type"] == "function_call"
    nameless = call_item(HEAD, dress, 1, ToolCall(None, "g", "{}"))
    assert nameless["call_id"] == f"call_{HEAD.reply_id}001"


def test_a_response_in_progress_has_no_output_and_no_usage():
    begun = response_json(HEAD, Dress(echo={"store": False}))
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert begun["store"] is False
    ended = response_json(HEAD, Dress(), CALLS, USAGE)
    assert (ended["status"], ended["usage"]["total_tokens"]) == ("completed", 18)


def test_what_is_incomplete_says_why():
    told = [status_of(Reply("", None, (), reason)) for reason in FinishReason]
    limit = ("incomplete", {"reason": "max_output_tokens"})
    assert told == [("completed", None), limit, limit]
    assert usage_json(Usage(1, 2))["output_tokens_details"] == {"reasoning_tokens": 0}

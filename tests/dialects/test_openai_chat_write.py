import json

import pytest

from bridle.dialects.base import Route, RouteKind
from bridle.dialects.openai_chat_write import finish_reason, models_json, tool_call_json, usage_json
from bridle.types import Dialect, FinishReason, Reply, ToolCall, Usage

CALL = ToolCall("1", "f", '{"input":"x"}')


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply("x", None, (), FinishReason.STOP), "stop"),
        (Reply("x", None, (CALL,), FinishReason.STOP), "tool_calls"),
        (Reply("x", None, (CALL,), FinishReason.LENGTH), "length"),
        (Reply("x", None, (), FinishReason.ABORT), "length"),
    ],
)
def test_finish_reasons(reply, told):
    assert finish_reason(reply) == told


def test_a_freeform_call_is_its_text():
    custom = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}
    assert tool_call_json(CALL, {"f"}) == custom
    assert tool_call_json(ToolCall("1", "f", "x", custom=True), ()) == custom
    assert tool_call_json(CALL, ())["function"]["arguments"] == '{"input":"x"}'


def test_usage_details_are_never_null():
    told = usage_json(Usage(1, 2))
    assert told["prompt_tokens_details"] == {"cached_tokens": 0}
    assert told["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_model_and_a_list_of_them():
    one = Route(Dialect.OPENAI_CHAT, RouteKind.MODEL, model="a/b")
    assert json.loads(models_json(one, ["x"], 9))["id"] == "a/b"
    listed = Route(Dialect.OPENAI_CHAT, RouteKind.MODELS)
    assert json.loads(models_json(listed, ["x"], 9))["data"][0]["max_model_len"] == 9

"""The official SDKs as oracles: what they build we read, what we write they parse to the truth."""

import base64
import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types
from tests.dialects.exchange import CALLS, CUT, HEAD, NOTHING, THOUGHT, USAGE, Provider

from bridle.errors import RequestError
from bridle.types import MediaPart, Role, TextPart

SCHEMA = {
    "type": "object",
    "properties": {"key": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["key"],
}
PNG = base64.b64encode(b"\x89PNG not really").decode()
OVERFLOW = RequestError(
    "too long",
    code="context_length_exceeded",
    prompt_tokens=5000,
    context_length=4096,
)
BUSY = RequestError("busy", code="rate_limit", retry_after_s=0.001)


def openai_client(provider: Provider) -> Any:
    return openai.OpenAI(
        api_key="k", base_url="http://gw/s/1/v1", http_client=provider.client(), max_retries=0
    )


def anthropic_client(provider: Provider) -> Any:
    return anthropic.Anthropic(
        api_key="k", base_url="http://gw/s/1", http_client=provider.client(), max_retries=0
    )


def google_client(provider: Provider) -> Any:
    options = genai_types.HttpOptions(base_url="http://gw/s/1", httpx_client=provider.client())
    return genai.Client(api_key="k", http_options=options)


# ---- Chat Completions

CHAT_TOOL = {"type": "function", "function": {"name": "lookup", "parameters": SCHEMA}}


def test_openai_chat_create_gives_the_scripted_message():
    provider = Provider(CALLS)
    done = openai_client(provider).chat.completions.create(
        model="my-model", messages=[{"role": "user", "content": "hi"}], tools=[CHAT_TOOL]
    )
    choice = done.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Looking.")
    assert choice.message.model_extra == {"reasoning_content": "I need both."}
    result = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert result == [(c.id, c.name, c.arguments) for c in CALLS.tool_calls]
    assert done.id == f"chatcmpl-{HEAD.reply_id}"
    assert done.created == HEAD.created
    assert done.usage.prompt_tokens == USAGE.prompt_tokens
    assert done.usage.total_tokens == 18
    assert done.usage.prompt_tokens_details.cached_tokens == 4
    assert done.usage.completion_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize("is_live", [True, False])
def test_openai_chat_stream_gives_the_scripted_message(is_live):
    provider = Provider(CALLS, live=is_live)
    client = openai_client(provider)
    with client.chat.completions.stream(
        model="my-model",
        messages=[{"role": "user", "content": "hi"}],
        tools=[CHAT_TOOL],
        stream_options={"include_usage": True},
    ) as stream:
        done = stream.get_final_completion()
    message = done.choices[0].message
    assert message.content == "Looking."
    assert [c.function.arguments for c in message.tool_calls] == [
        c.arguments for c in CALLS.tool_calls
    ]
    assert [c.id for c in message.tool_calls] == [c.id for c in CALLS.tool_calls]
    assert done.usage.completion_tokens == USAGE.completion_tokens
    assert provider.requests[0].include_usage


def test_openai_chat_reads_images_and_structured_output():
    provider = Provider()
    openai_client(provider).chat.completions.create(
        model="my-model",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is it"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
                ],
            }
        ],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        },
    )
    [message] = provider.requests[0].messages
    assert isinstance(message.content[1], MediaPart)
    assert message.content[1].media_type == "image/png"
    assert provider.requests[0].response_schema == SCHEMA


def test_openai_chat_errors_are_the_sdks_own():
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096") as raised:
        openai_client(Provider(error=OVERFLOW)).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.RateLimitError):
        openai_client(Provider(error=BUSY)).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )


def test_a_cut_openai_stream_has_no_finish_reason():
    provider = Provider(late_error=RequestError("gone", code="engine_error"))
    client = openai_client(provider)
    chunks = list(
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
    )
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks)


def test_openai_lists_models():
    client = openai_client(Provider())
    assert [model.id for model in client.models.list()] == ["my-model", "other"]
    assert client.models.retrieve("org/my-model").id == "org/my-model"


# ---- Responses

RESPONSES_TOOL = {"type": "function", "name": "lookup", "parameters": SCHEMA, "strict": False}
RESPONSES_ARGS = {"model": "my-model", "input": "hi", "tools": [RESPONSES_TOOL]}


def check_response(done, reply):
    items = {}
    for item in done.output:
        items.setdefault(item.type, []).append(item)
    assert done.output_text == reply.content
    calls = items.get("function_call", [])
    assert [(c.call_id, c.name, c.arguments) for c in calls] == [
        (c.id, c.name, c.arguments) for c in reply.tool_calls
    ]
    assert done.id == f"resp_{HEAD.reply_id}"
    assert (done.usage.input_tokens, done.usage.output_tokens) == (11, 7)
    assert done.usage.input_tokens_details.cached_tokens == 4
    assert done.usage.output_tokens_details.reasoning_tokens == 3
    return items


def test_openai_responses_create_gives_the_scripted_items():
    done = openai_client(Provider(CALLS)).responses.create(
        **RESPONSES_ARGS, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"]
    )
    items = check_response(done, CALLS)
    assert [part.text for part in items["reasoning"][0].summary] == ["I need both."]
    assert items["reasoning"][0].encrypted_content
    assert done.status == "completed"


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("reply", [CALLS, THOUGHT, CUT, NOTHING])
def test_openai_responses_stream_equals_the_whole_reply(reply, summary, is_live):
    args = {**RESPONSES_ARGS, "reasoning": {"summary": summary}}
    client = openai_client(Provider(reply, live=is_live))
    whole = client.responses.create(**args)
    terminal = "response.incomplete" if reply is CUT else "response.completed"
    result = list(client.responses.create(**args, stream=True))
    items = [e.item.to_dict() for e in result if e.type == "response.output_item.done"]
    assert result[-1].type == terminal
    assert result[-1].response.to_dict()["output"] == whole.to_dict()["output"] == items
    check_response(result[-1].response, reply)
    assert [event.sequence_number for event in result] == list(range(len(result)))
    # The SDK's own accumulator follows the grammar: it puts each delta where its item stands.
    with client.responses.stream(**args) as stream:
        last = list(stream)[-1]
    check_response(last.response, reply)


def test_a_length_limited_response_is_incomplete():
    done = openai_client(Provider(CUT)).responses.create(**RESPONSES_ARGS)
    assert done.status == "incomplete"
    assert done.incomplete_details.reason == "max_output_tokens"


def test_openai_responses_counts_tokens():
    count = openai_client(Provider()).responses.input_tokens.count(model="m", input="hi")
    assert count.input_tokens == 42


def test_openai_responses_late_failure_is_a_failed_event():
    client = openai_client(Provider(late_error=OVERFLOW))
    last = list(client.responses.create(**RESPONSES_ARGS, stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error.code == "context_length_exceeded"
    assert "exceeds the context window" in last.response.error.message


# ---- Messages

ANTHROPIC_ARGS = {
    "model": "my-model",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": "lookup", "input_schema": SCHEMA}],
}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def check_message(done, reply):
    calls = [block for block in done.content if block.type == "tool_use"]
    assert [(c.name, c.input) for c in calls] == [
        (c.name, json.loads(c.arguments)) for c in reply.tool_calls
    ]
    assert [c.id for c in calls] == [
        f"toolu_{c.id.removeprefix('call_')}" for c in reply.tool_calls
    ]
    assert "".join(b.text for b in done.content if b.type == "text") == reply.content
    assert done.id == f"msg_{HEAD.reply_id}"
    assert (done.usage.input_tokens, done.usage.output_tokens) == (7, 7)
    assert done.usage.cache_read_input_tokens == 4


@pytest.mark.parametrize("reply", [CALLS, THOUGHT, CUT, NOTHING])
def test_anthropic_create_gives_the_scripted_blocks(reply):
    done = anthropic_client(Provider(reply)).messages.create(**ANTHROPIC_ARGS, **THINKING)
    check_message(done, reply)
    thoughts = [block for block in done.content if block.type == "thinking"]
    assert [block.thinking for block in thoughts] == ([reply.reasoning] if reply.reasoning else [])
    reasons = {id(CALLS): "tool_use", id(CUT): "max_tokens"}
    assert done.stop_reason == reasons.get(id(reply), "end_turn")


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("thinking", [{}, THINKING])
@pytest.mark.parametrize("reply", [CALLS, THOUGHT, CUT, NOTHING])
def test_anthropic_stream_equals_the_whole_reply(reply, thinking, is_live):
    client = anthropic_client(Provider(reply, live=is_live))
    whole = client.messages.create(**ANTHROPIC_ARGS, **thinking)
    with client.messages.stream(**ANTHROPIC_ARGS, **thinking) as stream:
        done = stream.get_final_message()
    assert done.to_dict()["content"] == whole.to_dict()["content"]
    assert done.stop_reason == whole.stop_reason
    check_message(done, reply)


def test_anthropic_reads_images_documents_and_results_with_images():
    provider = Provider()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    anthropic_client(provider).messages.create(
        model="m",
        max_tokens=10,
        messages=[
            {"role": "user", "content": [image, {"type": "text", "text": "look"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "toolu_1", "name": "see", "input": {"a": 1}}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}],
            },
        ],
    )
    user, turn, result = provider.requests[0].messages
    assert isinstance(user.content[0], MediaPart)
    assert user.content[1] == TextPart("look")
    assert turn.tool_calls[0].arguments == '{"a":1}'
    assert (result.role, result.tool_call_id) == (Role.TOOL, "toolu_1")
    assert result.content == user.content[:1]


def test_anthropic_counts_tokens_and_lists_models():
    client = anthropic_client(Provider())
    messages = [{"role": "user", "content": "hi"}]
    assert client.messages.count_tokens(model="m", messages=messages).input_tokens == 42
    assert [model.id for model in client.models.list()] == ["my-model", "other"]
    assert client.models.retrieve("my-model").id == "my-model"


def test_anthropic_errors_are_the_sdks_own():
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5000 tokens > 4096"):
        anthropic_client(Provider(error=OVERFLOW)).messages.create(**ANTHROPIC_ARGS)
    with pytest.raises(anthropic.RateLimitError):
        anthropic_client(Provider(error=BUSY)).messages.create(**ANTHROPIC_ARGS)
    late = Provider(late_error=RequestError("no engine", code="overloaded"))
    client = anthropic_client(late)
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        list(client.messages.create(**ANTHROPIC_ARGS, stream=True))


# ---- generateContent

GOOGLE_TOOL = genai_types.Tool(
    function_declarations=[
        genai_types.FunctionDeclaration(
            name="lookup",
            parameters=genai_types.Schema(
                type=genai_types.Type.OBJECT,
                properties={"key": genai_types.Schema(type=genai_types.Type.STRING)},
                required=["key"],
            ),
        )
    ]
)


def google_config(*, thoughts: bool = True) -> genai_types.GenerateContentConfig:
    return genai_types.GenerateContentConfig(
        system_instruction="be brief",
        tools=[GOOGLE_TOOL],
        automatic_function_calling=genai_types.AutomaticFunctionCallingConfig(disable=True),
        thinking_config=genai_types.ThinkingConfig(include_thoughts=thoughts),
    )


def parts_of(responses):
    """Texts joined by kind, and calls, over all parts."""
    parts = [part for response in responses for part in response.candidates[0].content.parts]
    texts = "".join(part.text for part in parts if part.text and not part.thought)
    thoughts = "".join(part.text for part in parts if part.text and part.thought)
    calls = [part for part in parts if part.function_call]
    return texts, thoughts, [(c.function_call.id, c.function_call.args) for c in calls], parts


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("thoughts", [True, False])
@pytest.mark.parametrize("reply", [CALLS, THOUGHT, CUT, NOTHING])
def test_google_gives_the_scripted_parts_streamed_and_whole(reply, thoughts, is_live):
    provider = Provider(reply, live=is_live)
    models = google_client(provider).models
    config = google_config(thoughts=thoughts)
    whole = models.generate_content(model="my-model", contents="hi", config=config)
    chunks = list(models.generate_content_stream(model="my-model", contents="hi", config=config))
    wanted = (
        reply.content,
        (reply.reasoning or "") if thoughts else "",
        [(call.id, json.loads(call.arguments)) for call in reply.tool_calls],
    )
    assert parts_of([whole])[:3] == wanted
    assert parts_of(chunks)[:3] == wanted
    finish = genai_types.FinishReason.MAX_TOKENS if reply is CUT else genai_types.FinishReason.STOP
    for last in (whole, chunks[-1]):
        assert last.candidates[0].finish_reason is finish
        assert last.usage_metadata.prompt_token_count == 11
        assert last.usage_metadata.candidates_token_count == 4
        assert last.usage_metadata.thoughts_token_count == 3
        assert last.usage_metadata.total_token_count == 18
        assert last.usage_metadata.cached_content_token_count == 4
    signed = [part.thought_signature for part in parts_of([whole])[3] if part.thought_signature]
    again = [part.thought_signature for part in parts_of(chunks)[3] if part.thought_signature]
    assert signed == again
    assert bool(signed) is (reply is not NOTHING)


def test_google_requests_of_the_sdk_are_read():
    provider = Provider()
    google_client(provider).models.generate_content(
        model="my-model", contents="hi", config=google_config()
    )
    [request] = provider.requests
    assert request.messages[0].text == "be brief"
    assert request.head_messages == 1
    assert (request.tools[0].parameters or {})["properties"] == {"key": {"type": "string"}}
    assert (request.model, request.thinking) == ("my-model", True)


def test_google_chat_echoes_our_signatures():
    provider = Provider(CALLS)
    chat = google_client(provider).chats.create(model="my-model", config=google_config())
    chat.send_message("go")
    provider.reply = THOUGHT
    results = [
        genai_types.Part.from_function_response(name="lookup", response={"output": "1"}),
        genai_types.Part.from_function_response(name="lookup", response={"error": "no"}),
    ]
    chat.send_message(results)
    _, user, turn, first, second = provider.requests[1].messages
    assert user.text == "go"
    assert [call.id for call in turn.tool_calls] == [call.id for call in CALLS.tool_calls]
    assert len(turn.issued_ids) == 2
    assert (first.text, second.text) == ("1", '{"error": "no"}')
    assert first.tool_call_id is None


def test_google_counts_tokens_and_lists_models():
    client = google_client(Provider())
    assert client.models.count_tokens(model="my-model", contents="hi").total_tokens == 42
    assert [model.name for model in client.models.list()] == ["models/my-model", "models/other"]
    assert client.models.get(model="my-model").name == "models/my-model"


def test_google_errors_are_the_sdks_own():
    models = google_client(Provider(error=OVERFLOW)).models
    with pytest.raises(genai_errors.ClientError, match=r"input token count \(5000\) exceeds"):
        models.generate_content(model="m", contents="hi")
    busy = google_client(Provider(error=BUSY)).models
    with pytest.raises(genai_errors.ClientError) as raised:
        busy.generate_content(model="m", contents="hi")
    assert (raised.value.code, raised.value.status) == (429, "RESOURCE_EXHAUSTED")
    late = google_client(Provider(late_error=RequestError("gone", code="engine_error"))).models
    with pytest.raises(genai_errors.ServerError, match="gone"):
        list(late.generate_content_stream(model="m", contents="hi"))


def test_a_google_array_stream_is_one_json_array():
    provider = Provider(CALLS)
    with provider.client() as client:
        answer = client.post(
            "http://gw/v1beta/models/my-model:streamGenerateContent",
            json={"contents": [{"parts": [{"text": "hi"}]}]},
        )
    assert isinstance(answer, httpx2.Response)
    result = answer.json()
    assert result[-1]["candidates"][0]["finishReason"] == "STOP"

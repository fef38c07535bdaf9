import asyncio
import json
from typing import Any

import aiohttp
import numpy as np
import pytest
from tests.engines.recording import InstantEngine, RecordingEngine
from tests.scripted.api import BASH, IDS, PROMPT, TOKENIZER, USER, joined

from bridle.engines.base import GenerateChunk
from bridle.errors import ConfigError, EngineError
from bridle.scripted.engine import scripted_logprobs
from bridle.scripted.server import EngineServer
from bridle.testing import scripted_engine
from bridle.types import FinishReason

# ---- ids in, ids out


@pytest.mark.parametrize("spaces", [False, True])
async def test_prompt_token_ids_of_a_chat_call_replace_its_messages_and_are_returned(api, spaces):
    engine = RecordingEngine(scripted_engine([{"content": "Hello."}]))
    one = await api(engine)
    body = {"messages": [{"role": "user", "content": "other"}], **IDS,
            "kv_transfer_params": {"prompt_token_ids": PROMPT}}  # fmt: skip
    text = json.dumps(body, separators=None if spaces else (",", ":")).encode()
    reply = await one.json("/v1/chat/completions", text)
    request = engine.requests[0]
    assert request.prompt.array().tolist() == reply["prompt_token_ids"] == PROMPT
    assert request.messages is None
    choice = reply["choices"][0]
    assert TOKENIZER.decode(choice["token_ids"]) == "Hello.<|im_end|>"
    entries = choice["logprobs"]["content"]
    assert [e["token"] for e in entries] == [f"token_id:{i}" for i in choice["token_ids"]]
    result = np.array([e["logprob"] for e in entries], dtype=np.float32)
    assert np.array_equal(result, scripted_logprobs(np.array(choice["token_ids"], dtype=np.int32)))


async def test_messages_are_rendered_to_ids_and_also_passed_to_the_engine(api):
    engine = RecordingEngine(scripted_engine([{"content": "Hello."}]))
    one = await api(engine)
    reply = await one.json(
        "/v1/chat/completions",
        {"messages": USER, "tools": [BASH], "return_token_ids": True, "model": "x",
         "chat_template_kwargs": {"enable_thinking": False}, "temperature": 0.5, "stop": "never",
         "response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
    )  # fmt: skip
    text = TOKENIZER.render(USER, [BASH], arguments={"enable_thinking": False})
    assert reply["prompt_token_ids"] == TOKENIZER.encode(text).tolist()
    request = engine.requests[0]
    assert (request.messages, request.tools, request.model) == (USER, [BASH], "x")
    assert (request.sampling.temperature, request.sampling.stop) == (0.5, ("never",))
    assert request.grammar == {"json_schema": {"a": 1}}


async def test_a_chat_call_with_echo_ignores_prompt_token_ids_as_vllm_does(api):
    one = await api(scripted_engine([{"content": "x"}]))
    body = {"messages": USER, "echo": True, "return_token_ids": True,
            "kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}}  # fmt: skip
    reply = await one.json("/v1/chat/completions", body)
    assert reply["prompt_token_ids"] == PROMPT


async def test_a_chat_reply_has_no_ids_logprobs_or_versions_unless_requested(api):
    one = await api(scripted_engine([{"content": "x"}]))
    reply = await one.json("/v1/chat/completions", {"messages": USER})
    choice = reply["choices"][0]
    assert reply["prompt_token_ids"] is None
    assert (choice["token_ids"], choice["logprobs"]) == (None, None)
    assert "weight_versions" not in choice


async def test_include_reasoning_false_also_leaves_out_ids_and_logprobs(api):
    one = await api(scripted_engine([{"reasoning": "secret", "content": "x"}]))
    body = {"messages": USER, "include_reasoning": False, **IDS}
    choice = (await one.json("/v1/chat/completions", body))["choices"][0]
    assert choice["message"]["content"] == "x"
    assert (choice["message"]["reasoning"], choice["token_ids"], choice["logprobs"]) == (None,) * 3


async def test_a_chat_stream_has_the_prompt_ids_once_and_every_output_id(api):
    one = await api(scripted_engine([{"reasoning": "some thought", "content": "Hello, world."}]))
    body: dict[str, Any] = {"messages": USER, **IDS, "stream_options": {"include_usage": True}}
    whole = (await one.json("/v1/chat/completions", body | {"stream": False}))["choices"][0]
    events = await one.events("/v1/chat/completions", body)
    assert events[0]["prompt_token_ids"] == PROMPT
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("prompt_token_ids" not in event for event in events[1:])
    pieces = [event["choices"][0] for event in events if event["choices"]]
    assert joined(p.get("token_ids") or [] for p in pieces) == whole["token_ids"]
    entries = joined((p["logprobs"] or {"content": []})["content"] for p in pieces)
    assert entries == whole["logprobs"]["content"]
    assert events[-1]["usage"]["completion_tokens"] == len(whole["token_ids"])


async def test_the_generate_route_returns_ids_logprobs_and_weight_versions(api):
    engine = scripted_engine([{"content": "Hello."}])
    await engine.set_version(7)
    one = await api(engine)
    body = {"token_ids": PROMPT, "sampling_params": {"logprobs": 1}, "return_token_ids": True,
            "request_id": "mine"}  # fmt: skip
    reply = await one.json("/inference/v1/generate", body)
    choice = reply["choices"][0]
    assert (reply["request_id"], reply["prompt_token_ids"]) == ("mine", PROMPT)
    assert TOKENIZER.decode(choice["token_ids"]) == "Hello.<|im_end|>"
    assert [e["token_id"] for e in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token_id"] == choice["token_ids"][0]
    count = len(choice["token_ids"])
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": count}]
    events = await one.events("/inference/v1/generate", body)
    assert events[0]["prompt_token_ids"] == PROMPT
    assert joined(e["choices"][0]["token_ids"] for e in events) == choice["token_ids"]
    plain = await one.json("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {}})
    assert (plain["prompt_token_ids"], plain["choices"][0]["logprobs"]) == (None, None)


@pytest.mark.parametrize("stop", ["lo, w", "d.", "never"])
async def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_token_ids(api, stop):
    one = await api(scripted_engine([{"content": "Hello, world."}]))
    body = {"messages": USER, "stop": [stop], "return_token_ids": True}
    shown = "Hello, world.".partition(stop)[0]
    choice = (await one.json("/v1/chat/completions", body))["choices"][0]
    assert choice["message"]["content"] == shown
    assert choice["stop_reason"] == (None if stop == "never" else stop)
    assert stop in TOKENIZER.decode(choice["token_ids"]) or stop == "never"
    events = await one.events("/v1/chat/completions", body)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == shown


async def test_a_stop_token_other_than_the_end_token_is_the_stop_reason(api):
    one = await api(scripted_engine([{"content": "Hello, world."}]))
    third = TOKENIZER.encode("Hello, world.").tolist()[2]
    body = {"messages": USER, "stop_token_ids": [third]}
    assert (await one.json("/v1/chat/completions", body))["choices"][0]["stop_reason"] == third


async def test_a_prompt_that_leaves_thinking_open_is_read_as_reasoning(api):
    one = await api(scripted_engine([{"reasoning": "hm", "content": "Hi."}]))
    held = [*PROMPT, *TOKENIZER.encode("<think>\n").tolist()]
    body = {"messages": USER, "kv_transfer_params": {"prompt_token_ids": held}}
    message = (await one.json("/v1/chat/completions", body))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Hi.")


async def test_a_named_tool_choice_finishes_with_stop_and_none_leaves_calls_as_content(api):
    one = await api(scripted_engine([{"shell": ["ls"]}]))
    body = {"messages": USER, "tools": [BASH]}
    named = {"type": "function", "function": {"name": "bash"}}
    choice = (await one.json("/v1/chat/completions", {**body, "tool_choice": named}))["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("stop", 1)
    choice = (await one.json("/v1/chat/completions", {**body, "tool_choice": "none"}))["choices"][0]
    assert choice["message"]["content"].startswith("<tool_call>")


# ---- bad input and failures


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", b"{oops", "malformed"),
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages: "),
        ("/v1/chat/completions", {"messages": []}, "no message"),
        ("/v1/chat/completions", {"messages": USER, "temperature": "hot"}, "$.temperature"),
        ("/v1/chat/completions", {"messages": USER, "n": 2}, "n = 2: this server samples only one"),
        ("/v1/chat/completions", {"messages": USER, "tools": {}}, "tools: "),
        ("/v1/chat/completions",
         {"messages": USER, "kv_transfer_params": {"prompt_token_ids": ["a"]}}, "ids"),
        ("/v1/chat/completions",
         {"messages": USER, "kv_transfer_params": {"prompt_token_ids": [999_999]}}, "not in"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "empty"),
        ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": "x", "sampling_params": {}}, "ids"),
        ("/tokenize", {}, "either prompt or messages"),
        ("/update_weight_version", {"new_version": "v2-final"}, "is not a number"),
        ("/pause?mode=slowly", {}, "known: abort, wait, keep"),
        ("/abort_requests", {"request_ids": 3}, "request_ids"),
    ],
)  # fmt: skip
async def test_invalid_request_bodies_get_400_with_the_field(api, path, body, says):
    one = await api(scripted_engine([{"content": "x"}]))
    status, message = await one.error(path, body)
    assert status == 400
    assert says in message


async def test_a_prompt_beyond_the_context_is_refused_as_vllm_refuses_it(api):
    one = await api(scripted_engine([{"content": "x"}], context_length=16))
    body = {"messages": [{"role": "user", "content": "word " * 50}]}
    status, message = await one.error("/v1/chat/completions", body)
    assert status == 400
    assert "maximum context length is 16 tokens" in message


class FailingEngine(RecordingEngine):
    """Gives one token, then fails as a test wants."""

    def __init__(self, error, before=0):
        super().__init__(scripted_engine([{}]))
        self.error, self.before = error, before

    async def generate(self, request):
        for _ in range(self.before):
            yield GenerateChunk(np.array([5], np.int32), np.array([-1.0], np.float32))
        raise self.error

    async def health(self):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineError("busy", retryable=True), 503),
        (EngineError("bad"), 500),
        (EngineError("no", status=404), 404),
        (EngineError("odd", status=599), 599),
        (ZeroDivisionError("bug"), 500),
    ],
)
async def test_an_engine_error_gives_its_http_status(api, error, status):
    one = await api(FailingEngine(error))
    for stream in (False, True):
        body = {"messages": USER, "stream": stream}
        found, message = await one.error("/v1/chat/completions", body)
        assert found == status
        assert str(error) in message


async def test_the_health_route_returns_503_when_the_engine_is_unhealthy(api):
    one = await api(FailingEngine(EngineError("dead")))
    async with one.session.get(one.url + "/health") as response:
        assert response.status == 503
    well = await api(InstantEngine())
    async with well.session.get(well.url + "/health") as response:
        assert response.status == 200


async def test_an_engine_error_in_mid_stream_is_an_error_event(api):
    one = await api(FailingEngine(EngineError("late", status=503), before=2))
    events = await one.events("/v1/chat/completions", {"messages": USER})
    assert events[-1]["error"]["message"] == "late"
    assert events[-1]["error"]["code"] == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_reply_closes_the_connection_without_an_end(api, stream):
    one = await api(scripted_engine([{"content": "one two three", "fault": "cut"}]))
    with pytest.raises(aiohttp.ClientError):
        await one.post("/v1/chat/completions", {"messages": USER, "stream": stream})
    assert (await one.json("/v1/models"))["data"][0]["id"] == "scripted"


# ---- life


async def test_a_client_that_disconnects_ends_its_engine_call(api):
    engine = RecordingEngine(scripted_engine([{"delay_s": 60}]))
    one = await api(engine)
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        asking = group.create_task(one.post("/v1/chat/completions", {"messages": USER}))
        while not engine.requests:  # noqa: ASYNC110 - the server's side has no event to wait for
            await asyncio.sleep(0.01)
        asking.cancel()
    async with asyncio.timeout(15):
        while not engine.closed_early:  # noqa: ASYNC110 - the server's side has no event to wait for
            await asyncio.sleep(0.01)
    assert engine.closed_early == [engine.requests[0].request_id]


async def test_closing_the_engine_server_aborts_running_calls():
    engine = RecordingEngine(scripted_engine([{"delay_s": 60}]))

    async def ask(url, session):
        async with session.post(url + "/v1/chat/completions", json={"messages": USER}) as response:
            return await response.json()

    async with (
        asyncio.timeout(15),
        asyncio.TaskGroup() as group,
        aiohttp.ClientSession() as session,
        EngineServer(engine) as server,
    ):
        task = group.create_task(ask(server.url, session))
        while not engine.requests:  # noqa: ASYNC110 - until the call has arrived
            await asyncio.sleep(0.01)
    assert task.result()["choices"][0]["finish_reason"] == "abort"


async def test_a_port_in_use_raises_an_error_with_its_address(api):
    one = await api(InstantEngine())
    port = int(one.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use"):
        async with EngineServer(InstantEngine(), port=port):
            pass


async def test_a_server_whose_tokenizer_cannot_be_loaded_closes_its_engine():
    class Closing(InstantEngine):
        closed = False

        async def aclose(self):
            self.closed = True

    engine = Closing()
    with pytest.raises(ConfigError, match="nowhere"):
        async with EngineServer(engine, tokenizer="/nowhere/at/all"):
            pass
    assert engine.closed


async def test_long_prompt_id_lists_are_passed_to_the_engine_unparsed(api):
    engine = RecordingEngine(InstantEngine(tokens=4))
    one = await api(engine)
    ids = np.resize(np.array(PROMPT), 300_000).tolist()
    body = {"messages": USER, "return_token_ids": True,
            "kv_transfer_params": {"prompt_token_ids": ids}}  # fmt: skip
    reply = await one.json("/v1/chat/completions", json.dumps(body, separators=(",", ":")).encode())
    assert reply["prompt_token_ids"] == ids
    assert reply["usage"]["prompt_tokens"] == len(ids)
    assert "_array" not in engine.requests[0].prompt.__dict__


# ---- looking things up


async def test_the_tokenize_route_returns_the_tokenizer_s_ids(api):
    one = await api(InstantEngine())
    body = await one.json("/tokenize", {"prompt": "hi there"})
    assert body["tokens"] == TOKENIZER.encode("hi there").tolist()
    assert body["count"] == len(body["tokens"])
    rendered = await one.json("/tokenize", {"messages": USER, "tools": [BASH]})
    assert rendered["tokens"] == TOKENIZER.encode(TOKENIZER.render(USER, [BASH])).tolist()


async def test_the_model_list_has_the_context_length_and_the_tokenizer_folder(api):
    one = await api(scripted_engine([{}], model="m", context_length=500))
    (model,) = (await one.json("/v1/models"))["data"]
    assert (await one.json("/version"))["version"].startswith("bridle-")
    assert (model["id"], model["max_model_len"]) == ("m", 500)
    assert model["root"] == str(TOKENIZER.folder)


class AbortedEngine(RecordingEngine):
    """Ends every call by itself, with a logprob that is none."""

    async def generate(self, request):
        nothing = np.array([np.nan], np.float32)
        yield GenerateChunk(np.array([5], np.int32), nothing, FinishReason.ABORT)


async def test_an_aborted_chat_call_has_finish_reason_abort(api):
    one = await api(AbortedEngine(scripted_engine([{}])))
    choice = (await one.json("/v1/chat/completions", {"messages": USER, **IDS}))["choices"][0]
    assert choice["finish_reason"] == "abort"

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from tests.engines.recording import InstantEngine, RecordingEngine
from tests.engines.stub import Stub, events, honest, sampled
from tests.engines.test_hostile import Proxy, without

from bridle.engines import open_engine
from bridle.engines.base import CutError, GarbledError, GenerateRequest, Versioned
from bridle.engines.ids import ArrayIds
from bridle.engines.vllm import VllmEngine
from bridle.engines.vllm_routes import VllmRoute
from bridle.errors import ContextOverflowError, EngineError
from bridle.experts import KEY, Experts, npy_text
from bridle.prompting.prompt import PromptIds
from bridle.scripted.engine import scripted_logprobs
from bridle.scripted.server import EngineServer
from bridle.scripted.tokenizer import load_tokenizer
from bridle.testing import scripted_engine
from bridle.types import FinishReason, LogprobMode, Reply, Sampling, ToolCall, VersionSpan

TOKENIZER = load_tokenizer(None)
PROMPT = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
CHAT = "v1/chat/completions"
TURN = {"reasoning": "hm", "content": "Hello, world, and all who live in it.",
        "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}  # fmt: skip


def request(prompt=PROMPT, **fields):
    fields.setdefault("sampling", Sampling(temperature=1.0))
    fields.setdefault("request_id", "r")
    return GenerateRequest(prompt=ArrayIds(np.asarray(prompt)), **fields)


async def collect(engine, made):
    return [chunk async for chunk in engine.generate(made)]


# ---- round trips through the real server


class Routing:
    """An engine that tells, for each token, its position and its id as its experts."""

    def __init__(self):
        self.inside = scripted_engine([TURN])

    def __getattr__(self, name):
        return getattr(self.inside, name)

    async def generate(self, asked):
        async for chunk in self.inside.generate(asked):
            ids = np.concatenate([asked.prompt.array(), chunk.output_ids])[:-1] % 1000
            rows = np.stack([np.arange(len(ids)), ids], axis=1).astype(np.int16)[:, :, None]
            yield replace(chunk, extra={KEY: Experts(0, rows)})


@pytest.mark.parametrize("route", VllmRoute)
@pytest.mark.parametrize("at_once", [False, True])
async def test_experts_of_new_tokens_come_over_http(connected, route, at_once):
    outside = await connected(Routing(), route=route)
    assert outside.tells_experts
    root = PromptIds.root(np.asarray(PROMPT, np.int32)[:3])
    prompt = root.extend(np.asarray(PROMPT, np.int32)[3:5], np.asarray(PROMPT, np.int32)[5:])
    asked = replace(request(), prompt=prompt)
    if at_once:
        await outside.begin(asked)
        chunk = outside.arrived(asked)
        outside.end(asked)
    else:
        (chunk,) = await collect(outside, asked)
    experts = chunk.extra[KEY]
    ids = np.concatenate([prompt.array(), chunk.output_ids])
    assert experts.start == 4
    assert experts.rows[:, 0, 0].tolist() == [*range(4, len(ids) - 1)]
    assert experts.rows[:, 1, 0].tolist() == (ids[4:-1] % 1000).tolist()


async def test_only_new_experts_are_asked_for_and_others_are_dropped(connected):
    rows = np.zeros((len(PROMPT), 2, 1), np.int16)
    async with Stub(**{CHAT: honest(routed_experts=npy_text(rows))}) as stub:
        outside = await connected(stub.url, start=False)
        prompt = PromptIds.root(np.asarray(PROMPT, np.int32))
        first, after = PromptIds.root(prompt.array()), prompt.extend(np.array([5]), np.array([6]))
        for one, start in ((first, None), (after, len(PROMPT))):
            (chunk,) = await collect(outside, replace(request(), prompt=one))
            assert stub.bodies[-1].get("routed_experts_prompt_start") == start
        assert KEY not in chunk.extra
        assert str(len(PROMPT)) in chunk.extra[KEY + "_dropped"]


@pytest.mark.parametrize("route", VllmRoute)
@pytest.mark.parametrize("stream", [False, True])
async def test_replies_over_http_equal_those_of_the_engine_in_process(connected, route, stream):
    inside = scripted_engine([TURN])
    await inside.set_version(3)
    outside = await connected(inside, route=route)
    (expected,) = await collect(inside, request())
    chunks = await collect(outside, request(stream=stream))
    assert (len(chunks) > 1) is stream
    ids = np.concatenate([chunk.output_ids for chunk in chunks])
    assert np.array_equal(ids, expected.output_ids)
    logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
    assert logprobs.dtype == np.float32
    assert np.array_equal(logprobs, expected.logprobs)
    reply = [c.prompt_ids_json for c in chunks if c.prompt_ids_json is not None]
    assert reply == [expected.prompt_ids_json]
    last = chunks[-1]
    assert (last.finish_reason, last.versions) == (
        FinishReason.STOP,
        (VersionSpan(3, 0, len(ids)),),
    )
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert last.reply is None


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_16384_and_200000_ids_are_sent_and_echoed_unchanged(connected, stream):
    for count in (16_384, 200_000):
        inside = InstantEngine()
        engine = RecordingEngine(inside)
        outside = await connected(engine)
        prompt = np.arange(count, dtype=np.int32) % 2000
        chunks = await collect(outside, request(prompt, stream=stream))
        assert chunks[0].prompt_ids_json == ArrayIds(prompt).json()
        assert np.array_equal(engine.requests[-1].prompt.array(), prompt)
        ids = np.concatenate([chunk.output_ids for chunk in chunks])
        assert np.array_equal(ids, inside.output_ids)


async def test_sampling_parameters_and_grammar_reach_the_server_on_every_route(connected):
    engine = RecordingEngine(scripted_engine([TURN]))
    for route in VllmRoute:
        outside = await connected(engine, route=route)
        wanted = Sampling(0.5, 0.9, 7, 11, 1, ("zz",), (5,), 3, 0.1, 0.2)
        grammar = {"json_schema": {"type": "object"}}
        await collect(outside, request(sampling=wanted, grammar=grammar))
        assert engine.requests[-1].sampling == wanted
        assert engine.requests[-1].grammar == grammar


async def test_stop_strings_and_budgets_end_replies_over_http_too(connected):
    outside = await connected(scripted_engine([TURN]))
    (chunk,) = await collect(outside, request(sampling=Sampling(stop=("world",))))
    assert (chunk.finish_reason, chunk.stop_text) == (FinishReason.STOP, "world")
    (chunk,) = await collect(outside, request(sampling=Sampling(max_tokens=3)))
    assert (chunk.finish_reason, len(chunk.output_ids)) == (FinishReason.LENGTH, 3)


async def test_a_delay_is_waited_for(connected):
    outside = await connected(scripted_engine([{"content": "x", "delay_s": 0.1}]))
    (chunk,) = await collect(outside, request())
    assert chunk.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("fault", "retryable"), [(500, True), (429, True), (400, False)])
@pytest.mark.parametrize("stream", [False, True])
async def test_faults_come_through_with_their_status(connected, fault, retryable, stream):
    outside = await connected(scripted_engine([{"fault": fault}]))
    with pytest.raises(EngineError) as caught:
        await collect(outside, request(stream=stream))
    assert (caught.value.status, caught.value.retryable) == (fault, retryable)


async def test_a_cut_reply_raises_cut_error_after_the_streamed_tokens(connected):
    outside = await connected(scripted_engine([{**TURN, "fault": "cut"}]))
    with pytest.raises(CutError):
        await collect(outside, request())
    got, error = [], None
    try:
        async for chunk in outside.generate(request(stream=True)):
            got += chunk.output_ids.tolist()
    except CutError as caught:
        error = caught
    assert error is not None
    assert TOKENIZER.decode(got).startswith("<think>\nhm")


async def test_an_abort_keeps_what_a_stream_gave_and_ends_the_engines_call(connected):
    inside = RecordingEngine(scripted_engine([{"content": "word " * 4000}]))
    outside = await connected(inside)
    got = []
    async for chunk in outside.generate(request(stream=True, request_id="mine")):
        got.append(chunk)
        if len(chunk.output_ids):
            await outside.abort("mine")
            await outside.abort("unknown")
    assert got[-1].finish_reason is FinishReason.ABORT
    sampled_count = sum(len(chunk.output_ids) for chunk in got)
    assert sampled_count > 0
    assert got[-1].versions == (VersionSpan(0, 0, sampled_count),)
    await ended_early(inside)


async def test_an_abort_ends_a_waiting_call(connected):
    inside = RecordingEngine(scripted_engine([{"delay_s": 60}]))
    outside = await connected(inside)
    inside.requests.clear()
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        task = group.create_task(collect(outside, request(request_id="mine")))
        while not inside.requests:  # noqa: ASYNC110 - the far side has no event
            await asyncio.sleep(0.005)
        await outside.abort("mine")
    (chunk,) = task.result()
    assert (chunk.finish_reason, len(chunk.output_ids)) == (FinishReason.ABORT, 0)
    await ended_early(inside)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_ends_the_engines_call(connected, stream):
    inside = RecordingEngine(scripted_engine([{"delay_s": 60}]))
    outside = await connected(inside)
    inside.requests.clear()
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        task = group.create_task(collect(outside, request(stream=stream)))
        while not inside.requests:  # noqa: ASYNC110 - the far side has no event
            await asyncio.sleep(0.005)
        task.cancel()
    await ended_early(inside)


async def ended_early(engine):
    async with asyncio.timeout(15):
        while not engine.closed_early:  # noqa: ASYNC110 - the far side has no event
            await asyncio.sleep(0.005)


async def test_leaving_a_stream_early_ends_the_engines_call(connected):
    inside = RecordingEngine(scripted_engine([{"content": "word " * 40_000}]))
    outside = await connected(inside)
    chunks = outside.generate(request(stream=True))
    assert len((await anext(chunks)).output_ids) > 0
    await chunks.aclose()
    await ended_early(inside)


async def test_closing_an_engine_client_aborts_its_calls(connected):
    inside = RecordingEngine(scripted_engine([{"delay_s": 60}]))
    outside = await connected(inside)
    inside.requests.clear()
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        task = group.create_task(collect(outside, request()))
        while not inside.requests:  # noqa: ASYNC110 - the far side has no event
            await asyncio.sleep(0.005)
        await outside.aclose()
    (chunk,) = task.result()
    assert (chunk.finish_reason, len(chunk.output_ids)) == (FinishReason.ABORT, 0)
    await ended_early(inside)


async def test_a_prompt_without_room_is_an_overflow_here_or_there(connected):
    outside = await connected(scripted_engine([TURN], context_length=64))
    with pytest.raises(ContextOverflowError):
        await collect(outside, request(np.arange(64) + 33))
    with pytest.raises(ContextOverflowError) as caught:
        await collect(outside, request(np.arange(60) + 33, sampling=Sampling(max_tokens=10)))
    assert (caught.value.prompt_tokens, caught.value.context_length) == (60, 64)


async def test_150_concurrent_calls_over_http_all_finish(connected):
    outside = await connected(scripted_engine([{**TURN, "delay_s": 0.1}]))
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        calls = [
            group.create_task(collect(outside, request(request_id=f"r{number}")))
            for number in range(150)
        ]
    assert {call.result()[-1].finish_reason for call in calls} == {FinishReason.STOP}


async def test_a_text_only_server_s_parsed_reply_is_used_whole_and_streamed():
    async with EngineServer(scripted_engine([TURN])) as server, Proxy(server).open_with() as opened:
        proxy, url = opened
        proxy.edit = without("token_ids", "prompt_token_ids", "logprobs")
        outside = VllmEngine(url, route=VllmRoute.CHAT, allow_untokenized=True)
        await outside.start()
        messages = [{"role": "user", "content": "hi"}]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        for stream in (False, True):
            made = request(messages=messages, tools=tools, stream=stream)
            chunks = await collect(outside, made)
            reply = chunks[-1].reply
            assert (reply.content, reply.reasoning) == (TURN["content"], "hm")
            assert "".join(chunk.delta.text for chunk in chunks) == TURN["content"]
            assert "".join(chunk.delta.reasoning for chunk in chunks) == "hm"
            assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", '{"a": 1}')]
        await outside.aclose()


# ---- start


async def test_the_info_of_an_engine_client_is_that_of_its_server(connected):
    inside = scripted_engine([TURN], model="m", context_length=500)
    await inside.set_version(4)
    outside = await connected(inside)
    info = await outside.start()
    assert (info.model, info.context_length, info.version) == ("m", 500, 4)
    assert (info.logprob_mode, info.token_in) == (LogprobMode.RAW, True)
    assert info.tokenizer_dir == str(TOKENIZER.folder)
    assert outside.server_version.startswith("bridle-")
    assert all(row["ok"] for row in outside.report.rows())
    await outside.health()
    await outside.set_version(9)
    assert (await outside.start()).version == 9
    assert isinstance(outside, Versioned)


async def test_end_tokens_come_from_the_models_own_files(stub, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    models = {"data": [{"id": "m", "max_model_len": 100, "root": str(tmp_path)}]}
    server = await stub(**{"v1/models": models, CHAT: honest()})
    found = []
    for name, text in (
        ("config.json", '{"eos_token_id": 5}'),
        ("generation_config.json", '{"eos_token_id": [5, 6]}'),
        ("generation_config.json", "{broken"),
        ("config.json", "{}"),
    ):
        (tmp_path / name).write_text(text)
        engine = VllmEngine(server.url)
        found.append((await engine.start()).eos_token_ids)
        await engine.aclose()
    assert found == [(5,), (5, 6), (5,), ()]


async def test_the_server_s_version_is_read_and_an_unknown_model_name_refused(stub, connected):
    server = await stub(**{CHAT: honest(), "weight_info": {"weight_version": "12"}})
    assert (await (await connected(server.url)).start()).version == 12
    with pytest.raises(EngineError, match="has no model 'other'"):
        await connected(server.url, model="other")
    assert (await (await connected(server.url, model="stub")).start()).model == "stub"


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ({"data": []}, "lists no model"),
        ({"data": [{"id": "m"}]}, "reports no max_model_len"),
        (b"<html>", "not JSON"),
        (401, "is the API key right"),
        ({"data": None}, "lists no model"),
    ],
)
async def test_a_server_without_a_usable_model_list_is_refused(stub, connected, models, says):
    server = await stub(**{"v1/models": models})
    with pytest.raises(EngineError, match=says):
        await connected(server.url)


async def test_a_server_that_ignores_ids_is_refused_with_the_cure(stub, connected):
    server = await stub(**{CHAT: sampled([1, 2, 3])})
    with pytest.raises(EngineError, match="cannot give what training needs") as caught:
        await connected(server.url)
    assert "token in: it used another prompt" in str(caught.value)
    assert "--enable-scale-out" in str(caught.value)


def generate(body):
    """The token route, honest."""
    read = json.loads(body)
    entries = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.5}]
    return sampled(read["token_ids"], logprobs={"content": entries}, message=None)


def taken(engine):
    """Paths of the route that was taken."""
    return [row["found"] for row in engine.report.rows() if row["what"] == "route"]


async def test_a_fresh_vllm_whose_weights_have_no_number_is_at_version_0(stub, connected):
    server = await stub(**{CHAT: honest(), "weight_info": {"weight_version": "default"}})
    engine = await connected(server.url)
    assert (await engine.start()).version == 0
    await engine.set_version(6)
    (chunk,) = await collect(engine, request())
    assert chunk.versions == (VersionSpan(6, 0, 2),)


async def test_tokens_of_weights_without_a_number_have_the_version_at_the_beginning_of_their_call(
    stub, connected
):
    engines, reply = [], honest()

    def over_an_update(asked):
        answer = reply(asked)
        if engines:
            engines[0].version = 9
            spans = [("default", 0, 1), ("9", 1, 2)]
            answer["choices"][0]["weight_versions"] = [
                {"version": version, "start": start, "end": end} for version, start, end in spans
            ]
        return answer

    server = await stub(**{CHAT: over_an_update, "weight_info": {"weight_version": "default"}})
    engines.append(await connected(server.url))
    (chunk,) = await collect(engines[0], request())
    assert chunk.versions == (VersionSpan(0, 0, 1), VersionSpan(9, 1, 2))
    assert not chunk.numbered


async def test_the_route_that_reports_versions_is_preferred_if_weights_can_change(stub, connected):
    replies = {CHAT: honest(), "inference/v1/generate": generate}
    fixed = await stub(**replies)
    assert taken(await connected(fixed.url)) == ["/v1/chat/completions"]
    changing = await stub(**replies, weight_info={"weight_version": "3"})
    assert taken(await connected(changing.url)) == ["/inference/v1/generate"]
    closed = await stub(**{CHAT: honest(), "weight_info": {"weight_version": "3"}})
    assert taken(await connected(closed.url)) == ["/v1/chat/completions"]


async def test_the_first_route_that_passes_the_probe_is_used(stub, connected):
    server = await stub(**{CHAT: sampled([1, 2, 3]), "inference/v1/generate": generate})
    engine = await connected(server.url)
    (chunk,) = await collect(engine, request())
    assert chunk.output_ids.tolist() == [7, 8]
    assert server.bodies[-1]["sampling_params"]["max_tokens"] == 1000 - len(PROMPT)
    assert taken(engine) == ["/inference/v1/generate"]


def text_only(body):
    read = json.loads(body)
    message = {
        "content": f"to {read['messages'][0]['content']}",
        "reasoning": "hm",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
    }
    return {"choices": [{"message": message, "finish_reason": "tool_calls"}]}


async def test_a_text_only_server_is_refused_without_allow_untokenized(stub, connected):
    server = await stub(**{CHAT: text_only})
    with pytest.raises(EngineError, match="sampled ids: none"):
        await connected(server.url)
    engine = await connected(server.url, allow_untokenized=True)
    info = await engine.start()
    assert (info.token_in, info.logprob_mode) == (False, LogprobMode.NONE)
    (chunk,) = await collect(engine, request(messages=[{"role": "user", "content": "you"}]))
    calls = (ToolCall("c", "f", "{}"),)
    assert chunk.reply == Reply("to you", "hm", calls, FinishReason.STOP)
    assert (len(chunk.output_ids), len(chunk.logprobs)) == (0, 0)
    assert "kv_transfer_params" not in server.bodies[-1]


async def test_a_reply_without_ids_from_a_server_that_passed_the_probe_is_an_error(stub, connected):
    server = await stub(**{CHAT: honest()})
    engine = await connected(server.url, allow_untokenized=True)
    server.replies["/" + CHAT] = text_only
    with pytest.raises(EngineError, match="no token ids"):
        await collect(engine, request())


async def test_a_logprob_mode_that_cannot_be_measured_can_be_configured(stub, connected):
    server = await stub(**{CHAT: honest(values=(0.0, 0.0))})
    with pytest.raises(EngineError, match="logprob mode: could not be measured"):
        await connected(server.url)
    engine = await connected(server.url, logprob_mode=LogprobMode.PROCESSED)
    assert (await engine.start()).logprob_mode is LogprobMode.PROCESSED


async def test_logprobs_that_name_no_ids_are_noted_not_refused(stub, connected):
    entries = {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]}
    server = await stub(**{CHAT: honest(logprobs=entries)})
    engine = await connected(server.url)
    lacking = [row["what"] for row in engine.report.rows() if not row["ok"]]
    assert lacking == ["pairing", "weights", "streaming"]  # the stub has no other routes


# ---- replies that go wrong


@pytest.fixture
async def turned(stub, connected):
    """An adapter of a good server whose next replies are `reply`."""

    async def make(reply, **options):
        server = await stub(**{CHAT: honest()})
        engine = await connected(server.url, **options)
        server.replies["/" + CHAT] = reply
        return engine

    return make


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (honest(ids=(7, 8, 9)), "gave 3 token ids, but 2 logprobs"),
        (honest(logprobs={}), "gave 2 token ids, but 0 logprobs|without a logprob of each"),
        (honest(token_ids=None), "no token ids|other ids"),
        (honest(token_ids=[8, 7]), "belong to other token ids"),
        (honest(finish_reason="error"), "ended a reply with the unknown finish reason 'error'"),
        (honest(finish_reason=None), "without a finish reason"),
        ({"choices": []}, "without a finish reason"),
        (b"<html>no</html>", "with a page, not JSON"),
        (b'{"choices": 5}', "cannot be read"),
        (503, "answered 503"),
    ],
)
async def test_a_reply_that_cannot_be_used_is_an_engine_error(turned, reply, says):
    engine = await turned(reply)
    with pytest.raises(EngineError, match=says):
        await collect(engine, request())


def piece(ids, **choice):
    entries = [{"token": f"token_id:{i}", "logprob": -1.0} for i in ids]
    return {
        "choices": [{"delta": {}, "token_ids": ids, "logprobs": {"content": entries}, **choice}]
    }


@pytest.mark.parametrize(
    ("parts", "kind", "says"),
    [
        ([piece([5])], CutError, "without a finish reason"),
        ([piece([5]), {"error": {"message": "gone"}}], EngineError, "failed in mid-reply"),
        ([piece([5]), b"data: {oops\n\n"], EngineError, "cannot be read"),
        ([], CutError, "without a finish reason"),
        ([piece([5], finish_reason="stop"), piece([6])], GarbledError, "behind the end"),
        ([piece([5], finish_reason="stop")] * 2, GarbledError, "behind the end"),
    ],
)
async def test_a_stream_that_goes_wrong_is_an_engine_error(turned, parts, kind, says):
    engine = await turned(events(*parts))
    with pytest.raises(kind, match=says):
        await collect(engine, request(stream=True))


async def test_a_stream_with_a_finish_reason_may_end_without_done(turned):
    first = {"prompt_token_ids": PROMPT.tolist(), "choices": [{"delta": {"role": "assistant"}}]}
    last = piece([8], finish_reason="stop", weight_versions=[{"version": 2, "start": 0, "end": 2}])
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
    engine = await turned(events(first, piece([7]), last, usage, done=False))
    chunks = await collect(engine, request(stream=True))
    assert [chunk.output_ids.tolist() for chunk in chunks] == [[], [7], [8]]
    assert chunks[0].prompt_ids_json == ArrayIds(PROMPT).json()
    assert (chunks[-1].versions, chunks[-1].cached_tokens) == ((VersionSpan(2, 0, 2),), 3)


async def test_a_reply_without_versions_gets_the_version_of_set_version(turned):
    engine = await turned(honest())
    await engine.set_version(6)
    (chunk,) = await collect(engine, request())
    assert chunk.versions == (VersionSpan(6, 0, 2),)


async def test_a_call_to_an_engine_that_is_gone_is_a_retryable_error(connected):
    server = EngineServer(scripted_engine([TURN]))
    async with server:
        engine = await connected(server.url)
    with pytest.raises(EngineError) as caught:
        await collect(engine, request())
    assert caught.value.retryable
    with pytest.raises(EngineError):
        await engine.health()


@pytest.mark.parametrize("root", ["", "/v1"])
async def test_the_short_form_names_the_server_its_key_and_whether_text_will_do(
    stub, monkeypatch, root
):
    monkeypatch.setenv("BRIDLE_ENGINE_API_KEY", "k")
    server = await stub(**{CHAT: text_only})
    engine = open_engine(server.url + root, allow_untokenized=True)
    assert isinstance(engine, VllmEngine)
    assert not (await engine.start()).token_in
    await engine.aclose()
    assert {one["Authorization"] for one in server.headers} == {"Bearer k"}


async def test_scripted_logprobs_cross_http_exactly(connected):
    outside = await connected(scripted_engine([TURN]))
    (chunk,) = await collect(outside, request())
    assert np.array_equal(chunk.logprobs, scripted_logprobs(chunk.output_ids))

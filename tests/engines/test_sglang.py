import asyncio
import base64
import json
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from tests.engines.recording import RecordingEngine
from tests.engines.sglang_server import SglangServer
from tests.engines.shapes import PROMPT, collect, ids_of, request
from tests.engines.stub import Stub

from bridle.engines import open_engine
from bridle.engines.base import ADAPTER
from bridle.engines.sglang import SglangEngine
from bridle.errors import EngineError
from bridle.prompting.prompt import PromptIds
from bridle.testing import scripted_engine
from bridle.types import FinishReason, LogprobMode, Sampling, VersionSpan

TURN = {"content": "Hello, world."}
MODEL = {"model_path": "m", "weight_version": "default"}
MODELS = {"data": [{"id": "stub", "max_model_len": 1000}]}


def answer(prompt, ids=(7, 8), **meta):
    pairs = [[-0.5 * (at + 1), one, None] for at, one in enumerate(ids)]
    reply = {"finish_reason": {"type": "length", "length": 2}, "prompt_tokens": len(prompt),
            "completion_tokens": len(ids), "output_token_logprobs": pairs, **meta}  # fmt: skip
    return {"output_ids": list(ids), "prompt_token_ids": prompt, "meta_info": reply}


def honest(**changes):
    """`/generate` as SGLang answers it, but never in a stream."""

    def reply(body):
        read = json.loads(body)
        sampling = read["sampling_params"]
        if "logit_bias" in sampling:
            message = "logit_bias must has keys in [0, 2047], got 2147483647."
            return 400, {"error": {"message": message}}
        if sampling.get("top_p") == 2.0:
            return 400, {"error": {"message": "top_p must be in (0, 1], got 2.0."}}
        return answer(read["input_ids"], **changes)

    return reply


@pytest.fixture
async def opened():
    """Makes a stub SGLang with these replies, and an adapter of it."""
    made = []

    async def make(start=True, options=None, **replies):
        stub = await Stub(**{"model_info": MODEL, "v1/models": MODELS, "generate": honest(),
                             "health": b"", **replies}).__aenter__()  # fmt: skip
        engine = SglangEngine(stub.url, **(options or {}))
        made.append((stub, engine))
        if start:
            await engine.start()
        return stub, engine

    yield make
    for stub, engine in made:
        await engine.aclose()
        await stub.__aexit__()


def lacking(engine):
    return [row["what"] for row in engine.report.rows() if not row["ok"]]


async def test_the_short_form_names_the_server_its_key_and_whether_text_will_do(
    opened, monkeypatch
):
    monkeypatch.setenv("BRIDLE_ENGINE_API_KEY", "k")
    reply = {"text": "hello", "meta_info": {"finish_reason": {"type": "stop", "matched": 5}}}
    stub, _ = await opened(start=False, generate=reply)
    engine = open_engine(f"sglang:{stub.url}", allow_untokenized=True)
    assert isinstance(engine, SglangEngine)
    assert not (await engine.start()).token_in
    await engine.aclose()
    assert {one["Authorization"] for one in stub.headers} == {"Bearer k"}


async def test_the_start_reads_model_context_version_and_streaming_of_the_server(opened):
    served = {"version": "0.5.23", "incremental_streaming_output": True}
    stub, engine = await opened(server_info=served)
    info = await engine.start()
    assert (info.model, info.context_length, info.version) == ("stub", 1000, 0)
    assert info.logprob_mode is LogprobMode.RAW
    assert engine.vocab_size == 2048
    assert engine.server_version == "0.5.23"
    found = {row["what"]: row["found"] for row in engine.report.rows()}
    assert found["server"] == "SGLang 0.5.23"
    assert found["vocabulary"] == "2048 ids"
    assert found["streams"] == "they send only new tokens"
    assert any("sampling_seed" in body["sampling_params"] for body in stub.bodies)


async def test_an_older_sglang_server_is_used_without_the_fields_it_refuses(opened):
    def old(body):
        read = json.loads(body)
        sampling = read["sampling_params"]
        if "logit_bias" in sampling or "sampling_seed" in sampling:
            name = "logit_bias" if "logit_bias" in sampling else "sampling_seed"
            return 400, {"error": {"message": f"got an unexpected keyword argument '{name}'"}}
        reply = [[None, one, None] for one in read["input_ids"]]
        first = read.get("logprob_start_len") == 0
        whole = answer(read["input_ids"], input_token_logprobs=reply if first else [])
        return {key: value for key, value in whole.items() if key != "prompt_token_ids"}

    stub, engine = await opened(
        model_info=404, get_model_info={"model_path": "m"}, server_info=404,
        get_server_info={"stream_output": True, "context_length": 500}, generate=old,
        **{"v1/models": 404},
    )  # fmt: skip
    info = await engine.start()
    assert (info.token_in, info.context_length, info.model) == (True, 500, "default")
    assert engine.vocab_size is None
    (chunk,) = await collect(engine, request([5], sampling=Sampling(seed=3, max_tokens=2)))
    assert "sampling_seed" not in stub.bodies[-1]["sampling_params"]
    assert "logprob_start_len" not in stub.bodies[-1]
    assert (chunk.versions, chunk.prompt_ids_json) == ((VersionSpan(0, 0, 2),), None)
    assert {"vocabulary", "version route"} <= set(lacking(engine))


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ({"model_info": 404}, "is this SGLang"),
        ({"model_info": b"<html>"}, "not JSON"),
        ({"model_info": 401}, "is the API key right"),
        ({"v1/models": {"data": []}}, "reports no context length"),
        ({"generate": answer([1, 2, 3])}, "token in: it used another prompt"),
        ({"generate": {"text": "x"}}, "router"),
        ({"generate": 500}, "answered 500"),
    ],
)
async def test_a_server_unfit_for_training_is_refused_with_its_reason(opened, replies, says):
    with pytest.raises(EngineError, match=says):
        await opened(**replies)


async def test_a_model_that_the_server_does_not_serve_is_refused_by_name(opened):
    with pytest.raises(EngineError, match="has no model 'other'"):
        await opened(options={"model": "other"})


async def test_a_text_only_server_is_refused_without_allow_untokenized(opened):
    reply = {"text": "hello", "meta_info": {"finish_reason": {"type": "stop", "matched": 5}}}
    with pytest.raises(EngineError, match="sampled ids: none"):
        await opened(generate=reply)
    _, engine = await opened(generate=reply, options={"allow_untokenized": True})
    info = await engine.start()
    assert (info.token_in, info.logprob_mode) == (False, LogprobMode.NONE)
    (chunk,) = await collect(engine, request())
    assert (chunk.reply.content, len(chunk.output_ids)) == ("hello", 0)


async def test_a_reply_without_ids_from_a_server_that_passed_the_probe_is_an_error(opened):
    stub, engine = await opened()
    reply = {"text": "hello", "meta_info": {"finish_reason": {"type": "stop", "matched": 5}}}
    stub.replies["/generate"] = reply
    with pytest.raises(EngineError, match="no token ids"):
        await collect(engine, request())


async def test_a_configured_logprob_mode_that_measurement_contradicts_is_refused(opened):
    with pytest.raises(EngineError, match="raw by measurement, processed by configuration"):
        await opened(options={"logprob_mode": LogprobMode.PROCESSED})


async def test_an_abort_names_the_calls_own_id_and_keeps_its_tokens(opened):
    stub, engine = await opened()
    aborted = asyncio.Event()

    async def slow(request):
        body = json.loads(await request.read())
        await aborted.wait()
        reply = {"type": "abort", "message": "Aborted", "status_code": None}
        return web.json_response(answer(body["input_ids"], finish_reason=reply))

    def abort(body):
        assert json.loads(body)["rid"] == stub.bodies[-2]["rid"]
        aborted.set()
        return b""

    stub.replies |= {"/generate": slow, "/abort_request": abort}
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine, request(request_id="r")))
        while not stub.bodies[-1].get("rid", "").startswith("r-"):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.005)
        await engine.abort("r")
    (chunk,) = task.result()
    assert (chunk.finish_reason, ids_of([chunk]).tolist()) == (FinishReason.ABORT, [7, 8])


@pytest.mark.parametrize("reply", [404, 401, 500])
async def test_a_server_that_refuses_the_abort_is_disconnected(opened, reply):
    async def silence(_request):
        await asyncio.sleep(30)

    stub, engine = await opened(abort_request=reply)
    stub.replies["/generate"] = silence
    count = len(stub.bodies)
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        task = group.create_task(collect(engine, request(request_id="r")))
        while len(stub.bodies) == count:  # noqa: ASYNC110 - the stub has no event
            await asyncio.sleep(0.005)
        await engine.abort("r")
    assert task.result()[-1].finish_reason is FinishReason.ABORT


async def test_no_request_id_is_a_prefix_of_another(opened):
    stub, engine = await opened()
    for name in ("r", "r-1"):
        await collect(engine, request(request_id=name))
    first, second = (body["rid"] for body in stub.bodies[-2:])
    assert not second.startswith(first)


async def test_a_health_check_does_not_sample(opened):
    info = {"incremental_streaming_output": True}
    stub, engine = await opened(server_info=info, health=503, health_generate=503)  # both sample
    before = len(stub.bodies)
    await engine.health()
    assert len(stub.bodies) == before
    stub.replies["/server_info"] = 503
    with pytest.raises(EngineError):
        await engine.health()


REPORTS = {"version": "0.5.23", "enable_return_routed_experts": True}


async def test_a_server_that_was_started_to_report_experts_is_asked_for_them(opened):
    generate = honest(routed_experts="AAAA")
    stub, engine = await opened(generate=generate, server_info=REPORTS)
    assert not any("return_routed_experts" in body for body in stub.bodies), "the probe's"
    (chunk,) = await collect(engine, request())
    assert stub.bodies[-1]["return_routed_experts"] is True
    assert "config.json" in chunk.extra["routed_experts_dropped"]
    stub, engine = await opened(server_info=REPORTS | {"enable_return_routed_experts": False})
    await collect(engine, request())
    assert "return_routed_experts" not in stub.bodies[-1]


async def test_experts_are_asked_for_from_the_first_new_token(opened, tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2, "num_experts_per_tok": 1}')
    (tmp_path / "tokenizer.json").write_text("{}")
    parent = PromptIds.root(np.arange(3, dtype=np.int32))
    prompt = parent.extend(np.array([3], np.int32), np.array([4], np.int32))
    numbers = np.arange(6 * 2, dtype=np.int32)
    reply = base64.b64encode(numbers[3 * 2 :].tobytes()).decode()
    generate = honest(routed_experts=reply)
    about = {"model_path": str(tmp_path), "weight_version": "default"}
    stub, engine = await opened(generate=generate, server_info=REPORTS, model_info=about)
    (chunk,) = await collect(engine, replace(request(), prompt=prompt))
    assert stub.bodies[-1]["routed_experts_start_len"] == 3
    tokens = len(prompt) + len(chunk.output_ids)
    experts = chunk.extra["routed_experts"]
    assert (experts.start, tokens - 1) == (3, 3 + len(experts.rows))
    assert experts.rows[:, 1, 0].tolist() == [7, 9, 11]


async def test_new_weights_are_loaded_while_the_server_is_held(opened):
    stub, engine = await opened(
        pause_generation=b"{}",
        continue_generation=b"{}",
        update_weights_from_disk={"success": True},
    )
    await engine.update_weights("/m", 6)
    held, load, _ = stub.bodies[-3:]
    assert held == {"mode": "retract"}
    assert load == {"model_path": "/m", "weight_version": "6"}
    assert engine.version == 6
    assert await engine.pause("abort")
    await engine.update_weights("/m", 7)
    assert stub.bodies[-1] == {"model_path": "/m", "weight_version": "7"}
    await engine.resume()
    stub.replies["/update_weights_from_disk"] = (400, {"success": False, "message": "no such"})
    with pytest.raises(EngineError, match="no such"):
        await engine.update_weights("/m", 8)
    assert engine.version == 7


async def test_a_lora_adapter_is_refused_without_a_request_to_the_server(opened, tmp_path):
    stub, engine = await opened(pause_generation=b"{}", update_weights_from_disk={"success": True})
    (tmp_path / ADAPTER).touch()
    asked = len(stub.bodies)
    with pytest.raises(EngineError, match=r"is a LoRA adapter.*sample with vLLM or the embedded"):
        await engine.update_weights(tmp_path, 1)
    assert len(stub.bodies) == asked


async def test_a_server_without_control_routes_cannot_be_held(opened):
    _, engine = await opened()
    assert not await engine.pause("keep")
    with pytest.raises(EngineError, match="takes no weights"):
        await engine.update_weights("/m", 1)
    (chunk,) = await collect(engine, request())
    assert chunk.finish_reason is FinishReason.LENGTH


async def test_calls_go_on_after_a_pause_that_the_server_refused(opened):
    _, engine = await opened(pause_generation=(500, {"message": "no time"}))
    with pytest.raises(EngineError, match="no time"):
        await engine.update_weights("/m", 1)
    async with asyncio.timeout(5):
        (chunk,) = await collect(engine, request())
    assert chunk.finish_reason is FinishReason.LENGTH


async def test_pause_in_wait_mode_finishes_running_calls_and_holds_new_ones():
    inside = RecordingEngine(scripted_engine([{**TURN, "delay_s": 0.1}]))
    async with SglangServer(inside) as server:
        engine = SglangEngine(server.url)
        await engine.start()
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            first = group.create_task(collect(engine, request(request_id="one")))
            await asyncio.sleep(0.02)
            assert await engine.pause("wait")
            assert first.done()
            second = group.create_task(collect(engine, request(request_id="two")))
            await asyncio.sleep(0.02)
            assert not second.done()
            await engine.resume()
        await engine.aclose()
        await engine.aclose()


async def test_text_is_tokenised_and_rendered_by_the_server():
    async with SglangServer(scripted_engine([TURN])) as server:
        engine = SglangEngine(server.url)
        ids = await engine.tokenize("hi")
        assert ids is not None
        rendered = await engine.template([{"role": "user", "content": "hi"}], None, {})
        assert rendered.tolist() == PROMPT.tolist()
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        with_tools = await engine.template([{"role": "user", "content": "hi"}], tools, {})
        assert len(with_tools) > len(rendered)
        await engine.aclose()


async def test_pieces_that_arrive_together_are_one_chunk(opened):
    ids = list(range(7, 17))

    def reply(body):
        read = json.loads(body)
        if not read.get("stream"):
            return honest()(body)
        result = []
        for count, one in enumerate(ids, 1):
            finish = {"type": "length", "length": len(ids)} if count == len(ids) else None
            piece = answer(read["input_ids"], [one], completion_tokens=count, finish_reason=finish)
            del piece["prompt_token_ids"]
            result.append(b"data: " + json.dumps(piece).encode() + b"\n\n")
        return web.Response(
            body=b"".join([*result, b"data: [DONE]\n\n"]), content_type="text/event-stream"
        )

    _, engine = await opened(server_info={"incremental_streaming_output": True}, generate=reply)
    chunks = await collect(engine, request(PROMPT, stream=True))
    assert ids_of(chunks).tolist() == ids
    assert len(chunks) == 2, "all but the last piece, which tells the end"
    assert chunks[-1].versions == (VersionSpan(0, 0, len(ids)),)

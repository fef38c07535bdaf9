"""A vLLM's replies to messages with images; the fields are the package's."""

import base64
import json

import msgspec
import numpy as np
import pytest
from tests.engines.stub import honest, sampled

from bridle.engines.base import GenerateRequest, Seeing, Templating
from bridle.engines.ids import ArrayIds
from bridle.engines.vllm_routes import VllmRoute
from bridle.errors import EngineError
from bridle.types import FinishReason, Sampling

MESSAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
RENDERED = {
    "request_id": "r",
    "token_ids": [5, 9, 9, 9, 6, 9, 9],
    "sampling_params": {},
    "features": {
        "mm_hashes": {"image": ["a", "b"]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 3}, {"offset": 5, "length": 2}]},
        "kwargs_data": None,
    },
}
CHAT, RENDER = "v1/chat/completions", "v1/chat/completions/render"
BLIND = {"error": {"message": "x is not a multimodal model", "code": 400}}


@pytest.fixture
def sees(stub, connected):
    """Return what an adapter sees on a server of these replies, and the server."""

    async def see(**replies):
        server = await stub(**{CHAT: honest(), **replies})
        engine = await connected(server.url, route=VllmRoute.CHAT)
        assert isinstance(engine, Seeing)
        server.bodies.clear()
        return server, await engine.see(MESSAGES, TOOLS, {"enable_thinking": True})

    return see


async def test_the_render_route_gives_prompt_ids_and_image_positions(sees):
    server, seen = await sees(**{RENDER: RENDERED})
    assert seen.ids.tolist() == RENDERED["token_ids"]
    assert seen.ids.dtype == np.int32
    assert seen.places == ({"start": 1, "length": 3}, {"start": 5, "length": 2})
    body, *alone = server.bodies
    assert len(alone) == 1  # of the first image; the messages show no second one
    assert body == {
        "model": "stub",
        "messages": MESSAGES,
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": True},
        "tool_choice": "none",
        "mm_payload": "none",
    }


GRID = {"data": ["int64", [3], msgspec.msgpack.Ext(3, np.array([1, 4, 6]).tobytes())], "field": []}


AS_VLLM_PACKS = (
    "gq5pbWFnZV9ncmlkX3Rod4KkZGF0YZOlaW50NjSRA8cYAwEAAAAAAAAABAAAAAAAAAAGAAAAAAAAAKVm"
    "aWVsZJKnYmF0Y2hlZIGra2VlcF9vbl9jcHXDq251bV9wYXRjaGVzgqRkYXRhk6VpbnQ2NJDXAwEAAAAAAAAApWZpZWxkkqdiYXRjaGVkgatrZWVwX29uX2NwdcM="
)
"""`image_grid_thw` [1, 4, 6] and `num_patches` 1, by `encode_mm_kwargs_item` of vLLM 0.32.0."""


def packed(**item):
    return base64.b64encode(msgspec.msgpack.encode(item)).decode()


def one_image(metadata, name="a"):
    """Return what is rendered of one image."""
    features = {
        "mm_hashes": {"image": [name]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 3}]},
        "mm_metadata": metadata,
    }
    return {"token_ids": [5, 9, 9, 9], "features": features}


async def test_the_processed_grid_of_an_image_is_requested_once(stub, connected):
    reply = one_image({"image": [AS_VLLM_PACKS]})
    server = await stub(**{CHAT: honest(), RENDER: reply})
    engine = await connected(server.url, route=VllmRoute.CHAT)
    server.bodies.clear()
    for _ in range(2):
        seen = await engine.see(MESSAGES, TOOLS, {})
        grid = {"image_grid_thw": [1, 4, 6], "num_patches": 1}
        assert seen.places == ({"start": 1, "length": 3, "grid": grid},)
    assert [body["mm_payload"] for body in server.bodies] == ["none", "tensors", "none"]
    assert server.bodies[1]["messages"] == MESSAGES
    assert "tools" not in server.bodies[1]


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"image": [None]},
        {"image": []},
        {"image": ["!"]},
        {"image": [packed(grid={"data": ["bfloat17", [1], b"aa"]})]},
        {"image": [packed(grid={"data": ["int64", [2], b"aa"]})]},
        {"image": [packed(grid=GRID), packed(grid=GRID)]},
    ],
)
async def test_missing_or_unreadable_image_sizes_are_left_out(sees, metadata):
    _, seen = await sees(**{RENDER: one_image(metadata)})
    assert seen.places == ({"start": 1, "length": 3},)


async def test_image_metadata_that_is_a_plain_number_is_kept(sees):
    _, seen = await sees(**{RENDER: one_image({"image": [packed(patches={"data": 24})]})})
    assert seen.places[0]["grid"] == {"patches": 24}


async def test_a_server_without_a_render_route_gives_ids_by_tokenize_without_positions(sees):
    server, seen = await sees(tokenize={"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]})
    assert (seen.ids.tolist(), seen.places) == ([1, 2, 3], ())
    assert len(server.bodies) == 2


async def test_a_text_only_model_gives_no_image_prompt(sees):
    _, seen = await sees(**{RENDER: (400, BLIND)})
    assert seen is None


async def test_text_messages_have_no_image_places(sees):
    _, seen = await sees(**{RENDER: {**RENDERED, "features": None}})
    assert seen.places == ()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((400, {"error": {"message": "cannot identify image file", "code": 400}}), "identify"),
        ({"token_ids": "x"}, "cannot be read"),
        ({"token_ids": []}, "returned no token ids"),
    ],
)
async def test_an_unusable_answer_of_the_render_route_is_an_error(sees, answer, why):
    with pytest.raises(EngineError, match=why):
        await sees(**{RENDER: answer})


async def test_a_call_by_messages_always_takes_the_chat_route(stub, connected):
    server = await stub(**{"v1/completions": 404, CHAT: honest()})
    engine = await connected(server.url, route=VllmRoute.GENERATE, start=False)
    server.bodies.clear()
    asked = GenerateRequest(
        "r",
        ArrayIds(np.array([1], np.int32)),
        Sampling(temperature=1.0, max_tokens=4),
        messages=MESSAGES,
        tools=TOOLS,
        arguments={"enable_thinking": False},
        by_messages=True,
    )
    (chunk,) = [chunk async for chunk in engine.generate(asked)]
    assert (chunk.finish_reason, chunk.output_ids.tolist()) == (FinishReason.STOP, [7, 8])
    (body,) = server.bodies
    assert "kv_transfer_params" not in body
    assert (body["messages"], body["tools"], body["tool_choice"]) == (MESSAGES, TOOLS, "none")
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["return_token_ids"] is True


def folding(*, unfold):
    """Answers as `/inference/v1/generate` does: an image's placeholder becomes three."""

    def answer(body):
        read = json.loads(body)
        prompt = read["token_ids"]
        if read.get("content_parts") and unfold:
            at = prompt.index(9)
            prompt = [*prompt[:at], 9, 9, 9, *prompt[at + 1 :]]
        made = sampled(prompt)
        entries = [{"token_id": i, "logprob": -0.5} for i in (7, 8)]
        made["choices"][0]["logprobs"] = {"content": entries}
        return made

    return answer


@pytest.mark.parametrize(
    ("rendered", "unfold", "taken", "ok", "found"),
    [
        (one_image(None), True, True, True, "with ids beside them too"),
        (one_image(None), False, False, False, "as messages only"),
        ({"token_ids": [5, 9, 9, 9]}, True, False, False, "as messages only"),
        ((400, BLIND), True, False, True, "takes none"),
        (500, True, False, True, "not found out"),
    ],
)
async def test_the_start_probes_whether_ids_can_be_sent_with_images(
    stub, connected, rendered, unfold, taken, ok, found
):
    replies = {"inference/v1/generate": folding(unfold=unfold), RENDER: rendered}
    engine = await connected((await stub(**replies)).url, route=VllmRoute.GENERATE)
    assert (await engine.start()).pictures is taken
    assert (engine.report.findings[-1].what, engine.report.findings[-1].ok) == ("images", ok)
    assert found in engine.report.findings[-1].found


async def test_text_messages_are_rendered_to_ids_by_the_render_route(stub, connected):
    replies = {RENDER: {"token_ids": [5, 6]}, "tokenize": {"tokens": [7]}}
    server = await stub(**{CHAT: honest(), **replies})
    engine = await connected(server.url, route=VllmRoute.CHAT)
    assert isinstance(engine, Templating)
    said = [{"role": "user", "content": "hi"}]
    assert (await engine.template(said, TOOLS, {})).tolist() == [5, 6]
    assert server.bodies[-1]["tool_choice"] == "none"


async def test_a_missing_render_route_is_requested_only_once(stub, connected):
    server = await stub(**{CHAT: honest(), RENDER: 404, "tokenize": {"tokens": [7, 8]}})
    engine = await connected(server.url, route=VllmRoute.CHAT)
    server.bodies.clear()
    for _ in range(3):
        assert (await engine.template([], None, {})).tolist() == [7, 8]
    assert len(server.bodies) == 4


@pytest.mark.parametrize(("reply", "status"), [(400, 400), (503, 503), ({"tokens": "x"}, None)])
async def test_a_failed_render_request_keeps_its_http_status(stub, connected, reply, status):
    server = await stub(**{CHAT: honest(), RENDER: reply})
    engine = await connected(server.url, route=VllmRoute.CHAT)
    with pytest.raises(EngineError) as failed:
        await engine.template([], None, {})
    assert failed.value.status == status

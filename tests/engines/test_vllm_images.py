"""What a vLLM says of messages with images; its fields are those of the package."""

import numpy as np
import pytest
from tests.engines.stub import honest

from bridle.engines.base import GenerateRequest, Seeing
from bridle.engines.ids import ArrayIds
from bridle.engines.vllm_routes import Route
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
    """What an adapter sees on a server of these replies, and the server."""

    async def see(**replies):
        server = await stub(**{CHAT: honest(), **replies})
        engine = await connected(server.url, route=Route.CHAT)
        assert isinstance(engine, Seeing)
        server.bodies.clear()
        return server, await engine.see(MESSAGES, TOOLS, {"enable_thinking": True})

    return see


async def test_the_render_route_tells_the_ids_and_the_places(sees):
    server, seen = await sees(**{RENDER: RENDERED})
    assert seen.ids.tolist() == RENDERED["token_ids"]
    assert seen.ids.dtype == np.int32
    assert seen.places == ({"start": 1, "length": 3}, {"start": 5, "length": 2})
    (body,) = server.bodies
    assert body == {
        "model": "stub",
        "messages": MESSAGES,
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": True},
        "tool_choice": "none",
        "mm_payload": "none",
    }


async def test_without_that_route_tokenize_tells_the_ids_alone(sees):
    server, seen = await sees(tokenize={"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]})
    assert (seen.ids.tolist(), seen.places) == ([1, 2, 3], ())
    assert len(server.bodies) == 2


async def test_a_model_without_eyes_sees_nothing(sees):
    _, seen = await sees(**{RENDER: (400, BLIND)})
    assert seen is None


async def test_text_messages_come_to_no_places(sees):
    _, seen = await sees(**{RENDER: {**RENDERED, "features": None}})
    assert seen.places == ()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((400, {"error": {"message": "cannot identify image file", "code": 400}}), "identify"),
        ({"token_ids": "x"}, "cannot be read"),
        ({"token_ids": []}, "tells no ids"),
    ],
)
async def test_any_other_answer_is_an_error(sees, answer, why):
    with pytest.raises(EngineError, match=why):
        await sees(**{RENDER: answer})


async def test_a_call_by_messages_takes_the_chat_route_whatever_the_route_is(stub, connected):
    server = await stub(**{"v1/completions": 404, CHAT: honest()})
    engine = await connected(server.url, route=Route.CHAT)
    engine._route = Route.GENERATE
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

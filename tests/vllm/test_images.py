"""Images in all four dialects on a real vLLM with a small model that sees: ids, places, logprobs.

The first one goes as messages to the chat route; what comes after it goes as ids, with the images
beside them. What the engine says of each prompt is what capture holds.
"""

import base64
import struct
import zlib

import httpx
import numpy as np
import pytest
from tests.gateway import test_images as unpainted
from tests.gateway.test_images import DIALECTS, TURNS

from bridle.scripted.tokenizer import load_tokenizer
from bridle.trajectory import rebuild

from .checks import RecordingVllm, opened_gateway, prompts, sampling_of
from .serving import VISION_TOKENS, VllmServer, make_vision_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PLACE = 7
"""Tokens of an image: 4 placeholders, what is around them, and what says that it is whole."""


def png(width, height, colour):
    """A picture of one colour, as base64."""

    def chunk(kind, data):
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    rows = b"".join(b"\0" + bytes(colour) * width for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


RED, BLUE = png(30, 20, (255, 0, 0)), png(8, 40, (0, 0, 255))


@pytest.fixture(scope="module")
def sighted(tmp_path_factory):
    """A server of a model with eyes."""
    folder = tmp_path_factory.mktemp("sighted")
    with VllmServer(folder, make_vision_model(folder / "model")) as server:
        yield server.running()


def painted(value):
    """The same JSON with real pictures in place of the gateway tests' bytes."""
    match value:
        case dict():
            return {key: painted(item) for key, item in value.items()}
        case list():
            return [painted(item) for item in value]
        case str():
            return value.replace(unpainted.RED, RED).replace(unpainted.BLUE, BLUE)
    return value


async def asked(handle, dialect, history):
    """The JSON of a reply that must succeed."""
    url = handle.base_urls["google"] + dialect.path
    headers = {"Authorization": f"Bearer {handle.key}"}
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(url, json=painted(dialect.body(history)), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.needs("images")
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: type(one).__name__)
async def test_a_session_with_images_has_vllm_s_ids_placeholders_and_logprobs(sighted, dialect):
    sighted.say({"conversations": [{"turns": list(TURNS)}]})
    async with opened_gateway(sighted) as (gateway, store):
        handle = await gateway.open_session()
        history = dialect.first()
        reply = await asked(handle, dialect, history)
        await asked(handle, dialect, [*history, *dialect.after(reply)])
        await gateway.seal(handle.session_id)
        exchanges = store.exchanges(handle.session_id)
        trajectory = rebuild(store.read(handle.session_id))
    whole = prompts(exchanges)
    image = load_tokenizer(str(sighted.model)).id_of(VISION_TOKENS[0])
    for count, exchange in enumerate(exchanges, 1):
        said = RecordingVllm.said(exchange.exchange_id)
        ids = whole[exchange.exchange_id]
        assert ids.tolist() == said.prompt
        assert exchange.output_ids.tolist() == said.ids
        assert np.array_equal(exchange.logprobs, said.logprobs)
        assert exchange.root_reason == ("image" if count == 1 else None)
        places = exchange.extra["media"]
        result = {"media_type": "image/png", "length": PLACE, "grid": {"num_patches": 1}}
        assert all(result.items() <= one.items() for one in places), places
        assert len(places) == count
        inside = [ids[one["start"] :][:PLACE].tolist() for one in places]
        assert all(one.count(image) == 4 for one in inside)
        assert np.count_nonzero(ids == image) == 4 * count
    (trace,) = trajectory.traces
    assert [one["grid"] for one in trace.media] == [{"num_patches": 1}] * 2
    stats = trajectory.metadata["stats"]
    assert stats["tokens_trained"] == stats["tokens_captured"]
    assert (stats["breaks"], stats["merge_ratio"]) == ([], 1.0)


@pytest.mark.needs("images")
async def test_turns_after_an_image_extend_the_sampled_tokens(sighted):
    """Reasoning that the template drops stays in context, as in a conversation without images."""
    turns = [{"reasoning": "It is red.", "content": "Red."}, {"content": "Yes."}]
    sighted.say({"conversations": [{"turns": turns}]})
    async with opened_gateway(sighted) as (gateway, store):
        assert gateway.info.pictures
        handle = await gateway.open_session()
        history = DIALECTS[0].first()
        reply = await asked(handle, DIALECTS[0], history)
        history += [reply["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
        await asked(handle, DIALECTS[0], history)
        await gateway.seal(handle.session_id)
        one, two = store.exchanges(handle.session_id)
    assert (one.root_reason, two.root_reason, two.parent_id) == ("image", None, one.exchange_id)
    said = RecordingVllm.said(two.exchange_id)
    assert said.prompt == [*one.suffix_ids, *one.output_ids, *two.suffix_ids]
    assert two.output_ids.tolist() == said.ids
    assert np.array_equal(two.logprobs, said.logprobs)
    assert two.extra["media"] == one.extra["media"]


@pytest.mark.needs("images")
async def test_special_tokens_in_user_text_beside_an_image_are_tokenised_as_text(sighted):
    """Neither another turn nor another picture comes of what a user writes."""
    sighted.say(None)
    tokens = load_tokenizer(str(sighted.model))
    controls = ("<|im_start|>", "<|im_end|>", VISION_TOKENS[0])
    counts = []
    for text in ("plain", "".join(controls)):
        async with opened_gateway(sighted) as (gateway, store):
            handle = await gateway.open_session(sampling=sampling_of(64))
            history = DIALECTS[0].first()
            history[0]["content"].append({"type": "text", "text": text})
            await asked(handle, DIALECTS[0], history)
            (exchange,) = store.exchanges(handle.session_id)
        ids = exchange.suffix_ids.tolist()
        assert ids == RecordingVllm.said(exchange.exchange_id).prompt
        counts.append([ids.count(tokens.id_of(name)) for name in controls])
        assert exchange.extra.get("markers_parted", 0) == (text != "plain")
    assert counts[0] == counts[1]


async def test_a_text_only_model_refuses_images_with_a_clear_error(server):
    async with opened_gateway(server) as (gateway, store):
        handle = await gateway.open_session()
        with pytest.raises(AssertionError, match=r"refused the images|text only"):
            await asked(handle, DIALECTS[0], DIALECTS[0].first())
        assert not store.exchanges(handle.session_id)

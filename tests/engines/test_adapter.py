"""Ids, logprobs and prompts that an engine can't have sampled fail their call, on every route."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
from tests.engines.shapes import SHAPES, TOKENIZER, collect, ids_of, request
from tests.engines.spoilers import each_token, prompt_ids
from tests.engines.test_hostile import HI, TURN, Proxy

from bridle.engines.adapter import ReplyCheck, end_ids, tokenized, tokenizer_dir
from bridle.engines.base import GarbledError, GenerateChunk
from bridle.engines.http import EngineClient
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica
from bridle.errors import EngineError
from bridle.testing import scripted_engine
from bridle.types import FinishReason, Sampling

SIZE = TOKENIZER.vocab_size
BUDGET = Sampling(temperature=1.0, max_tokens=20)


@asynccontextmanager
async def reached(shape):
    """A started pool of one adapter, and the proxy between it and its server."""
    async with (
        shape.server(scripted_engine([TURN]), **shape.serving) as server,
        Proxy(server).open_with() as (proxy, url),
    ):
        pool = EnginePool([Replica("engine", shape.adapter(url, **shape.reading))])
        pool.vocab_size = SIZE
        try:
            await pool.start()
            yield pool, proxy
        finally:
            await pool.aclose()


@pytest.fixture(params=SHAPES, name="route")
async def opened(request):
    async with reached(SHAPES[request.param]) as pair:
        yield pair


def call(**fields):
    return request(messages=HI, sampling=BUDGET, **fields)


async def kind_of(pool, made):
    """The kind of error that a call fails with; `None` = it does not."""
    try:
        await collect(pool, made)
    except EngineError as error:
        return error.kind
    return None


BAD = {
    "id beyond the vocabulary": each_token(token=lambda _: SIZE),
    "huge id": each_token(token=lambda _: 2**31 - 1),
    "id beyond int32": each_token(token=lambda _: 2**40),
    "negative id": each_token(token=lambda _: -1),
    "id of type bool": each_token(token=lambda _: True),
    "id of type float": each_token(token=float),
    "id of type str": each_token(token=str),
    "NaN": each_token(logprob=lambda _: float("nan")),
    "infinite logprob": each_token(logprob=lambda _: float("inf")),
    "logprob below float32": each_token(logprob=lambda _: -1e300),
    "positive logprob": each_token(logprob=lambda _: 0.25),
    "more ids than max_tokens": each_token(times=2),
    "negative prompt id": prompt_ids(lambda ids: [-1, *ids[1:]]),
    "prompt id beyond the vocabulary": prompt_ids(lambda ids: [*ids[:-1], SIZE]),
    "prompt id of type float": prompt_ids(lambda ids: [*ids[:-1], 1.5]),
    "prompt id of type bool": prompt_ids(lambda ids: [True, *ids[1:]]),
    "prompt that is no list": prompt_ids(lambda _: {"ids": 1}),
    "no prompt ids any more": prompt_ids(lambda _: None),
}


@pytest.mark.parametrize("stream", [False, True])
async def test_replies_with_impossible_ids_or_logprobs_fail_their_call_as_garbled(route, stream):
    pool, proxy = route
    whole = await collect(pool, call(stream=stream))
    assert whole[-1].finish_reason is FinishReason.LENGTH
    assert len(ids_of(whole)) == BUDGET.max_tokens
    tells = any(chunk.prompt_ids_json is not None for chunk in whole)
    for name, edit in BAD.items():
        if "prompt" in name and not tells:
            continue
        proxy.edit = edit
        assert (name, await kind_of(pool, call(stream=stream))) == (name, "engine_garbled")
    proxy.edit = None
    again = await collect(pool, call(stream=stream))
    assert ids_of(again).tolist() == ids_of(whole).tolist()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 0.25, -1, SIZE])
def test_an_impossible_id_or_logprob_is_refused_at_every_position_of_a_reply(bad, size):
    for at in range(size):
        ids, logprobs = np.full(size, 7, np.int32), np.full(size, -0.5, np.float32)
        ReplyCheck(call(), None, SIZE).take(GenerateChunk(ids, logprobs))
        array = ids if isinstance(bad, int) else logprobs
        array[at] = bad
        with pytest.raises(GarbledError, match=r"sampled token id|logprobs between"):
            ReplyCheck(call(), None, SIZE).take(GenerateChunk(ids, logprobs))


async def test_a_route_that_gave_the_probe_no_prompt_ids_need_not_give_them_later():
    """SGLang's streams tell the prompt's length only."""
    async with reached(SHAPES["sglang"]) as (pool, proxy):
        proxy.edit = prompt_ids(lambda _: None)
        chunks = await collect(pool, call(stream=True))
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        with pytest.raises(EngineError, match="no longer"):
            await collect(pool, call())


FIVE = '{"eos_token_id": 5}'


def test_a_model_folder_is_recognised_by_its_tokenizer_json(tmp_path):
    assert tokenizer_dir(str(tmp_path)) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_dir(str(tmp_path)) == tmp_path
    assert tokenizer_dir(None) is None


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, ()),
        ({"config.json": FIVE}, (5,)),
        ({"config.json": FIVE, "generation_config.json": '{"eos_token_id": [5, 6]}'}, (5, 6)),
        ({"config.json": FIVE, "generation_config.json": "{broken"}, (5,)),
        ({"config.json": "{}"}, ()),
    ],
)  # fmt: skip
def test_end_tokens_come_from_the_models_own_files(tmp_path, files, found):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert end_ids(tmp_path) == found
    assert end_ids(None) == ()


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ({"tokens": [1, 2]}, [1, 2]),
        ({"tokens": [[1], [2]]}, None),
        ({"tokens": "x"}, None),
        (b"{broken", None),
        (404, None),
    ],
)
async def test_the_tokenize_route_gives_ids_or_none_if_it_fails(stub, reply, found):
    server = await stub(tokenize=reply)
    client = EngineClient(server.url, api_key=None, timeout_s=30)
    ids = await tokenized(client, {"prompt": "x"})
    await client.aclose()
    assert (None if ids is None else ids.tolist()) == found
    assert server.bodies == [{"prompt": "x"}]

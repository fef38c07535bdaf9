"""Replies of a teacher that cannot be used: other ids, missing logprobs, other forms."""

import json

import numpy as np
import pytest
from tests.engines.stub import Stub
from tests.engines.teaching import sglang_scores, vllm_scores

from bridle.engines.base import GarbledError
from bridle.engines.teachers import Scores, served_teacher
from bridle.errors import ConfigError, EngineError

IDS = np.array([5, 6, 7], np.int32)
GIVEN = Scores(
    np.array([0, -0.5, -2], np.float32),
    np.array([[-1], [6], [9]], np.int32),
    np.array([[0], [-0.5], [-0.1]], np.float32),
)
MODELS = {"data": [{"id": "first"}, {"id": "second"}]}


async def score(spec, stub, top=1):
    """The teacher's scores of `IDS`."""
    teacher = served_teacher(spec.format(stub.url))
    try:
        await teacher.folder()
        return await teacher.score(IDS, top)
    finally:
        await teacher.aclose()


FORMS = {"{}": ("v1/completions", vllm_scores), "sglang:{}": ("generate", sglang_scores)}


def serving(spec, reply):
    route, _ = FORMS[spec]
    return Stub(**{"v1/models": MODELS, "model_info": {"model_path": "m"}, route: reply})


@pytest.mark.parametrize("spec", FORMS)
async def test_a_scoring_reply_is_read_as_logprobs_and_top_logprobs_of_each_id(spec):
    async with serving(spec, FORMS[spec][1](IDS.tolist(), GIVEN)) as stub:
        found = await score(spec, stub)
    assert found.logprobs.tolist() == GIVEN.logprobs.tolist()
    assert found.top_ids.tolist() == GIVEN.top_ids.tolist()
    assert found.top_logprobs.tolist() == GIVEN.top_logprobs.tolist()
    assert stub.bodies[-1].get("prompt", stub.bodies[-1].get("input_ids")) == IDS.tolist()


@pytest.mark.parametrize("spec", FORMS)
async def test_top_0_returns_only_the_logprobs_of_the_given_ids(spec):
    none = Scores(GIVEN.logprobs, GIVEN.top_ids[:, :0], GIVEN.top_logprobs[:, :0])
    async with serving(spec, FORMS[spec][1](IDS.tolist(), none)) as stub:
        found = await score(spec, stub, top=0)
    assert found.logprobs.tolist() == GIVEN.logprobs.tolist()
    assert found.top_ids.shape == (3, 0)


@pytest.mark.parametrize("spec", FORMS)
async def test_a_reply_about_other_ids_is_refused(spec):
    async with serving(spec, FORMS[spec][1]([5, 6, 8], GIVEN)) as stub:
        with pytest.raises(GarbledError, match="other token ids than it was sent"):
            await score(spec, stub)


@pytest.mark.parametrize("spec", FORMS)
async def test_a_missing_logprob_is_refused_with_its_position(spec):
    reply = json.loads(json.dumps(FORMS[spec][1](IDS.tolist(), GIVEN)))
    if "choices" in reply:
        reply["choices"][0]["prompt_logprobs"][2] = None
    else:
        reply["meta_info"]["input_token_logprobs"][2][0] = None
    async with serving(spec, reply) as stub:
        with pytest.raises(GarbledError, match="no logprobs at position 2"):
            await score(spec, stub)


@pytest.mark.parametrize("spec", FORMS)
async def test_fewer_of_the_likeliest_than_asked_for_are_refused(spec):
    async with serving(spec, FORMS[spec][1](IDS.tolist(), GIVEN)) as stub:
        with pytest.raises(GarbledError, match="no logprobs at position 1"):
            await score(spec, stub, top=2)


@pytest.mark.parametrize("spec", FORMS)
async def test_a_server_that_scores_no_prompt_is_refused(spec):
    reply = {"choices": [{"text": "x"}], "meta_info": {}}
    async with serving(spec, reply) as stub:
        with pytest.raises(GarbledError, match="no logprobs of the prompt"):
            await score(spec, stub)


@pytest.mark.parametrize("spec", FORMS)
async def test_a_refusal_of_the_scoring_server_is_an_engine_error_with_its_message(spec):
    async with serving(spec, (400, {"error": {"message": "top_logprobs too large"}})) as stub:
        with pytest.raises(EngineError, match="top_logprobs too large"):
            await score(spec, stub)


@pytest.mark.parametrize("spec", ["scripted:x", "openai:http://127.0.0.1:1", "sglang:", "nothing"])
def test_an_engine_that_cannot_score_is_refused_with_the_forms_that_can(spec):
    with pytest.raises(ConfigError, match="known forms: embedded:DIR"):
        served_teacher(spec)

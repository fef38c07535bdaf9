from dataclasses import replace

import numpy as np
import pytest
from tests.engines.recording import RecordingEngine
from tests.engines.shapes import PROMPT, SHAPES, TOKENIZER

from bridle.engines.base import Templating
from bridle.engines.probe import (
    CASES,
    TEXTS,
    compare_rendering,
    compare_template,
    compare_vocabulary,
    recompute_logprobs,
)
from bridle.errors import EngineError, RenderError
from bridle.scripted.engine import scripted_logprobs
from bridle.testing import scripted_engine
from bridle.types import LogprobMode

SERVED = ("vllm chat", "sglang")


def rendered(messages, tools):
    text = TOKENIZER.render(messages, tools or None, add_generation_prompt=True)
    return TOKENIZER.encode(text)


@pytest.fixture(params=SERVED)
async def served(request):
    async with SHAPES[request.param].over(scripted_engine([{"content": "x " * 40}])) as engine:
        assert isinstance(engine, Templating)
        yield engine


async def test_a_renderer_that_agrees_is_reported_as_equal(served):
    finding = await compare_rendering(served, rendered)
    assert finding.ok, finding
    assert finding.found == f"{len(CASES)} of {len(CASES)} alike"


async def test_a_renderer_that_differs_is_reported_with_its_first_differing_token(served):
    def other(messages, tools):
        if tools:
            raise RenderError("no tools")
        ids = rendered(messages, tools)
        return np.append(ids, np.int32(5)) if len(messages) == 1 else ids

    finding = await compare_rendering(served, other)
    assert not finding.ok
    assert not finding.needed
    one = len(rendered(CASES[0].messages, []))
    assert f"one message (from token {one})" in finding.found
    assert "tools (ours fails: no tools)" in finding.found


async def test_a_tokenizer_with_other_ids_than_the_engine_s_is_reported_with_the_text(served):
    good = await compare_vocabulary(served, TOKENIZER.encode, TOKENIZER.vocab_size)
    assert (good.ok, good.found) == (True, "the engine's")
    wrong = await compare_vocabulary(served, lambda text: TOKENIZER.encode(text)[::-1], 10)
    assert (wrong.ok, wrong.needed) == (False, True)
    assert repr(TEXTS[0][:24]) in wrong.found


async def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    async with SHAPES["sglang"].over(scripted_engine([{"content": "x"}])) as engine:
        finding = await compare_vocabulary(engine, TOKENIZER.encode, 9999)
    assert finding.found == "ours has 9999 ids, the engine takes 2048"


class Mute(RecordingEngine):
    """An engine with the routes, that tells nothing."""

    async def tokenize(self, _text):
        return None

    async def template(self, _messages, _tools, _arguments):
        raise EngineError("no such route")


@pytest.mark.parametrize("make", [RecordingEngine, Mute])
async def test_an_engine_without_a_tokenize_route_is_not_compared(make):
    engine = make(scripted_engine([{"content": "x"}]))
    for finding in (
        await compare_rendering(engine, rendered),
        await compare_vocabulary(engine, TOKENIZER.encode, 10),
    ):
        assert finding.ok
        assert "nothing for us to compare" in finding.found


async def test_engine_logprobs_are_compared_with_a_forward_pass_at_the_mode_s_temperature():
    engine = scripted_engine([{"content": "x " * 40}])
    used = []

    def score(_prompt, ids, temperature):
        used.append(temperature)
        return scripted_logprobs(ids) + np.float32(2e-4)

    finding = await recompute_logprobs(engine, LogprobMode.RAW, score, PROMPT)
    assert finding.ok, finding
    assert used == [1.0, 1.0]
    other = await recompute_logprobs(engine, LogprobMode.PROCESSED, score, PROMPT, close=1e-4)
    assert not other.ok
    assert used[2:] == [1.0, 0.7]
    assert other.fix


@pytest.mark.parametrize(
    ("turn", "says"), [({"fault": 500}, "could not be sampled from"), ({"raw": ""}, None)]
)
async def test_an_engine_that_cannot_be_sampled_from_is_a_finding_of_the_logprob_check(turn, says):
    engine = scripted_engine(conversations=[{"turns": [turn]}])
    finding = await recompute_logprobs(
        engine, LogprobMode.RAW, lambda _p, ids, _t: scripted_logprobs(ids), PROMPT
    )
    assert finding.ok is (says is None)
    assert says is None or says in finding.found


async def test_an_engine_without_logprobs_is_reported_as_giving_0_logprobs():
    class Text(RecordingEngine):
        async def generate(self, request):
            async for chunk in self.engine.generate(request):
                yield replace(chunk, logprobs=chunk.logprobs[:0])

    engine = Text(scripted_engine([{"content": "x"}]))
    finding = await recompute_logprobs(
        engine, LogprobMode.NONE, lambda _p, ids, _t: scripted_logprobs(ids), PROMPT
    )
    assert "0 logprobs for" in finding.found


@pytest.mark.parametrize("shape", [*SERVED, "vllm generate"])
async def test_the_template_check_passes_if_reported_prompts_equal_the_chat_route_s(shape):
    async with SHAPES[shape].over(scripted_engine([{"content": "x"}])) as engine:
        finding = await compare_template(engine)
    assert finding.ok, finding
    assert finding.found == "it reports prompts, the same as its chat route's"


class Picky(RecordingEngine):
    """Its template refuses the messages that a test names."""

    def __init__(self, *refused):
        super().__init__(scripted_engine([{"content": "x"}]))
        self.refused = refused

    async def template(self, messages, tools, arguments):
        if any(case.messages == messages for case in CASES if case.name in self.refused):
            raise EngineError("no", status=400)
        return TOKENIZER.prompt_ids(messages, tools, arguments)


@pytest.mark.parametrize(
    ("refused", "ok"),
    [(["system in the middle"], True), (["tools"], False), ([case.name for case in CASES], False)],
)
async def test_the_template_check_allows_only_refusals_known_of_some_model_families(refused, ok):
    finding = await compare_template(Picky(*refused))
    assert finding.ok is ok
    assert not finding.needed


async def test_the_template_check_passes_if_the_chat_route_reports_no_prompt():
    class Silent(Picky):
        async def generate(self, request):
            async for chunk in self.engine.generate(request):
                yield replace(chunk, prompt_ids_json=None)

    finding = await compare_template(Silent())
    assert (finding.ok, finding.found) == (True, "it reports prompts, its chat route reports none")

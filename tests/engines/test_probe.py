import math

import numpy as np
import pytest
from tests.engines.recording import InstantEngine, RecordingEngine

from bridle.engines.base import GenerateChunk
from bridle.engines.ids import ArrayIds
from bridle.engines.probe import Finding, ProbeReport, probe
from bridle.errors import EngineError
from bridle.testing import scripted_engine
from bridle.types import FinishReason, LogprobMode


class Softmax(RecordingEngine):
    """Samples from one distribution over ten tokens, with logprobs of a chosen kind."""

    def __init__(self, mode, logits):
        super().__init__(InstantEngine())
        self.mode, self.logits = mode, np.array(logits, dtype=float)

    def spread(self, temperature, top_k):
        scaled = self.logits / temperature
        if top_k > 0:
            scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
        shifted = scaled - scaled.max()
        return shifted - math.log(np.exp(shifted).sum())

    async def generate(self, request):
        sampling = request.sampling
        drawn_from = self.spread(sampling.temperature, sampling.top_k or -1)
        random = np.random.default_rng(sampling.seed)
        ids = random.choice(len(self.logits), size=sampling.max_tokens, p=np.exp(drawn_from))
        shown = {
            "raw": self.spread(1.0, -1),
            "tempered": self.spread(sampling.temperature, -1),
            "processed": drawn_from,
        }[self.mode]
        yield GenerateChunk(
            ids.astype(np.int32),
            shown[ids].astype(np.float32),
            FinishReason.LENGTH,
            prompt_ids_json=request.prompt.json(),
        )


FLAT = [1.0, 0.5, 0.2, 0.1, 0, 0, 0, 0, 0, 0]
SURE = [60.0, 0, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("mode", "logits", "found"),
    [
        ("raw", FLAT, LogprobMode.RAW),
        ("tempered", FLAT, LogprobMode.PROCESSED),
        ("processed", FLAT, LogprobMode.PROCESSED),
        ("raw", [3.0, *FLAT[1:]], LogprobMode.RAW),
        ("processed", [3.0, *FLAT[1:]], LogprobMode.PROCESSED),
    ],
)
async def test_the_logprob_mode_is_measured(mode, logits, found):
    report = await probe(Softmax(mode, logits))
    assert report.usable, report.rows()
    assert report.logprob_mode is found


@pytest.mark.parametrize("mode", ["raw", "processed"])
async def test_the_logprob_mode_of_a_deterministic_model_must_be_configured(mode):
    report = await probe(Softmax(mode, SURE))
    assert [one.what for one in report.missing] == ["logprob mode"]
    assert report.logprob_mode is LogprobMode.NONE
    vouched = await probe(Softmax(mode, SURE), assume=LogprobMode.RAW)
    assert vouched.usable
    assert vouched.logprob_mode is LogprobMode.RAW
    found = {row["what"]: row["found"] for row in vouched.rows()}
    assert "not measured" in found["logprob mode"]


async def test_a_configured_logprob_mode_that_measurement_contradicts_is_refused():
    report = await probe(Softmax("raw", FLAT), assume=LogprobMode.PROCESSED)
    assert "raw by measurement, processed by configuration" in report.missing[0].found


async def test_the_scripted_engine_passes_the_probe_with_raw_logprobs():
    report = await probe(scripted_engine([{"fault": 500}]))
    assert report.usable
    assert (report.logprob_mode, report.token_in) == (LogprobMode.RAW, True)
    assert report.duration_s < 5
    assert {"sampled ids", "logprobs", "token in", "logprob mode"} <= {
        row["what"] for row in report.rows()
    }


class Changed(RecordingEngine):
    """The scripted engine with one thing wrong."""

    def __init__(self, change):
        super().__init__(scripted_engine([{}]))
        self.change = change

    async def generate(self, request):
        async for chunk in self.engine.generate(request):
            yield self.change(chunk)


def no_ids(chunk):
    return GenerateChunk(chunk.output_ids[:0], chunk.logprobs[:0], chunk.finish_reason)


def no_logprobs(chunk):
    return GenerateChunk(
        chunk.output_ids, chunk.logprobs[:0], chunk.finish_reason,
        prompt_ids_json=chunk.prompt_ids_json,
    )  # fmt: skip


def silent_prompt(chunk):
    return GenerateChunk(chunk.output_ids, chunk.logprobs, chunk.finish_reason)


def other_prompt(chunk):
    return GenerateChunk(
        chunk.output_ids, chunk.logprobs, chunk.finish_reason, prompt_ids_json=b"[1, 2, 3]"
    )


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (no_ids, ["sampled ids", "logprobs", "token in"]),
        (no_logprobs, ["logprobs"]),
        (silent_prompt, ["token in"]),
        (other_prompt, ["token in"]),
    ],
)
async def test_each_missing_capability_is_reported_with_its_meaning_and_fix(change, missing):
    report = await probe(Changed(change))
    assert [one.what for one in report.missing] == missing
    assert all(one.means and one.fix and one.found for one in report.missing)


async def test_prompt_ids_written_with_spaces_are_the_same_prompt():
    def spaced(chunk):
        reply = chunk.prompt_ids_json.replace(b",", b", ")
        return GenerateChunk(
            chunk.output_ids, chunk.logprobs, chunk.finish_reason, prompt_ids_json=reply
        )

    assert (await probe(Changed(spaced))).token_in


class Failing(Softmax):
    """Fails from its nth call on."""

    def __init__(self, calls):
        super().__init__("processed", FLAT)
        self.left = calls

    async def generate(self, request):
        self.left -= 1
        if self.left < 0:
            raise EngineError("it broke", status=400)
        async for chunk in super().generate(request):
            yield chunk


async def test_a_silent_engine_is_reported():
    report = await probe(Failing(0))
    assert [(one.what, one.found) for one in report.missing] == [("answer", "it broke")]
    assert report.logprob_mode is LogprobMode.NONE


@pytest.mark.parametrize("calls", [1, 2])
async def test_an_engine_that_refuses_a_measurement_has_no_known_mode(calls):
    report = await probe(Failing(calls))
    assert [one.what for one in report.missing] == ["logprob mode"]


async def test_the_prompt_of_the_probe_is_the_callers_choice():
    engine = RecordingEngine(scripted_engine([{}]))
    await probe(engine, prompt=[3, 4])
    assert {one.prompt.json() for one in engine.requests} == {ArrayIds(np.array([3, 4])).json()}


def test_require_raises_missing_capabilities_unless_allow_untokenized():
    lacking = Finding("logprobs", ok=False, needed=True, found="none", means="M.", fix="F.")
    extra = Finding("pairing", ok=False, needed=False, found="none", means="", fix="")
    report = ProbeReport((lacking, extra), LogprobMode.NONE, token_in=False, duration_s=0.1)
    with pytest.raises(EngineError) as caught:
        report.require("http://engine")
    assert str(caught.value) == (
        "http://engine cannot give what training needs:\n- logprobs: none. M. F.\n"
        "To capture text only, say so with --allow-untokenized."
    )
    report.require("http://engine", allow_untokenized=True)
    ProbeReport((extra,), LogprobMode.RAW, token_in=True, duration_s=0.1).require("x")

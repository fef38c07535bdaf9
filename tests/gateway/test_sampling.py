"""One reply from the engine, whatever pieces and interruptions it comes in."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from bridle.engines.base import CutError, GarbledError, GenerateChunk, GenerateRequest
from bridle.errors import EngineError
from bridle.gateway.sampling import FRUITLESS, MOST_TRIES, Sampler, Sofar, another_prompt
from bridle.prompting.prompt import PromptIds
from bridle.types import FinishReason, LogprobMode, Reply, Sampling, VersionSpan

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def chunk(ids, finish=None, **more) -> GenerateChunk:
    array = np.array(list(ids), dtype=np.int32)
    return GenerateChunk(array, -array.astype(np.float32), finish, **more)


class Pieces:
    """An engine that gives each call its own list of chunks and errors."""

    def __init__(self, *tries):
        self.tries = list(tries)
        self.requests: list[GenerateRequest] = []
        self.closed = 0
        self.aborted: list[str] = []

    async def abort(self, request_id):
        self.aborted.append(request_id)

    async def generate(self, request) -> AsyncIterator[GenerateChunk]:
        self.requests.append(request)
        try:
            for piece in self.tries.pop(0):
                if isinstance(piece, Exception):
                    raise piece
                if piece == "hang":
                    await asyncio.sleep(30)
                else:
                    yield piece
        finally:
            self.closed += 1


def letters(ids):
    """Text of ids: their characters."""
    return "".join(map(chr, ids.tolist()))


PROMPT = PromptIds.root(np.arange(5, dtype=np.int32))


def sampler_of(engine, mode=LogprobMode.RAW):
    return Sampler(engine, mode=mode, version=lambda: 7, decode=letters)


async def sampled(
    engine, *, most=None, mode=LogprobMode.RAW, on_chunk=lambda _: None, retry_until=math.inf
):
    sampler = sampler_of(engine, mode)
    request = GenerateRequest("r", PROMPT, Sampling(max_tokens=most))
    return await sampler.sample(request, PROMPT, on_chunk=on_chunk, retry_until=retry_until)


async def test_streamed_chunks_become_one_sample():
    chunks = []
    engine = Pieces([chunk([1, 2]), chunk([]), chunk([3], STOP, stop_text="x", cached_tokens=4)])
    sample = await sampled(engine, on_chunk=chunks.append)
    assert sample.output_ids.tolist() == [1, 2, 3]
    assert sample.logprobs.tolist() == [-1, -2, -3]
    assert (sample.finish, sample.last.stop_text, sample.last.cached_tokens) == (STOP, "x", 4)
    assert sample.versions == (VersionSpan(7, 0, 3),)
    assert (sample.resumed, chunks[-1]) == (0, sample.last)


async def test_version_spans_that_the_engine_reports_are_recorded():
    spans = (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))
    assert (await sampled(Pieces([chunk([1, 2], STOP, versions=spans)]))).versions == spans


async def test_a_call_that_the_engine_gave_up_is_resumed_from_the_tokens_so_far():
    engine = Pieces(
        [chunk([1, 2]), chunk([3], ABORT, versions=(VersionSpan(1, 0, 3),))],
        [chunk([4, 5], LENGTH, versions=(VersionSpan(2, 0, 2),), reply=Reply("", None, (), STOP))],
    )
    sample = await sampled(engine, most=5)
    assert sample.output_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.versions == (VersionSpan(1, 0, 3), VersionSpan(2, 3, 5))
    assert sample.resumed == 1
    assert sample.last.reply is None  # the engine parsed only the second half
    resumed = engine.requests[1]
    assert resumed.prompt.array().tolist() == [0, 1, 2, 3, 4, 1, 2, 3]
    assert resumed.sampling.max_tokens == 2
    assert resumed.request_id != engine.requests[0].request_id


@pytest.mark.parametrize(("least", "left"), [(5, 2), (3, 0), (1, 0), (None, None)])
async def test_min_tokens_of_a_resumed_call_is_reduced_by_tokens_already_sampled(least, left):
    engine: Any = Pieces([chunk([1, 2, 3], ABORT)], [chunk([4, 5], LENGTH)])
    sampler = Sampler(engine, mode=LogprobMode.RAW, version=lambda: 7, decode=letters)
    asked = GenerateRequest("r", PROMPT, Sampling(max_tokens=5, min_tokens=least))
    await sampler.sample(asked, PROMPT, on_chunk=lambda _: None)
    assert engine.requests[1].sampling.min_tokens == left


async def sampled_as(engine, **fields):
    """A sample of a call with these fields, of which `sampling` is the sampling's."""
    sampler = Sampler(engine, mode=LogprobMode.RAW, version=lambda: 7, decode=letters)
    sampling = Sampling(**fields.pop("sampling", {}))
    request = GenerateRequest("r", PROMPT, sampling, **fields)
    return await sampler.sample(request, PROMPT, on_chunk=lambda _: None)


async def test_a_stop_string_across_a_resume_ends_the_reply_at_its_last_token():
    engine: Any = Pieces(
        [chunk(b"ab[ST", ABORT)],
        [chunk(b"OP"), chunk(b"] more"), chunk(b"", ABORT, versions=(VersionSpan(3, 0, 8),))],
    )
    sample = await sampled_as(engine, sampling={"stop": ("[STOP]",)}, stream=True)
    assert letters(sample.output_ids) == "ab[STOP]"
    assert (sample.finish, sample.last.stop_text) == (STOP, "[STOP]")
    assert sample.versions == (VersionSpan(7, 0, 5), VersionSpan(3, 5, 8))
    assert engine.aborted == [engine.requests[1].request_id]


async def test_per_token_masks_and_experts_are_kept_across_chunks_and_resumes():
    engine: Any = Pieces(
        [
            chunk([1, 2], extra={"mask": [[1], [2]]}),
            chunk([3], extra={"mask": [[3]]}),
            CutError(""),
        ],
        [chunk([4], extra={"mask": [[4]]}), chunk([], ABORT, extra={"experts": "4"})],
        [chunk([5]), chunk([6], STOP, extra={"mask": [[5], [6]], "experts": "6"})],
    )
    sample = await sampled_as(engine, stream=True)
    assert sample.extra == {"mask": [[one] for one in range(1, 7)], "experts": "6"}
    assert sample.extra_before == [{"tokens": 4, "experts": "4"}]


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_stop_string_across_a_resume_cuts_per_token_masks(at_once):
    more = [chunk(b"b!!", extra={"mask": [1, 2, 3]} if at_once else {})]
    end = {} if at_once else {"mask": [1, 2, 3, 4]}
    engine: Any = Pieces([chunk(b"a", ABORT)], [*more, chunk(b"?", ABORT, extra=end)])
    sample = await sampled_as(engine, sampling={"stop": ("ab",)}, stream=True)
    assert letters(sample.output_ids) == "ab"
    assert sample.extra == {"mask": [None, 1]}


async def test_an_aborted_constrained_call_restarts_and_reports_discarded_tokens():
    engine: Any = Pieces([chunk(b'{"a', ABORT)], [chunk(b'{"b":1}', STOP)])
    sample = await sampled_as(engine, grammar={"json_schema": {}}, stream=True)
    assert letters(sample.output_ids) == '{"b":1}'
    assert (sample.discarded, sample.resumed) == (3, 1)
    assert [request.stream for request in engine.requests] == [False, False]
    assert len(engine.requests[1].prompt) == len(PROMPT)
    assert sample.versions == (VersionSpan(7, 0, 7),)


async def test_a_cut_connection_is_resumed_too():
    engine = Pieces([chunk([1]), CutError("cut")], [CutError("again")], [chunk([2], STOP)])
    sample = await sampled(engine)
    assert sample.output_ids.tolist() == [1, 2]
    assert sample.versions[-1].end == 2
    assert engine.closed == 3


async def test_a_resume_under_the_same_version_has_one_version_span():
    sample = await sampled(Pieces([chunk([1, 2]), CutError("cut")], [chunk([3], STOP)]))
    assert sample.versions == (VersionSpan(7, 0, 3),)


async def test_an_engine_that_only_gives_up_fails_retryably():
    engine = Pieces(*([chunk([], ABORT)] for _ in range(FRUITLESS)))
    with pytest.raises(EngineError, match="gave the call up") as failed:
        await sampled(engine)
    assert failed.value.retryable


async def test_a_call_given_up_just_when_its_budget_was_used_has_ended():
    sample = await sampled(Pieces([chunk([1, 2], ABORT)]), most=2)
    assert (sample.output_ids.tolist(), sample.finish) == ([1, 2], LENGTH)


async def test_an_engine_that_never_ends_a_call_fails_after_many_tries():
    engine = Pieces(*([chunk([1], ABORT)] for _ in range(MOST_TRIES)))
    with pytest.raises(EngineError, match="gave the call up"):
        await sampled(engine)


@pytest.mark.parametrize("pieces", [[], [chunk([1])]])
async def test_a_reply_without_a_finish_reason_is_an_engine_error(pieces):
    with pytest.raises(EngineError, match="ended without a finish reason"):
        await sampled(Pieces(pieces))


async def test_ids_without_their_logprobs_cannot_be_used():
    bad = GenerateChunk(np.arange(3, dtype=np.int32), np.zeros(2, np.float32), STOP)
    with pytest.raises(EngineError, match="sampled 3 token ids, but gave 2 logprobs"):
        await sampled(Pieces([bad]))
    none = GenerateChunk(np.arange(3, dtype=np.int32), np.zeros(0, np.float32), STOP)
    assert len((await sampled(Pieces([none]), mode=LogprobMode.NONE)).output_ids) == 3


async def test_any_other_fault_of_an_engine_is_an_engine_error():
    with pytest.raises(EngineError, match="sampling: KeyError"):
        await sampled(Pieces([KeyError("x")]))
    with pytest.raises(EngineError, match="full") as failed:
        await sampled(Pieces([EngineError("full", status=429)]))
    assert failed.value.status == 429


async def test_cancelling_closes_the_engine_s_call():
    engine = Pieces([chunk([1]), "hang"])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await sampled(engine)
    assert engine.closed == 1


def request_for(ids):
    prompt = PromptIds.root(np.array(ids, dtype=np.int32))
    return GenerateRequest("r", prompt, Sampling())


@pytest.mark.parametrize("answer", [None, b"[1,2,3]", b"[1, 2, 3]"])
def test_the_sent_prompt_echoed_in_any_json_spelling_is_no_break(answer):
    assert another_prompt(request_for([1, 2, 3]), answer) == (None, None)


@pytest.mark.parametrize(
    ("answer", "position"), [(b"[1,9,3]", 1), (b"[1,2,3,4]", 3), (b"[1,2]", 2), (b"[]", 0)]
)
def test_another_prompt_reported_by_the_engine_is_a_break_at_the_first_difference(answer, position):
    prompt, found = another_prompt(request_for([1, 2, 3]), answer)
    assert found == position
    assert prompt is not None
    assert prompt.json() == answer


def test_prompt_ids_that_cannot_be_read_are_an_engine_error():
    with pytest.raises(EngineError, match="prompt ids"):
        another_prompt(request_for([1]), b"[1,")


def refused(status=503, retry_after_s: float | None = 0.0):
    return EngineError("full", status=status, retryable=True, retry_after_s=retry_after_s)


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_call_refused_before_its_first_token_is_tried_twice_more(status):
    whole = Reply("a", None, (), STOP)
    engine = Pieces([refused(status)], [refused(status)], [chunk([1, 2], STOP, reply=whole)])
    sample = await sampled(engine)
    assert (sample.output_ids.tolist(), sample.resumed, sample.last.reply) == ([1, 2], 0, whole)
    assert len({request.request_id for request in engine.requests}) == 3
    engine = Pieces(*[[refused(status)]] * 3)
    with pytest.raises(EngineError, match="full"):
        await sampled(engine)
    assert len(engine.requests) == 3


async def test_aborts_that_a_call_did_not_cause_cost_it_nothing():
    moved = chunk([], ABORT, moved=True)
    engine = Pieces(*[[moved]] * 20, [chunk([1, 2], STOP)])
    assert (await sampled(engine)).output_ids.tolist() == [1, 2]


async def test_a_connection_that_is_reset_before_the_first_token_is_tried_again():
    reset = EngineError("reset", retryable=True, kind="engine_reset")
    assert (await sampled(Pieces([reset], [chunk([1], STOP)]))).output_ids.tolist() == [1]
    with pytest.raises(EngineError, match="reset"):
        await sampled(Pieces([reset], [reset], [reset]))


async def test_a_call_whose_replies_all_break_off_has_that_kind_of_error():
    with pytest.raises(EngineError) as failed:
        await sampled(Pieces(*[[CutError("cut")]] * 3))
    assert failed.value.kind == "engine_cut"


async def test_no_token_of_a_reply_that_turns_out_garbled_is_in_a_sample():
    sofar = Sofar()
    engine = Pieces([chunk([1]), chunk([], ABORT)], [chunk([2]), GarbledError("id -1")])
    sampler, request = sampler_of(engine), GenerateRequest("r", PROMPT, Sampling())
    with pytest.raises(EngineError, match="id -1") as failed:
        await sampler.sample(request, PROMPT, on_chunk=lambda _: None, sofar=sofar)
    assert (failed.value.kind, failed.value.retryable) == ("engine_garbled", False)
    sample = sampler.cut(request, sofar)
    assert (sample.output_ids.tolist(), sample.logprobs.tolist()) == ([], [])
    assert sample.finish is ABORT


async def test_a_garbled_reply_before_any_token_is_retried():
    engine = Pieces([GarbledError("id -1")], [chunk([1], STOP)])
    assert (await sampled(engine)).output_ids.tolist() == [1]


async def test_an_engine_that_asks_for_a_longer_wait_is_not_tried_again():
    engine = Pieces([refused(retry_after_s=30)])
    with pytest.raises(EngineError) as caught:
        await sampled(engine, retry_until=time.perf_counter() + 10)
    assert caught.value.retry_after_s == 30


async def test_a_refusal_after_the_first_token_or_for_good_is_not_tried_again():
    for tries in ([[chunk([1]), CutError("gone")], [refused()]], [[EngineError("no", status=501)]]):
        engine = Pieces(*tries)
        with pytest.raises(EngineError):
            await sampled(engine)
        assert len(engine.requests) == len(tries)

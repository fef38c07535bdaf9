"""A finished call as the facts that capture keeps."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.house import served

from bridle.capture.records import no_ids
from bridle.dialects import DIALECTS
from bridle.dialects.json_reader import content_digest
from bridle.engines.base import CutError, GenerateChunk, GenerateRequest
from bridle.experts import KEY, Experts, reply_extra, unpack
from bridle.gateway.call import Answer, Asked, Call, Question, SpanList
from bridle.gateway.recording import (
    Finished,
    Prompted,
    exchange_record,
    issued_ids,
    new_bodies,
)
from bridle.gateway.sampling import SampledReply, Sampler
from bridle.prompting.canonical import canonical
from bridle.prompting.conversation import Placement, PlacementKind
from bridle.prompting.prompt import PromptIds
from bridle.types import (
    Dialect,
    FinishReason,
    Kind,
    LogprobMode,
    Message,
    ModelRequest,
    Reply,
    Role,
    Sampling,
    TextPart,
    ToolCall,
    Usage,
    VersionSpan,
)

SPANS = (b'{"role":"user"}', b'{"role":"assistant"}', b'{"role":"user","n":2}')
DIGESTS = tuple(map(content_digest, SPANS))


def ids(*values):
    return np.array(values, dtype=np.int32)


def a_request(spans=SPANS, tools=None, reasoning=None, **fields):
    messages = (
        Message(Role.USER, (TextPart("go"),)),
        Message(Role.ASSISTANT, (TextPart("a"),), reasoning=reasoning),
        Message(Role.USER, (TextPart("on"),)),
    )
    return ModelRequest(
        dialect=Dialect.OPENAI_CHAT,
        model="m",
        messages=messages,
        tools=(),
        sampling=Sampling(),
        stream=False,
        message_spans=spans,
        span_digests=tuple(map(content_digest, spans)),
        tools_span=tools,
        head=b'{"model":"m"}',
        **fields,
    )


def a_call(exchange_id="e2", base=None, digests=DIGESTS, **fields):
    call = Call(exchange_id, "s", 100.0, 0.0, b"question", asked=Asked(kind=Kind.SUBAGENT))
    call.spans = SpanList(base, digests)
    for name, value in fields.items():
        setattr(call, name, value)
    return call


def finished(call=None, *, parent=None, request=None, engine_prompt=None, placement=None, **sample):
    request = request or a_request()
    prompt = PromptIds.root(ids(1, 2, 3))
    if parent is not None:
        before, output = parent.sampled()
        prompt = before.extend(output, ids(9))
    question = Question(
        request,
        DIALECTS[Dialect.OPENAI_CHAT],
        canonical(request, {}),
        placement or Placement(PlacementKind.ROOT, reason="first", new_from=2),
        None,
        served(),
        b"question",
    )
    fields = {
        "output_ids": ids(4, 5),
        "logprobs": np.zeros(2, np.float32),
        "finish": FinishReason.STOP,
        "versions": (VersionSpan(3, 0, 2),),
        "last": GenerateChunk(no_ids(), np.zeros(0, np.float32), FinishReason.STOP),
        "engine_prompt": engine_prompt,
        "break_position": None if engine_prompt is None else 1,
        "resumed": 0,
    }
    return Finished(
        call=call or a_call(),
        question=question,
        prompted=Prompted(prompt, parent, None if parent else "first"),
        sample=SampledReply(**{**fields, **sample}),
        effective=Sampling(temperature=1.0),
        reply=Reply("a", None, (), FinishReason.STOP),
        answer=Answer(Reply("a", None, (), FinishReason.STOP), Usage(2, 2), b"{}"),
    )


def a_parent(**fields):
    return a_call(
        "e1",
        digests=DIGESTS[:1],
        prompt=PromptIds.root(ids(1, 2)),
        output_ids=ids(3),
        **fields,
    )


def test_a_root_keeps_its_whole_prompt():
    exchange = exchange_record(finished(), 0)
    assert (exchange.parent_id, exchange.root_reason, exchange.kept) == (None, "first", 0)
    assert exchange.suffix_ids.tolist() == [1, 2, 3]
    assert exchange.kind is Kind.SUBAGENT


def test_an_exchange_that_extends_another_stores_only_new_tokens_and_messages():
    parent = a_parent()
    call = a_call(base=parent.spans, base_id="e1", continues="e1")
    exchange = exchange_record(finished(call, parent=parent), 1)
    assert (exchange.parent_id, exchange.continues, exchange.root_reason) == ("e1", "e1", None)
    assert (exchange.kept, exchange.suffix_ids.tolist(), exchange.prompt_length) == (3, [9], 4)
    assert (exchange.request.base, exchange.request.kept_spans) == ("e1", 1)
    assert exchange.request.spans == DIGESTS[1:]


def test_another_prompt_reported_by_the_engine_makes_the_exchange_a_root_with_a_break():
    parent = a_parent()
    call = a_call(continues="e1")
    done = finished(call, parent=parent, engine_prompt=PromptIds.root(ids(1, 8)))
    exchange = exchange_record(done, 1)
    assert (exchange.parent_id, exchange.continues) == (None, "e1")
    assert exchange.root_reason == "engine_prompt"
    assert exchange.suffix_ids.tolist() == [1, 8]
    assert exchange.extra["break"] == {"position": 1, "reason": "engine_prompt"}


def test_only_message_bodies_that_the_store_lacks_are_written():
    tools = b'[{"type":"function"}]'
    done = finished(request=a_request(tools=tools))
    assert set(new_bodies(done, set()).values()) == {*SPANS, tools}
    assert set(new_bodies(done, {DIGESTS[0], content_digest(tools)}).values()) == set(SPANS[1:])
    assert exchange_record(done, 0).request.tools == content_digest(tools)


def test_an_exchange_record_has_extra_facts_only_if_they_are_set():
    assert exchange_record(finished(), 0).extra == {
        "placement": "root",
        "model": "m",
        "question": b"question".hex(),
    }
    placement = Placement(
        PlacementKind.REWRITTEN, "e1", drift="rewritten_args", tie="id", repeats=("e0",), new_from=2
    )
    last = GenerateChunk(no_ids(), np.zeros(0, np.float32), FinishReason.STOP, cached_tokens=7)
    call = a_call(asked=Asked(retry_count=2, kind_rule="title"))
    request = a_request(extra={"removed": {"billing": ["x"]}})
    answer = {"extra": {"x": 1}, "extra_before": [{"tokens": 1, "x": 0}]}
    done = finished(call, placement=placement, last=last, resumed=2, request=request, **answer)
    assert exchange_record(done, 0).extra == {
        "placement": "rewritten",
        "model": "m",
        "kind_rule": "title",
        "retry_count": 2,
        "question": b"question".hex(),
        "drift": "rewritten_args",
        "tie": "id",
        "repeats": ["e0"],
        "resumed": 2,
        "removed": {"billing": ["x"]},
        "cached_tokens": 7,
        "engine": {"x": 1},
        "engine_before": [{"tokens": 1, "x": 0}],
    }


@pytest.mark.parametrize(
    ("reasoned", "echoed", "restored"),
    [(True, None, True), (True, "hm", False), (False, None, False)],
)
def test_reasoning_is_restored_where_the_harness_sent_none_back(reasoned, echoed, restored):
    parent = a_parent(reasoned=reasoned)
    done = finished(parent=parent, request=a_request(reasoning=echoed))
    assert exchange_record(done, 0).extra.get("reasoning_restored", False) is restored


def test_issued_ids_are_the_tool_call_ids_and_signatures_of_messages():
    calls = (ToolCall("call_1", "bash", "{}"), ToolCall(None, "bash", "{}"))
    message = Message(Role.ASSISTANT, tool_calls=calls, issued_ids=("sig",))
    assert issued_ids((message, message)) == ["call_1", "sig"] * 2


def test_a_reply_over_a_change_of_weights_says_that_its_versions_are_mixed():
    assert exchange_record(finished(mixed=True), 0).extra["versions"] == "mixed"
    assert "versions" not in exchange_record(finished(), 0).extra


def rows_of(tokens):
    """Experts that name their token: its position and its id."""
    return np.stack([np.arange(len(tokens)), tokens], axis=1).astype(np.int16)[:, :, None]


class Routed:
    """An engine that gives a call up, or is lost, after so many tokens, and tells experts."""

    def __init__(self, *tries):
        self.tries = list(tries)

    async def abort(self, request_id):
        """Nothing waits here."""

    async def generate(self, request):
        size, fate = self.tries.pop(0)
        before = request.prompt.array()
        sampled = (np.arange(size) + len(before) + 50).astype(np.int32)
        if fate == "lost":
            yield GenerateChunk(sampled, -np.ones(size, np.float32))
            raise CutError("gone")
        whole = np.concatenate([before, sampled])
        rows = rows_of(whole)[request.experts_from : -1]
        extra = (
            {}
            if fate == "silent"
            else reply_extra(rows, asked=request.experts_from, tokens=len(whole))
        )
        finish = FinishReason.STOP if not self.tries else FinishReason.ABORT
        yield GenerateChunk(sampled, -np.ones(size, np.float32), finish, extra=extra)


FATES = st.sampled_from(["answer", "silent", "lost"])
TRIES = st.lists(st.tuples(st.integers(1, 4), FATES), max_size=3)


@given(TRIES, st.integers(1, 4), st.booleans())
async def test_routed_experts_stay_aligned_to_tokens_across_resumed_calls(tries, last, extends):
    parent = a_parent() if extends else None
    done = finished(parent=parent)
    prompt = done.prompted.prompt
    engine: Any = Routed(*tries, (last, "answer"))
    sampler = Sampler(engine, mode=LogprobMode.RAW, version=lambda: 1, decode=str)
    request = GenerateRequest("r", prompt, Sampling())
    sample = await sampler.sample(request, prompt, on_chunk=lambda _: None)
    exchange = exchange_record(dataclasses.replace(done, sample=sample), 0)
    experts = unpack(exchange.experts or b"")
    assert experts.start == max(0, exchange.kept - 1) == (2 if extends else 0)
    tokens = np.concatenate([prompt.array(), sample.output_ids])
    assert experts.rows.tolist() == rows_of(tokens)[experts.start : -1].tolist()
    assert "engine" not in exchange.extra
    assert "engine_before" not in exchange.extra


def test_an_exchange_without_experts_has_no_column():
    assert exchange_record(finished(), 0).experts is None
    assert exchange_record(finished(extra={"mask": [1, 2]}), 0).experts is None


def test_experts_of_a_try_that_was_cut_are_cut_with_it():
    rows = Experts(0, rows_of(np.arange(9)))
    exchange = exchange_record(finished(extra={KEY: rows, "mask": [1, 2]}), 0)
    assert len(unpack(exchange.experts or b"").rows) == 3 + 2 - 1
    assert exchange.extra["engine"] == {"mask": [1, 2]}

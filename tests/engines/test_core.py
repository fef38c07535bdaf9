"""The compiled readers of vLLM's replies, held against those that they take the place of."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridle.engines import vllm_schemas
from bridle.engines.base import GenerateChunk
from bridle.engines.vllm_routes import read_answer
from bridle.errors import EngineError

COMPILED = importlib.util.find_spec("bridle.engines._core") is not None
"""False without a C compiler: then nothing is read in one pass."""

PROMPT = [5, 17, 2**31 - 1, 0]
SENT = orjson.dumps(PROMPT)


def entry(token: int, logprob: float, *, named: bool) -> dict[str, Any]:
    """One token's logprob as the token route has it, or (`named`) as the chat route."""
    if named:
        name = f"token_id:{token}"
        return {"token": name, "logprob": logprob, "bytes": [1], "top_logprobs": []}
    return {"token_id": token, "rank": None, "logprob": logprob, "top_logprobs": []}


def reply(
    tokens: list[tuple[int, float]],
    *,
    named: bool = False,
    choice: dict[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A whole reply with these tokens; `choice` and `top` replace or add fields."""
    content = [entry(token, logprob, named=named) for token, logprob in tokens]
    fields = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": [token for token, _ in tokens],
        "stop_reason": None,
        "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
    }
    usage = {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    body = {"request_id": "r", "choices": [fields | (choice or {})], "prompt_token_ids": PROMPT}
    return {**body, "usage": usage, **top}


TWO = [(7, -0.25), (9, -1.5)]


def known(chunk: GenerateChunk | None) -> object:
    """The facts of a chunk, to be compared; -0.0 counts as 0."""
    if chunk is None:
        return None
    ids, logprobs = chunk.output_ids.tolist(), chunk.logprobs.tolist()
    facts = chunk.finish_reason, chunk.stop_text, chunk.versions, chunk.prompt_ids_json
    return ids, logprobs, *facts, chunk.cached_tokens, chunk.extra, chunk.numbered


def check_both(body: bytes) -> GenerateChunk | None:
    """Read a reply by the compiled reader, and check that the other one reads the same."""
    fast = vllm_schemas.usual_reply(body, SENT)
    if fast is not None:
        assert known(fast) == known(read_answer(body, sent=SENT).chunk)
        low, high = fast.output_ids.min(), fast.output_ids.max()
        assert fast.bounds == (low, high, fast.logprobs.min(), fast.logprobs.max())
    return fast


def test_it_is_compiled_where_there_is_a_c_compiler_and_pythons_headers():
    linker = shlex.split(sysconfig.get_config_var("LDSHARED") or "cc -shared")
    headers = f"{sysconfig.get_path('include')}/Python.h"
    expected = shutil.which(linker[0]) is not None and Path(headers).exists()
    assert expected == COMPILED


@pytest.mark.parametrize("named", [False, True])
def test_a_usual_reply_is_read_in_one_pass(named):
    message = {"message": {"role": "assistant", "content": 'a "ü" \\ \u2028', "tool_calls": []}}
    body = orjson.dumps(reply(TWO, named=named, choice=message))
    chunk = check_both(body)
    assert (chunk is not None) == COMPILED
    if chunk is None:
        return
    assert chunk.output_ids.tolist() == [7, 9]
    assert chunk.logprobs.tolist() == [-0.25, -1.5]
    assert chunk.cached_tokens == 2
    assert known(vllm_schemas.usual_reply(memoryview(b"HTTP" + body)[4:], SENT)) == known(chunk)


@pytest.mark.parametrize(
    "unusual",
    [
        pytest.param(reply(TWO, error={"message": "broken"}), id="error"),
        pytest.param(reply(TWO, prompt_token_ids=[5, 17]), id="another prompt"),
        pytest.param(reply(TWO, prompt_token_ids=[*PROMPT, 1]), id="longer prompt"),
        pytest.param(reply(TWO, prompt_token_ids=None), id="no prompt"),
        pytest.param(reply(TWO, choices=[]), id="no choice"),
        pytest.param(reply(TWO, choices=reply(TWO)["choices"] * 2), id="two choices"),
        pytest.param(reply(TWO, choice={"token_ids": [7, 8]}), id="other ids"),
        pytest.param(reply(TWO, choice={"token_ids": [7]}), id="fewer ids"),
        pytest.param(reply(TWO, choice={"token_ids": [7, 9, 1]}), id="more ids"),
        pytest.param(reply(TWO, choice={"token_ids": None}), id="no ids"),
        pytest.param(reply([]), id="no tokens"),
        pytest.param(reply([(7, -9999.0)]), id="missing logprob"),
        pytest.param(reply([(7, 1e300)]), id="logprob beyond float32"),
        pytest.param(reply([(-7, -1.0)]), id="negative id"),
        pytest.param(reply([(2**31, -1.0)]), id="id beyond int32"),
        pytest.param(reply(TWO, choice={"logprobs": None}), id="no logprobs"),
        pytest.param(reply(TWO, choice={"finish_reason": None}), id="not ended"),
        pytest.param(reply(TWO, choice={"finish_reason": "new"}), id="unknown reason"),
        pytest.param(reply(TWO, choice={"stop_reason": "END"}), id="stop text"),
        pytest.param(reply(TWO, choice={"routed_experts": "x"}), id="experts"),
        pytest.param(
            reply(TWO, choice={"weight_versions": [{"version": "default", "start": 0, "end": 2}]}),
            id="unnamed weights",
        ),
        pytest.param([reply(TWO)], id="a list"),
    ],
)
def test_the_other_reader_gets_what_is_unusual_or_wrong(unusual):
    assert vllm_schemas.usual_reply(orjson.dumps(unusual), SENT) is None


@pytest.mark.parametrize(
    ("found", "given"),
    [
        (b'"finish_reason":"stop"', b'"finish_reason":"stop","finish_reason":"length"'),
        (b'"request_id":"r"', b'"prompt_token_ids":[5]'),
        (b'"logprob":-0.25', b'"logprob":-00.25'),
        (b'"logprob":-0.25', b'"logprob":-.25'),
        (b'"logprob":-0.25', b'"logprob":-1.'),
        (b'"logprob":-0.25', b'"logprob":-1e'),
        (b'"logprob":-0.25', b'"logprob":NaN'),
        (b'"logprob":-0.25', b'"logprob":-Infinity'),
        (b'"logprob":-0.25', b'"logprob":"-1"'),
        (b'"token_id":7', b'"token_id":7.0'),
        (b'"token_id":7', b'"token_id":07'),
        (b'"token_id":7', b'"token":"token_id:7"'),
        (b'"rank":null', b'"rank":nul'),
        (b'"top_logprobs":[]', b'"top_logprobs":[1,]'),
        (b'"top_logprobs":[]', b'"top_logprobs":{"a"}'),
        (b'"top_logprobs":[]', b'"top_logprobs":' + b"[" * 2000 + b"]" * 2000),
        (b'{"request_id"', b'{ "request_id"'),
        (b'"request_id":"r"', b'"request_id":"r\n"'),
        (b'"cached_tokens":2', b'"cached_tokens":2.5'),
    ],
)
def test_it_leaves_json_that_is_invalid_or_written_otherwise(found, given):
    body = orjson.dumps(reply(TWO))
    assert (check_both(body) is not None) == COMPILED
    assert vllm_schemas.usual_reply(body.replace(found, given, 1), SENT) is None


def event(tokens: list[tuple[int, float]], **choice: Any) -> dict[str, Any]:
    """An event of a stream with these tokens; `choice` replaces or adds fields."""
    body = reply(tokens, choice={"finish_reason": None, "weight_versions": None, **choice})
    return {**body, "prompt_token_ids": None, "usage": None}


def check_event(body: bytes) -> object:
    """Read an event by the compiled reader, and check that the other one reads the same."""
    chunk = vllm_schemas.usual_event(body)
    if chunk is not None:
        assert known(chunk) == known(read_answer(body).chunk)
    return chunk


@pytest.mark.parametrize("named", [False, True])
def test_an_event_with_tokens_alone_is_read_in_one_pass(named):
    body = event(TWO, delta={"role": "assistant", "content": "ü"})
    body["choices"][0]["logprobs"]["content"] = [entry(*one, named=named) for one in TWO]
    assert (check_event(orjson.dumps(body)) is not None) == COMPILED
    del body["usage"], body["prompt_token_ids"], body["choices"][0]["weight_versions"]
    assert (check_event(orjson.dumps(body)) is not None) == COMPILED


@pytest.mark.parametrize(
    "unusual",
    [
        event(TWO, finish_reason="stop"),
        event(TWO, weight_versions=[{"version": "3", "start": 0, "end": 2}]),
        event(TWO, token_ids=[7, 8]),
        event([]),
        {**event(TWO), "prompt_token_ids": PROMPT},
        {**event(TWO), "usage": {"prompt_tokens": 4}},
        {**event(TWO), "error": {"message": "broken"}},
        {**event(TWO), "choices": []},
    ],
)
def test_the_other_reader_gets_an_event_with_more_than_tokens(unusual):
    assert vllm_schemas.usual_event(orjson.dumps(unusual)) is None


logprobs = st.floats(-9000, 0.5, allow_nan=False)


@given(
    tokens=st.lists(st.tuples(st.integers(0, 2**31 - 1), logprobs), min_size=1, max_size=700),
    named=st.booleans(),
    choice=st.permutations(["index", "logprobs", "finish_reason", "token_ids", "weight_versions"]),
    added=st.dictionaries(
        st.text(max_size=8),
        st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), st.lists),
        max_size=3,
    ),
)
@example([(1, -1.5e-7)], False, ["index", "logprobs", "finish_reason", "token_ids"], {})
def test_any_usual_reply_is_read_as_the_other_reader_does(tokens, named, choice, added):
    body = reply(tokens, named=named)
    for name in {"choices", "prompt_token_ids", "usage", "error"} & added.keys():
        del added[name]
    fields = body["choices"][0]
    body = {**added, **body, "choices": [{name: fields[name] for name in choice}]}
    text = orjson.dumps(body)
    chunk = check_both(text)
    is_plain = all(name.isascii() and b"\\" not in orjson.dumps(name) for name in added)
    assert (chunk is not None) == (is_plain and COMPILED)


@given(
    st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
)
@example("-0.1234567890123456789")
@example("-4.9e-324")
@example("-9007199254740993e-16")
@example("1.00000017881393432617187499")
def test_a_logprob_is_rounded_as_by_the_other_reader(number):
    body = orjson.dumps(reply(TWO)).replace(b"-0.25", number.encode())
    fast = check_both(body)
    if fast is None and COMPILED:
        value = float(number)
        assert value <= -9998 or value > float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("whole", "check"),
    [
        pytest.param(orjson.dumps(reply(TWO)), check_both, id="reply"),
        pytest.param(orjson.dumps(event(TWO)), check_event, id="event"),
    ],
)
@given(data=st.data())
def test_no_damage_is_read_otherwise_than_by_the_other_reader(whole, check, data):
    body = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        end = data.draw(st.integers(at, min(len(body), at + 4)))
        body[at:end] = data.draw(st.binary(max_size=4) | st.sampled_from([b'"', b"{", b"}", b","]))
        if not body:
            return
    try:
        check(bytes(body))
    except EngineError as error:
        pytest.fail(f"it was read, and the other reader refuses it: {error}")


def test_every_beginning_of_a_reply_is_left_to_the_other_reader():
    body = orjson.dumps(reply(TWO))
    for size in range(len(body)):
        assert vllm_schemas.usual_reply(body[:size], SENT) is None
        assert vllm_schemas.usual_reply(memoryview(body)[:size], SENT) is None
    body = orjson.dumps(event(TWO))
    assert all(vllm_schemas.usual_event(body[:size]) is None for size in range(len(body)))

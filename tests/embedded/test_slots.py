"""Slots against the model's plain forward pass, in orders that an engine seldom meets."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.embedded.models import prompt_of

from bridle.embedded.call import BatchedCall
from bridle.embedded.model import load_model
from bridle.embedded.slots import ATTENTION, SlotDecoder, attention, register
from bridle.types import Sampling


def call(prompt) -> BatchedCall:
    ids = np.array(prompt, dtype=np.int32)
    options: Any = {"limit": 99, "stop_ids": frozenset(), "decode": lambda _: "", "mailbox": None}
    return BatchedCall("r", ids, Sampling(), **options)


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def model(request, folders):
    """One with plain attention, one whose attention sees a window of 7."""
    register()
    made = load_model(folders[request.param], dtype="auto", device=torch.device("cpu"))
    made.set_attn_implementation(ATTENTION)
    return request.param, made


moves = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from(["step", "leave", "forget"])),
    min_size=4,
    max_size=14,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves)
def test_any_order_of_joining_stepping_and_leaving_gives_the_models_own_logits(
    model, oracles, moves
):
    name, made = model
    oracle = oracles[name]
    decoder = SlotDecoder(made, max_batch=4, prefix_bytes=40_000)
    texts = {i: prompt_of(30, seed=i // 2)[: 18 + i] + prompt_of(90, seed=i) for i in range(4)}
    joined: dict[int, BatchedCall] = {}
    with torch.inference_mode():
        for who, count, what in moves:
            if who not in joined:
                joined[who] = call(texts[who][: 18 + who + count])
                assert decoder.admit(joined[who], 0)
            elif what != "step":
                decoder.release(joined.pop(who), keep=what == "leave")
                continue
            work = [(c, min(count, c.pending)) for c in joined.values()]
            assert decoder.reserve(work)
            logits = decoder.forward(work)
            ready = [i for i, c in joined.items() if c.pending == 0]
            for row, i in zip(logits, ready, strict=True):
                c = joined[i]
                expected = oracle.logits(c.ids[: c.length].tolist())[-1]
                assert (row - expected).abs().max() < 1e-3
                c.append(texts[i][c.length], 0.0, 0)


def test_a_call_under_other_weights_lends_nothing(model):
    _, made = model
    decoder = SlotDecoder(made, max_batch=4, prefix_bytes=0)
    old, new, beside = call(prompt_of(20)), call(prompt_of(20)), call(prompt_of(20))
    with torch.inference_mode():
        decoder.admit(old, 0)
        decoder.reserve([(old, 20)])
        decoder.forward([(old, 20)])
        decoder.admit(new, 1)
        decoder.admit(beside, 0)
    assert (new.computed, beside.computed) == (0, 19)


def test_slots_grow_for_more_and_longer_calls_within_their_budget(model):
    _, made = model
    decoder = SlotDecoder(made, max_batch=8, prefix_bytes=0)
    with torch.inference_mode():
        first = call(prompt_of(20))
        decoder.admit(first, 0)
        decoder.reserve([(first, 20)])
        decoder.forward([(first, 20)])
        decoder.release(first, keep=False)
        assert decoder.limit(256 * 1024) == 1024
        calls = [call(prompt_of(20, seed=i)) for i in range(9)]
        assert [decoder.admit(c, 0) for c in calls] == [True] * 8 + [False]
        assert decoder.reserve([(calls[0], 100)])
        assert not decoder.reserve([(calls[0], 130)])
        for c in calls[4:8]:
            decoder.release(c, keep=False)
        assert decoder.reserve([(calls[0], 130)])
        assert not decoder.reserve([(calls[0], 257)])


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_attention_of_a_kind_it_does_not_know_is_refused(name):
    nothing = torch.zeros(1, 1, 1, 1)
    argument: Any = {name: 1.0}
    with pytest.raises(NotImplementedError, match=name):
        attention(None, nothing, nothing, nothing, None, **argument)

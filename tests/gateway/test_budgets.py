"""Sampling parameters and token budgets of calls."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import FieldPolicy, Limits, SamplingPolicy
from bridle.errors import RequestError
from bridle.gateway.budgets import (
    SamplingPlan,
    TokenAccount,
    derived_seed,
    output_budget,
    reached_limit,
    too_many_in_flight,
)
from bridle.types import Sampling


def effective(policy, asked, budget=100):
    return SamplingPlan(policy).effective(asked, budget=budget, stop_token_ids=(7,), salt="s:1")


def test_the_default_sampling_policy_ignores_requested_truncation_and_penalties():
    asked = Sampling(temperature=0.0, top_p=0.5, top_k=3, presence_penalty=1.0, seed=5)
    used = effective(SamplingPolicy(), asked)
    assert (used.temperature, used.top_p, used.top_k) == (1.0, 1.0, -1)
    assert (used.presence_penalty, used.frequency_penalty, used.seed) == (None, None, None)


def test_stop_strings_are_respected_and_the_models_own_stop_tokens_added():
    used = effective(SamplingPolicy(), Sampling(stop=("END",), stop_token_ids=(9, 7)))
    assert used.stop == ("END",)
    assert used.stop_token_ids == (7, 9)


def test_policy_mode_default_fills_missing_fields_and_respect_keeps_requested_ones():
    policy = SamplingPolicy(
        temperature=FieldPolicy(mode="default", value=0.7), top_p=FieldPolicy(mode="respect")
    )
    assert effective(policy, Sampling()).temperature == 0.7
    assert effective(policy, Sampling(temperature=0.2, top_p=0.9)).temperature == 0.2
    assert effective(policy, Sampling(temperature=0.2, top_p=0.9)).top_p == 0.9
    assert effective(policy, Sampling()).top_p is None


def test_an_overridden_seed_is_derived_per_call_and_a_respected_seed_is_kept():
    ours = SamplingPlan(SamplingPolicy(seed=FieldPolicy(mode="override", value=3)))
    seeds = {
        ours.effective(Sampling(), budget=1, stop_token_ids=(), salt=f"s:{call}").seed
        for call in range(20)
    }
    assert len(seeds) == 20
    assert derived_seed(3, "s:0") in seeds
    asked = effective(SamplingPolicy(seed=FieldPolicy(mode="respect")), Sampling(seed=11))
    assert asked.seed == 11


def test_min_tokens_never_exceed_the_budget():
    assert effective(SamplingPolicy(), Sampling(min_tokens=500)).min_tokens == 100
    assert effective(SamplingPolicy(), Sampling(min_tokens=500)).max_tokens == 100


amounts = st.none() | st.integers(1, 10_000)


@given(prompt=st.integers(0, 9_000), asked=amounts, task=amounts)
def test_the_output_budget_is_the_least_of_request_task_and_context_room(prompt, asked, task):
    room = 8_192 - prompt
    allowed = [amount for amount in (asked, task) if amount is not None]

    def budget():
        return output_budget(
            prompt_tokens=prompt,
            context_length=8_192,
            asked=asked,
            task=task,
            minimum=64,
        )

    if room < 64:
        with pytest.raises(RequestError, match="prompt is too long") as refused:
            budget()
        assert refused.value.code == "context_length_exceeded"
        assert (refused.value.prompt_tokens, refused.value.context_length) == (prompt, 8_192)
    else:
        assert budget() == min([room, *allowed])


async def test_concurrent_calls_never_sample_more_than_the_session_s_token_budget():
    account, spent = TokenAccount(100), 0

    async def call(most: int, used: int) -> None:
        nonlocal spent
        granted = await account.reserve(most, lambda: spent)
        assert spent + account.reserved <= 100
        await asyncio.sleep(0)
        spent += min(used, granted)
        account.release(granted)

    async with asyncio.TaskGroup() as group:
        for most, used in ((60, 10), (60, 60), (20, 20), (90, 5)):
            group.create_task(call(most, used))
    assert (spent, account.reserved) == (95, 0)


async def test_the_last_call_gets_the_remaining_tokens_and_the_next_call_is_refused():
    account = TokenAccount(100)
    assert await account.reserve(500, lambda: 97) == 3
    account.release(3)
    with pytest.raises(RequestError) as refused:
        await account.reserve(1, lambda: 100)
    assert refused.value.code == "budget_exhausted"


async def test_token_reservations_of_a_session_without_a_limit_never_wait():
    account = TokenAccount(None)
    assert await account.reserve(10**9, lambda: 10**9) == 10**9
    assert await account.reserve(5, lambda: 0) == 5


def test_a_limit_is_named_when_it_is_reached():
    limits = Limits(max_turns=2, max_tokens=10, max_seconds=60)
    assert reached_limit(limits, turns=1, tokens=9, seconds=59) is None
    assert reached_limit(limits, turns=2, tokens=0, seconds=0) == "turns"
    assert reached_limit(limits, turns=0, tokens=10, seconds=0) == "tokens"
    assert reached_limit(limits, turns=0, tokens=0, seconds=60) == "seconds"
    assert reached_limit(Limits(), turns=10**6, tokens=10**9, seconds=10**9) is None


def test_too_many_calls_in_flight_are_a_429_with_retry_after():
    assert too_many_in_flight(Limits(), 99) is None
    assert too_many_in_flight(Limits(max_calls_in_flight=2), 1) is None
    refusal = too_many_in_flight(Limits(max_calls_in_flight=2), 2)
    assert refusal is not None
    assert refusal.status == 429
    assert refusal.retry_after_s is not None

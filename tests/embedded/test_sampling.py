import dataclasses
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.embedded.batch import sample
from bridle.embedded.call import BatchedCall
from bridle.types import Sampling

VOCAB = 12
PROMPT_ID = 1


def call(*, stop_ids=(), sampled=(), **sampling) -> BatchedCall:
    made = BatchedCall(
        "r",
        np.array([PROMPT_ID], dtype=np.int32),
        Sampling(**sampling),
        limit=100,
        stop_ids=frozenset(stop_ids),
        decode=lambda _: "",
        mailbox=None,
    )
    for token in sampled:
        made.append(token, 0.0, 0)
    return made


def reference(
    logits: np.ndarray, asked: Sampling, sampled: list[int], banned: set[int]
) -> np.ndarray:
    """Probabilities by the definition, in float64, one row, no cleverness."""
    logits = logits.astype(float).copy()
    for name, bias in (asked.logit_bias or {}).items():
        logits[int(name)] += bias
    for token in {PROMPT_ID, *sampled}:
        by = asked.repetition_penalty or 1
        logits[token] *= 1 / by if logits[token] > 0 else by
    for token in set(sampled):
        logits[token] -= asked.presence_penalty or 0
        logits[token] -= (asked.frequency_penalty or 0) * sampled.count(token)
    logits[list(banned)] = -np.inf
    logits /= asked.temperature
    logits[logits < logits.max() + np.log(asked.min_p or 1e-30)] = -np.inf
    if asked.top_k and asked.top_k > 0:
        logits[logits < np.sort(logits)[::-1][min(asked.top_k, len(logits)) - 1]] = -np.inf
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    kept = order[before < (1.0 if asked.top_p is None else asked.top_p)]
    probs[probs < probs[kept].min()] = 0
    return probs / probs.sum()


samplings = st.builds(
    Sampling,
    temperature=st.floats(0.2, 3),
    top_p=st.none() | st.floats(0.05, 0.99),
    top_k=st.none() | st.sampled_from([-1, 0, 1, 2, 5, 99]),
    seed=st.integers(0, 10**6),
    min_tokens=st.sampled_from([None, 5]),
    presence_penalty=st.none() | st.floats(-1, 1),
    frequency_penalty=st.none() | st.floats(-1, 1),
    repetition_penalty=st.none() | st.floats(0.5, 2),
    min_p=st.none() | st.floats(0.01, 0.9),
    logit_bias=st.none() | st.just({"0": 2.0, "7": -100.0}),
)


@given(st.lists(samplings, min_size=1, max_size=4), st.integers(0, 99))
def test_logprobs_equal_a_reference_for_all_sampling_parameters(asked, seed):
    logits = np.random.default_rng(seed).normal(0, 2, (len(asked), VOCAB)).astype(np.float32)
    names = [one.name for one in dataclasses.fields(Sampling)]
    fields = [{name: getattr(a, name) for name in names} for a in asked]
    calls = [call(stop_ids=[3], sampled=[4, 5, 4], **given_fields) for given_fields in fields]
    tokens, logprobs = sample(torch.from_numpy(logits.copy()), calls)
    for row, a, token, logprob in zip(logits, asked, tokens, logprobs, strict=True):
        banned = {3} if a.min_tokens else set()
        expected = reference(row, a, [4, 5, 4], banned)
        assert expected[token] > 0
        assert abs(math.log(expected[token]) - logprob) < 1e-4


def test_tokens_are_sampled_in_proportion_to_their_probability():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125, 0.0]]))
    one = call(seed=0, temperature=1.0)
    tokens = [sample(logits.clone(), [one])[0][0] for _ in range(4000)]
    shares = np.bincount(tokens, minlength=5) / 4000
    assert np.abs(shares - [0.5, 0.25, 0.125, 0.125, 0.0]).max() < 0.03
    assert shares[4] == 0


@given(st.integers(0, 99), st.integers(0, 3))
def test_a_sampled_token_depends_on_its_own_logits_and_seed_only(seed, at):
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed))
    calls = [call(seed=i, temperature=0.9) for i in range(4)]
    together = sample(logits.clone(), calls)
    alone = sample(logits[at : at + 1].clone(), [call(seed=at, temperature=0.9)])
    assert together[0][at] == alone[0][0]
    assert abs(together[1][at] - alone[1][0]) < 1e-6


def test_temperature_zero_picks_the_most_likely_token_with_logprob_zero():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, logprobs = sample(logits, [call(temperature=0.0), call(temperature=1.0, top_k=1)])
    assert tokens == [1, 0]
    assert logprobs == [0.0, 0.0]


def test_greedy_sampling_consumes_no_random_number_of_a_call():
    greedy = call(temperature=0.0, seed=1)
    sample(torch.zeros(1, VOCAB), [greedy])
    assert greedy.uniforms.next() == call(seed=1).uniforms.next()


def test_nan_logits_give_a_nan_logprob_at_every_temperature():
    logits = torch.zeros(3, VOCAB)
    logits[:2, 4] = math.nan
    calls = [call(temperature=0.0), call(temperature=1.0), call(temperature=1.0)]
    _, logprobs = sample(logits, calls)
    assert [math.isnan(logprob) for logprob in logprobs] == [True, True, False]

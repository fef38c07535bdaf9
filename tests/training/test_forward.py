"""All layouts give every trained token the logprob that one plain forward pass gives it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training.made import VOCABULARY, group, plain_logprobs, session, tiny_model, trace

from bridle.errors import TrainingError
from bridle.training.forward import (
    check_ids,
    chosen,
    logits_at,
    packed_of,
    rows_of,
    sharing_saves,
    trees_of,
)
from bridle.training.grpo import pack_attention
from bridle.training.samples import Sample

MODEL, PACKED = tiny_model(), tiny_model()
pack_attention(PACKED)

ids = st.integers(2, VOCABULARY - 1)


@st.composite
def many_samples(draw):
    """Traces that share beginnings of various lengths."""
    common = draw(st.lists(ids, min_size=1, max_size=6))
    samples = []
    for number in range(draw(st.integers(1, 5))):
        shared = common[: draw(st.integers(1, len(common)))]
        response = draw(st.lists(ids, min_size=1, max_size=6))
        mask = [1, *draw(st.lists(st.integers(0, 1), min_size=len(response) - 1, max_size=5))]
        mask = (mask + [0] * len(response))[: len(response)]
        one = trace(shared, response, mask, version=number, name=f"t{number}")
        samples.append(Sample(one, number % 2, float(number), 1 / (number + 1)))
    return samples


def expected(samples):
    """(trace's advantage, logprob) of each token that trains, in any order."""
    found = []
    for sample in samples:
        logprobs = plain_logprobs(MODEL, sample.trace)
        trained = np.flatnonzero(sample.trace.loss_mask)
        found += [(sample.advantage, logprobs[at]) for at in trained]
    return sorted(found)


def computed(pieces, model=MODEL):
    found = []
    for piece in pieces:
        tokens = piece.tokens()
        with torch.no_grad():
            logits, wanted = piece.logits(model)
        logprobs = chosen(logits, wanted, 1.0)
        assert len(logprobs) == len(tokens.old) == len(tokens.versions) == len(tokens.weights)
        assert tokens.versions.tolist() == tokens.advantages.astype(int).tolist()
        assert np.allclose(tokens.weights, 1 / (tokens.versions + 1))
        found += zip(tokens.advantages.tolist(), logprobs.tolist(), strict=True)
    return sorted(found)


def test_per_token_advantages_stay_with_their_tokens_in_all_batch_layouts():
    samples = [
        Sample(trace([2, 3], [4, 5, n], [1, 0, 1]), 0, np.array([n, n + 0.5, -n]), 1.0)
        for n in (7, 8)
    ]
    rows, lines = rows_of(samples, 100, share=True), packed_of(samples, 100)
    for pieces in (rows, lines, trees_of(samples, 100)):
        found = np.concatenate([piece.tokens().advantages for piece in pieces])
        assert sorted(found.tolist()) == [-8, -7, 7, 8]


@given(many_samples(), st.integers(1, 40), st.booleans())
def test_logprobs_in_padded_rows_equal_those_of_a_plain_forward_pass(samples, batch_tokens, share):
    pieces = list(rows_of(samples, batch_tokens, share=share))

    assert np.allclose(computed(pieces), expected(samples), atol=1e-5)
    assert all(p.computed <= batch_tokens or len(p.samples) == 1 for p in pieces)


@given(many_samples(), st.integers(1, 40))
def test_logprobs_in_packed_sequences_equal_those_of_a_plain_forward_pass(samples, batch_tokens):
    pieces = list(packed_of(samples, batch_tokens))

    assert np.allclose(computed(pieces, PACKED), expected(samples), atol=1e-5)
    assert all(p.computed <= batch_tokens or len(p.samples) == 1 for p in pieces)
    assert sum(p.computed for p in pieces) == sum(
        len(s.trace.prompt_ids) + len(s.trace.response_ids) - 1 for s in samples
    )


@given(many_samples(), st.integers(1, 40))
def test_logprobs_in_packed_trees_equal_those_of_a_plain_forward_pass(samples, batch_tokens):
    pieces = list(trees_of(samples, batch_tokens))

    assert np.allclose(computed(pieces), expected(samples), atol=1e-5)
    assert all(p.computed <= batch_tokens or len(p.samples) == 1 for p in pieces)
    assert all(len({sample.group for sample in piece.samples}) == 1 for piece in pieces)


def test_logits_are_computed_at_the_selected_positions_only():
    ids, places = torch.tensor([[2, 3, 4], [5, 6, 7]]), torch.tensor([[0, 1, 0], [1, 0, 1]]) != 0
    heads = []
    hook = MODEL.lm_head.register_forward_hook(lambda _, __, out: heads.append(out.shape))
    with hook, torch.no_grad():
        found = logits_at(MODEL, places, input_ids=ids)
        every = MODEL(input_ids=ids).logits

    assert torch.allclose(found, every[places], atol=1e-6)
    assert heads == [(3, VOCABULARY), (2, 3, VOCABULARY)]


def test_logits_are_selected_also_for_models_without_logits_to_keep():
    """Before transformers 5.23, `logits_to_keep` does not take a mask."""
    refused = tiny_model()
    forward = refused.forward

    def strict(*, input_ids):
        return forward(input_ids=input_ids)

    refused.forward = strict
    ids, places = torch.tensor([[2, 3, 4]]), torch.tensor([[False, True, True]])
    with torch.no_grad():
        found = logits_at(refused, places, input_ids=ids)
        assert torch.allclose(found, MODEL(input_ids=ids).logits[places], atol=1e-6)


def test_a_model_set_up_for_sequence_packing_refuses_rows_and_trees():
    sample = Sample(trace([2, 3], [4, 5]), 0, 1.0, 1.0)
    [tree] = trees_of([sample], 100)
    [rows] = rows_of([sample, sample], 100, share=True)
    for piece in (tree, rows):
        with pytest.raises(TrainingError, match="takes packed traces only"):
            chosen(*piece.logits(PACKED), 1.0)


def test_rows_compute_a_shared_prefix_once():
    samples = [Sample(trace([2, 3, 4, 5], [n, 6]), 0, 1.0, 1.0) for n in (7, 8, 9)]

    [shared] = rows_of(samples, 100, share=True)
    [apart] = rows_of(samples, 100, share=False)
    [tree] = trees_of(samples, 100)

    assert (apart.computed, shared.computed, tree.computed) == (18, 3 + 3 * 3, 4 + 3 * 2)


def test_a_short_prefix_of_long_rows_is_not_shared():
    """Measured on a model of width 128: 2,800 tokens of which 19 are common take half the time."""
    assert not sharing_saves([2800] * 8, 19, 128)
    assert sharing_saves([250] * 64, 100, 128)
    assert sharing_saves([2800] * 8, 2000, 128)
    assert not sharing_saves([250], 100, 128)

    samples = [Sample(trace([2, 3], [n] * 300), 0, 1.0, 1.0) for n in (7, 8)]
    [apart] = rows_of(samples, 1000, share=True, width=16)
    assert apart.prefix == 0


def test_rows_of_different_lengths_are_split_into_batches_by_length():
    lengths = [10, 20, 900, 950, 1000]
    samples = [Sample(trace([2], [3] * (n - 1)), 0, 1.0, 1.0) for n in lengths]

    pieces = [*rows_of(samples, 100_000, share=False)]

    assert [len(piece.samples) for piece in pieces] == [2, 3]
    assert sum(piece.computed for piece in pieces) == 2 * 20 + 3 * 1000


def test_the_temperature_divides_the_logits():
    sample = Sample(trace([2, 3], [4, 5, 6]), 0, 1.0, 1.0)
    [rows] = rows_of([sample], 100, share=False)
    [tree] = trees_of([sample], 100)
    with torch.no_grad():
        table = MODEL(torch.tensor([[2, 3, 4, 5, 6]])).logits[0, 1:-1] / 0.5
        wanted = torch.log_softmax(table, -1)[torch.arange(3), torch.tensor([4, 5, 6])]

        assert torch.allclose(chosen(*rows.logits(MODEL), 0.5), wanted, atol=1e-5)
        assert torch.allclose(chosen(*tree.logits(MODEL), 0.5), wanted, atol=1e-5)


@pytest.mark.parametrize("packing", ["rows", "sequence", "tree"])
def test_gradients_in_each_batch_layout_equal_those_of_separate_passes(packing):
    model = tiny_model()
    samples = [Sample(trace([2, 3, 4], [n, 6, n]), 0, 1.0, 1.0) for n in (7, 8, 9)]
    if packing == "sequence":
        pack_attention(model)
    layouts: dict[str, Any] = {
        "rows": rows_of(samples, 100, share=True),
        "sequence": packed_of(samples, 100),
        "tree": trees_of(samples, 100),
    }
    [piece] = layouts[packing]

    logits, wanted = piece.logits(model)
    chosen(logits, wanted, 1.0).sum().backward()
    together = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for sample in samples:
        [one] = rows_of([sample], 100, share=False)
        chosen(*one.logits(model), 1.0).sum().backward()

    for parameter, found in zip(model.parameters(), together, strict=True):
        assert torch.allclose(parameter.grad, found, atol=1e-4)


def test_a_token_id_beyond_the_vocabulary_is_refused_with_its_position():
    [sample] = [Sample(t, 0, 1.0, 1.0) for t in session(1.0, trace([2], [VOCABULARY])).traces]
    with pytest.raises(TrainingError, match=f"id {VOCABULARY} at position 1 .* another tokenizer"):
        check_ids([sample], MODEL)
    assert group(session(1.0)).task_id == "task"

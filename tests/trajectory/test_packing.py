"""Packed traces: each token once, every path whole, and a model says the same of both."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.capture.made import MadeSession
from tests.trajectory.conversations import sessions

from bridle.config import BuilderSpec
from bridle.trajectory import rebuild
from bridle.trajectory.packing import block_mask, pack
from bridle.trajectory.sample import Trajectory
from bridle.types import Kind


def whole(trace):
    return np.concatenate([trace.prompt_ids, trace.response_ids])


def built(made, strategy="tree"):
    return rebuild(made.capture(), builder=BuilderSpec(strategy=strategy))


def a_branching_session(seed=0, vocabulary=150_000):
    """A chain, a branch off its middle, another in the middle of a reply, a sub-agent."""
    made = MadeSession(f"s{seed}", seed=seed)

    def ids(count):
        return made.random.integers(0, vocabulary, count, dtype=np.int32)

    made.call(new=ids(12), output=ids(6))
    made.call("x0", new=ids(5), output=ids(7))
    made.call("x1", new=ids(4), output=ids(8))
    made.call("x0", new=ids(5), output=ids(9))
    made.call("x1", new=ids(3), kept=26, output=ids(5))
    made.call(None, new=ids(10), output=ids(4), kind=Kind.SUBAGENT, continues=None)
    return made


def a_group(size=8, prompt=40):
    """Sessions of one task: one prompt, own samples."""
    shared = np.arange(1, prompt + 1, dtype=np.int32)
    found = []
    for number in range(size):
        made = MadeSession(f"s{number}", seed=number)
        made.call(new=shared, output=6)
        made.call("x0", new=5, output=7)
        found.append(built(made))
    return found


def tokens_of(trajectories):
    return sum(len(whole(trace)) for t in trajectories for trace in t.traces)


def assert_whole(packed):
    """Return what holds for every packing."""
    assert (packed.parents < np.arange(len(packed.ids))).all()
    at = packed.parents >= 0
    assert np.array_equal(packed.position_ids[at], packed.position_ids[packed.parents[at]] + 1)
    assert not packed.position_ids[~at].any()
    for number, trace in enumerate(packed.traces):
        path = packed.path(number)
        assert np.array_equal(packed.ids[path], whole(trace))
        assert np.array_equal(packed.parents[path[1:]], path[:-1])
        assert packed.parents[path[0]] == -1
        own = packed.trace_of[path] == number
        response = path[len(trace.prompt_ids) :]
        assert np.array_equal(own[len(trace.prompt_ids) :], trace.loss_mask == 1)
        assert np.array_equal(packed.logprobs[response][own[len(trace.prompt_ids) :]],
                              trace.response_logprobs[trace.loss_mask == 1])  # fmt: skip
    trained = sum(int(trace.loss_mask.sum()) for trace in packed.traces)
    assert packed.loss_mask.sum() == trained == (packed.trace_of >= 0).sum()


@settings(max_examples=max(15, settings().max_examples // 4))
@given(st.lists(sessions(max_calls=8), min_size=0, max_size=3))
def test_a_packed_tree_has_every_path_whole_and_trains_every_token_once(made):
    assert_whole(pack([built(session) for session in made]))


def test_a_packed_session_stores_each_shared_token_once():
    trajectory = built(a_branching_session())
    packed = pack([trajectory])
    assert_whole(packed)
    paths = {whole(trace)[:end].tobytes() for trace in trajectory.traces
             for end in range(1, len(whole(trace)) + 1)}  # fmt: skip
    assert len(packed.ids) == len(paths) < tokens_of([trajectory])


def test_a_packed_group_stores_its_common_prompt_once():
    group = a_group()
    packed = pack(group)
    assert_whole(packed)
    assert len(packed.ids) == tokens_of(group) - 7 * 40


def test_tokens_that_two_sessions_sampled_alike_are_packed_for_each():
    made = [MadeSession("a"), MadeSession("b", seed=1)]
    for number, session in enumerate(made):
        session.call(new=[1, 2, 3], output=[7, 8])
        session.call("x0", new=[4], output=[9 + number])
    packed = pack([built(session) for session in made])
    assert_whole(packed)
    assert sorted(packed.ids.tolist()) == sorted([1, 2, 3, 7, 8, 4, 9, 7, 8, 4, 10])
    assert packed.segment_parents.tolist() == [-1, 0, 0]


def test_a_trace_that_is_a_prefix_of_another_adds_no_tokens_to_the_pack():
    whole_one = built(a_branching_session())
    first = whole_one.traces[0]
    short = dataclasses.replace(
        first,
        **{name: getattr(first, name)[:6] for name in ("response_ids", "versions", "reasons")},
        loss_mask=np.zeros(6, np.uint8),
        response_logprobs=np.zeros(6, np.float32),
    )
    for order in ([first, short], [short, first]):
        packed = pack([Trajectory("s", "COMPLETED", tuple(order), None, None, {})])
        assert len(packed.ids) == len(whole(first))
        assert_whole(packed)


def test_a_session_without_traces_packs_to_zero_tokens():
    packed = pack([built(MadeSession())])
    assert len(packed.ids) == 0
    assert block_mask(packed).shape == (0, 0)
    assert packed.last == ()


def test_the_block_mask_lets_a_token_attend_to_its_own_path_only():
    packed = pack([built(a_branching_session())])
    mask = block_mask(packed)
    for token in range(len(packed.ids)):
        sees, at = set(), token
        while at >= 0:
            sees.add(at)
            at = int(packed.parents[at])
        assert set(np.flatnonzero(mask[token]).tolist()) == sees


def test_builder_tree_builds_the_prefix_merging_traces_and_reports_packed_tokens():
    made = a_branching_session()
    tree, paths = built(made), built(made, "prefix_merging")
    assert [whole(t).tolist() for t in tree.traces] == [whole(t).tolist() for t in paths.traces]
    assert tree.metadata["stats"] == paths.metadata["stats"]
    assert tree.metadata["tree"] == {
        "tokens": len(pack([tree]).ids),
        "path_tokens": tokens_of([tree]),
    }
    assert "tree" not in paths.metadata


# ---- a model


@pytest.fixture(scope="module")
def model():
    """Two layers of random weights in float64, so that only mask and positions can differ."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double().eval()


def logprob_table(model, packed, mask):
    """Log-softmax after each token, shape (N, vocabulary)."""
    import torch

    hidden = torch.finfo(torch.float64).min * torch.from_numpy(~mask).double()
    with torch.inference_mode():
        logits = model(
            input_ids=torch.from_numpy(packed.ids).long()[None],
            position_ids=torch.from_numpy(packed.position_ids).long()[None],
            attention_mask=hidden[None, None],
        ).logits[0]
    return logits.log_softmax(-1)


def differences(model, packed, table):
    """For each trace, the largest difference to what the model says of it alone."""
    import torch

    found = []
    for number, trace in enumerate(packed.traces):
        ids = torch.from_numpy(whole(trace)).long()
        with torch.inference_mode():
            alone = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        path = packed.path(number)[1:]
        on_tree = table[packed.parents[path].tolist()]
        found.append(float((on_tree - alone[:-1]).abs().max()))
    return found


def test_model_logprobs_on_the_packed_tree_equal_those_on_separate_paths(model):
    packed = pack([built(a_branching_session(seed, vocabulary=64)) for seed in range(3)])
    assert len(packed.ids) < sum(len(whole(trace)) for trace in packed.traces)
    table = logprob_table(model, packed, block_mask(packed))
    assert max(differences(model, packed, table)) < 1e-7  # its softmax is float32
    plain = np.tri(len(packed.ids), dtype=np.bool_)
    assert max(differences(model, packed, logprob_table(model, packed, plain))) > 1e-3

from dataclasses import replace

import numpy as np
import pytest
from tests.evaluators.made import evaluation, trace

from bridle.errors import ConfigError, EvaluatorError
from bridle.evaluators.base import Evaluation, Unscorable
from bridle.evaluators.composite import CompositeEvaluator


class Fixed:
    """An evaluator that says what its config says."""

    def __init__(self, config):
        self.config = config

    @classmethod
    def from_config(cls, config):
        return cls(config)

    async def evaluate(self, context):
        if "fails" in self.config:
            kind = Unscorable if self.config.get("blamed") else EvaluatorError
            raise kind(self.config["fails"])
        traces, turns = (self.config.get(name) for name in ("traces", "turns"))
        return Evaluation(self.config["reward"], traces, {"seen": True}, turns)


def part(reward=None, *, name, **more):
    config = {key: more.pop(key) for key in ("traces", "turns", "fails", "blamed") if key in more}
    return {
        "strategy": "tests.evaluators.test_composite:Fixed",
        "config": {"reward": reward, **config},
        "name": name,
        **more,
    }


async def found(tmp_path, *parts, traces=(), **config):
    async with evaluation(tmp_path) as context:
        context = replace(context, trajectory=replace(context.trajectory, traces=traces))  # noqa: PLW2901
        made = CompositeEvaluator.from_config({"parts": list(parts), **config})
        return await made.evaluate(context)


async def test_composite_reward_is_the_weighted_mean_of_its_parts(tmp_path):
    parts = part(1.0, name="a", weight=3), part(0.0, name="b"), part(9.0, name="c", weight=0)
    evaluated = await found(tmp_path, *parts)
    assert evaluated.reward == 0.75
    assert evaluated.trace_rewards is None
    assert evaluated.metadata["parts"]["b"] == {"reward": 0.0, "seen": True}


@pytest.mark.parametrize(("gate", "reward"), [(1.0, 0.8), (1.5, -1.0)])
async def test_a_part_below_its_gate_skips_later_parts_and_gives_the_otherwise_reward(
    tmp_path, gate, reward
):
    parts = part(1.0, name="tests", gate=gate, weight=0), part(0.8, name="style")
    evaluated = await found(tmp_path, *parts, otherwise=-1)
    assert evaluated.reward == reward
    assert ("style" in evaluated.metadata["parts"]) == (gate == 1.0)


async def test_trace_rewards_are_averaged_by_weight(tmp_path):
    parts = part(1.0, name="a", traces=(1.0, 0.0)), part(0.0, name="b", traces=(0.0, 1.0), weight=3)
    assert (await found(tmp_path, *parts)).trace_rewards == (0.25, 0.75)


async def test_reward_of_a_part_without_trace_rewards_counts_for_each_trace(tmp_path):
    parts = part(1.0, name="tests"), part(0.5, name="judge", traces=(1.0, 0.0), weight=3)
    assert (await found(tmp_path, *parts)).trace_rewards == (1.0, 0.25)


async def test_weighted_turn_rewards_are_added_to_the_outcome_reward_on_the_last_turn_of_each_trace(
    tmp_path,
):
    """A judge of turns beside tests: the tests still count, for every turn before the end."""
    one, two = trace(("user", "do it")), replace(trace(("user", "more")), exchange_ids=("e-2",))
    judge = part(0.5, name="judge", turns={"e-0": 0.5, "e-1": 0.0})
    evaluated = await found(tmp_path, part(1.0, name="tests"), judge, traces=(one, two))
    assert evaluated.reward == 0.75
    assert evaluated.turn_rewards == {"e-0": 0.25, "e-1": 0.5, "e-2": 0.5}


async def test_an_outcome_reward_goes_to_the_last_turn_that_trains_of_each_trace(tmp_path):
    two = replace(
        trace(("user", "do it")),
        **dict.fromkeys(("response_ids", "versions"), np.array([2, 3], np.int32)),
        loss_mask=np.array([1, 0], np.uint8),
        response_logprobs=np.zeros(2, np.float32),
        reasons=np.zeros(2, np.uint8),
        exchange_ids=("e-0", "e-1"),
        turn_ends=(1, 2),
    )
    both = replace(two, loss_mask=np.array([1, 1], np.uint8), exchange_ids=("e-2", "e-3"))
    none = replace(two, loss_mask=np.zeros(2, np.uint8))
    tests = part(0.5, name="tests", traces=(1.0, 0.25, 1.0))
    judge = part(0.0, name="judge", turns={"e-0": 1.0})
    evaluated = await found(tmp_path, tests, judge, traces=(two, both, none))
    assert evaluated.turn_rewards == {"e-0": 1.0, "e-3": 0.125}


async def test_parts_with_different_numbers_of_trace_rewards_are_an_evaluator_error(tmp_path):
    parts = part(1.0, name="a", traces=(1.0,)), part(0.0, name="b", traces=(0.0, 1.0))
    with pytest.raises(EvaluatorError, match="different numbers of traces"):
        await found(tmp_path, *parts)


def test_a_composite_has_a_runtime_prepared_if_a_part_needs_one():
    command = {"strategy": "command", "config": {"command": "true"}}
    plain = {"strategy": "session_completed"}
    assert CompositeEvaluator.from_config({"parts": [plain, command]}).prewarm
    assert not CompositeEvaluator.from_config({"parts": [plain]}).prewarm


async def test_a_failing_part_fails_the_composite_evaluator(tmp_path):
    for kind in (EvaluatorError, Unscorable):
        failing = part(name="b", fails="broken checker", blamed=kind is Unscorable)
        with pytest.raises(kind, match="part 'b' of 'composite': broken checker") as caught:
            await found(tmp_path, part(1.0, name="a"), failing)
        assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "at least 1 item"),
        ([{"strategy": "comand"}], "part 'comand' of 'composite': unknown evaluator"),
        ([{"strategy": "command"}], "part 'command' of 'composite': .*command: Field required"),
        ([{"strategy": "session_completed", "weight": 0}], "needs a weight above 0"),
        ([{"strategy": "session_completed"}] * 2, "need different names"),
        ([{"strategy": "session_completed", "gate": float("nan")}], "gate: .* finite number"),
    ],
)
def test_an_invalid_part_of_a_composite_config_is_refused_by_name(parts, why):
    with pytest.raises(ConfigError, match=why):
        CompositeEvaluator.from_config({"parts": parts})

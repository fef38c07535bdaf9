"""Rewards per turn: from a judge of a real session to the advantages of a trainer."""

from typing import Any

from tests.node.house import a_node, task
from tests.node.test_session import JUDGE, judging

from bridle.node.results import SessionResult
from bridle.training.samples import Group, advantages_of
from bridle.trajectory import rebuild


async def test_a_judge_s_turn_scores_give_each_turn_of_a_session_its_own_advantage(tmp_path):
    config: Any = JUDGE["config"]
    of_turns = JUDGE | {"config": {**config, "mode": "turns"}}
    results: list[SessionResult] = []
    again: Any
    trace: Any
    for name, scores in (("good", "[1, 1]"), ("bad", "[1, 0]")):
        answer = f'{{"reason": "read", "scores": {scores}}}'
        (tmp_path / name).mkdir()
        async with a_node(tmp_path / name, engine=judging(answer)) as node:
            results.append(await node.run(task(evaluator=of_turns)))
            stored = node.store.read(results[-1].session_id)
        (again,), (trace,) = rebuild(stored).traces, results[-1].trajectory.traces
        assert again.token_rewards.tolist() == trace.token_rewards.tolist()
    assert [one.reward for one in results] == [1.0, 0.5]
    for one, rewards in zip(results, ([0.5, 0.5], [0.5, 0.0]), strict=True):
        (trace,) = one.trajectory.traces
        assert len(trace.turn_ends) == 2
        places = [*trace.trained_turns().values()]
        assert trace.token_rewards[places].tolist() == rewards
        assert trace.token_rewards.sum() == one.reward

    group = Group(0, "t", tuple(one.trajectory for one in results))
    found: Any = advantages_of(group, "dr_grpo")[0]
    (good,), (bad,) = found

    # From the first turn on they came to 1 and 0.5, from the second on to 0.5 and 0.
    assert [good[place] for place in places] == [0.25, 0.25]
    assert [bad[place] for place in places] == [-0.25, -0.25]

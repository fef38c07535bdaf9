from dataclasses import replace

import pytest
from tests.evaluators.made import ENDED_WELL, evaluation

from bridle.evaluators.base import SessionCompleted


@pytest.mark.parametrize(
    ("harness", "reward"),
    [
        (ENDED_WELL, 2.0),
        (replace(ENDED_WELL, exit_code=1), 0.0),
        (replace(ENDED_WELL, timed_out=True), 0.0),
        (None, 0.0),
    ],
)
async def test_session_completed_rewards_only_exit_code_0_without_a_timeout(
    tmp_path, harness, reward
):
    evaluator = SessionCompleted.from_config({"reward": 2.0})
    async with evaluation(tmp_path, harness=harness) as context:
        assert (await evaluator.evaluate(context)).reward == reward
        limited = replace(context, completed=False)
        assert (await evaluator.evaluate(limited)).reward == 0.0

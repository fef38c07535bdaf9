"""What the unmodified programs do when one call of the model fails."""

import pytest
from tests.real_clients.real import TURNS, run

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(900)]

HARNESSES = (
    "claude_agent_sdk", "claude_code", "cline", "codex", "copilot", "gemini_cli", "openai_agents",
    "opencode", "openhands", "qwen_code",
)  # fmt: skip
"""google_adk repeats no call, aider has one only."""


@pytest.mark.parametrize("fault", [500, 429])
@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_call_that_failed_once_is_made_again_and_no_sample_is_lost(
    tmp_path, harness, fault
):
    turns = [TURNS[0], {**TURNS[1], "fault": fault, "fault_times": 1}, TURNS[2]]
    result, _ = await run(tmp_path, harness, turns=turns)
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
    stats = result.trajectory.metadata["stats"]
    assert (stats["exchanges"], stats["roots"], stats["merge_ratio"]) == (3, 1, 1.0)

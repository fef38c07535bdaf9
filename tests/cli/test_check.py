"""`bridle harness check` on harnesses that need no installation."""

import pytest

from bridle.cli.check import check_harness, history_of


@pytest.mark.parametrize("name", ["command", "function"])
def test_a_harness_that_makes_its_tool_call_works(name):
    report = check_harness(name)

    assert report["works"]
    assert (report["status"], report["tool call"]) == ("COMPLETED", "made")
    assert (report["model calls"], report["merge ratio"]) == (3, 1.0)
    assert report["history"].startswith("keeps its history: all 3 turns shown")
    assert report["unknown to the gateway"] == {}


def test_a_changed_history_is_told_with_its_cost():
    line = {"turns_shown": 45, "turns_verbatim": 0, "tokens_rerendered": 300,
            "habits": {"system_changed": 9}}  # fmt: skip
    assert history_of(line) == (
        "changes its system prompt (a clock?): "
        "45 of 45 turns shown are not as they were sampled (300 tokens)"
    )
    summary = line | {"habits": {"summary": 1}}
    assert history_of(summary).startswith("replaces old messages by fewer (a summary): 45 of 45")
    assert history_of(line | {"turns_shown": 0}) == "shows no turn of the model again"


def test_a_check_names_what_varies_in_a_replay():
    assert check_harness("command", replay=True)["replay"] == "exact"


@pytest.mark.harnesses
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "noise"),
    [("codex", "exec_result"), ("copilot", "session_id"), ("openclaw", "session_id")],
)
def test_a_harness_with_random_texts_replays_but_for_their_names(name, noise):
    report = check_harness(name, replay=True)["replay"]

    assert report.startswith("equivalent but for")
    assert noise in report


@pytest.mark.harnesses
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "what"), [("aider", "edit"), ("mini_swe_agent", "tool call")])
def test_a_program_that_ends_in_a_way_of_its_own_works(name, what):
    report = check_harness(name)

    assert report["works"], report
    assert report[what] == "made"

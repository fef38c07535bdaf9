"""Traces are taken or left out for a named reason, and both are counted."""

import dataclasses

import pytest
from tests.capture.made import MadeSession

from bridle.bridges.examples import Rules, select_examples, survey
from bridle.trajectory import rebuild
from bridle.types import Kind, LogprobMode


def made(session_id, reward=1.0, *, turns=1, status="COMPLETED", task="t", ids=None, source="set"):
    one = MadeSession(session_id, seed=sum(map(ord, session_id)))
    metadata = {"harness": "pi", "task_metadata": {"task_set": source}}
    one.record = dataclasses.replace(one.record, task_id=task, metadata=metadata)
    for turn in range(turns):
        one.call(f"x{turn - 1}" if turn else None, output=5 if ids is None else ids)
    one.end(reward, status=status)
    capture = one.capture()
    return capture, rebuild(capture)


def test_sessions_rejected_by_selection_rules_are_counted_by_reason():
    sessions = [
        made("good"),
        made("weak", 0.2),
        made("unknown", None),
        made("late", status="TIMEOUT"),
        made("long", turns=4),
        made("loop", ids=[7] * 30),
        made("empty", turns=0),
        made("early", turns=0, status="TIMEOUT"),
    ]
    rules = Rules(min_reward=0.5, max_turns=3, max_repetition=0.5, finish=("stop",))
    found = survey(sessions, rules)
    assert list(found.accepted) == ["good"]
    assert found.rejected == {
        "reward": 1, "reward_unknown": 1, "status": 2, "turns": 1, "repetition": 1,
        "nothing_sampled": 1,
    }  # fmt: skip
    assert (found.tasks, found.solved, found.examples) == (1, 1, 1)


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"max_tokens": 14}, "length"),
        ({"min_turns": 2}, "turns"),
        ({"finish": ["length"]}, "finish"),
        ({"max_reward": 0.5}, "reward"),
    ],
)
def test_each_selection_rule_rejects_with_its_own_reason(rules, reason):
    assert survey([made("s")], Rules.model_validate(rules)).rejected == {reason: 1}


@pytest.mark.parametrize(
    "rules",
    [
        *({"max_tokens": 15}, {"min_turns": 1}, {"max_turns": 1}, {"finish": ["stop"]}),
        *({"min_reward": 1}, {"max_reward": 1}, {"max_repetition": 0}),
    ],
)
def test_the_limit_of_a_selection_rule_is_itself_accepted(rules):
    assert list(survey([made("s")], Rules.model_validate(rules)).accepted) == ["s"]


def test_rule_keep_takes_all_conversations_of_a_kept_session_and_unknown_rewards_last():
    whole = MadeSession("whole")
    whole.record = dataclasses.replace(whole.record, task_id="t", metadata={})
    whole.call(None)
    whole.call(None, kind=Kind.SUBAGENT)
    whole.end(-1.0)
    capture = whole.capture()
    sessions = [made("unknown", None), (capture, rebuild(capture)), made("worse", -2.0)]
    found = survey(sessions, Rules(keep=1))
    assert [(name, len(of)) for name, of in found.accepted.items()] == [("whole", 2)]


def test_rule_keep_takes_a_task_s_best_sessions_and_the_shortest_of_equals():
    sessions = [
        made("poor", 0.5), made("long", 1.0, turns=3), made("short", 1.0), made("b", task="u"),
    ]  # fmt: skip
    assert set(survey(sessions, Rules(keep=1)).accepted) == {"short", "b"}
    two = survey(sessions, Rules(keep=2))
    assert set(two.accepted) == {"short", "long", "b"}
    assert two.rejected == {"surplus": 1}


def test_rule_unique_takes_equal_examples_once_per_task():
    sessions = [made("a", ids=[1, 2]), made("b", ids=[1, 2]), made("c", ids=[1, 2], task="u")]
    found = survey(sessions, Rules(unique=True))
    assert set(found.accepted) == {"a", "c"}
    assert found.left_out == {"duplicate": 1}
    assert len(survey(sessions, Rules()).accepted) == 3


def test_selection_statistics_have_attempts_turns_tokens_and_hours_per_source():
    sessions = [made("a", turns=2), made("b", 0.0), made("c", source="other")]
    result = survey(sessions, Rules(min_reward=1)).json()
    assert (result["attempted"], result["accepted"]) == (3, 2)
    assert result["sources"]["set / pi"] == {
        "attempted": 2, "accepted": 1, "acceptance": 0.5, "turns": 2, "turns_mean": 2.0,
        "tokens": 10, "hours": pytest.approx(7 / 3600, abs=1e-3), "engine_s": 0.75,
    }  # fmt: skip
    assert list(result["sources"]) == ["other / pi", "set / pi"]
    assert result["hours"] >= result["wall_hours"] > 0
    assert survey([], Rules()).json()["acceptance"] is None


def test_selection_sources_are_split_by_the_repository_or_package_of_a_task():
    sessions = []
    for name, facts in (("a", {"repo": "org/a"}), ("b", {"package": "b"}), ("c", {})):
        capture, trajectory = made(name)
        metadata = capture.session.metadata
        metadata = {**metadata, "task_metadata": {**metadata["task_metadata"], **facts}}
        session = dataclasses.replace(capture.session, metadata=metadata)
        sessions.append((dataclasses.replace(capture, session=session), trajectory))
    assert list(survey(sessions, Rules()).sources) == ["b / pi", "org/a / pi", "set / pi"]


def test_wall_hours_exclude_pauses_between_sessions():
    sessions = []
    for name, start in (("a", 0), ("b", 5), ("c", 1000)):
        capture, trajectory = made(name)
        session = dataclasses.replace(capture.session, opened_at=start)
        outcome = dataclasses.replace(capture.outcome, ended_at=start + 10)
        sessions.append(
            (dataclasses.replace(capture, session=session, outcome=outcome), trajectory)
        )
    assert survey(sessions, Rules()).wall_hours == pytest.approx(25 / 3600)


def test_a_running_session_counts_as_an_attempt_with_zero_hours():
    capture, _ = made("s")
    capture = dataclasses.replace(capture, outcome=None)
    found = survey([(capture, rebuild(capture))], Rules())
    assert found.rejected == {"status": 1}
    assert found.sources["set / pi"].hours == 0


def test_selected_sessions_are_returned_with_their_examples():
    sessions = [made("a"), made("b", 0.0)]
    found = survey(sessions, Rules(min_reward=1))
    ((capture, trajectory, examples),) = select_examples(sessions, found.accepted)
    assert capture.session.session_id == trajectory.session_id == "a"
    assert [e.trace_id for e in examples] == [trajectory.traces[0].trace_id]


@pytest.mark.parametrize("text", [False, True], ids=["ids", "text"])
def test_a_rejected_reply_is_selected_only_with_rule_rejected(text):
    one = MadeSession("s")
    fields = {"output": 0, "logprob_mode": LogprobMode.NONE} if text else {}
    first = one.call(None, **fields)
    one.call(None, new=first.suffix_ids, **fields)
    one.end()
    capture = one.capture()
    session = capture, rebuild(capture)
    found = survey([session], Rules())
    assert (found.examples, found.left_out) == (1, {"rejected": 1})
    assert survey([session], Rules(rejected=True)).examples == 2

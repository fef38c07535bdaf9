"""Several scorers on the same sessions: who differs how often, and where most."""

import pytest

from bridle.trajectory.scores import ScoredSession, disagreement_of

SESSIONS = [
    ScoredSession("same", "t", {"a": 1.0, "b": 1.0 + 1e-9, "c": 1.0}),
    ScoredSession("near", "t", {"a": 0.5, "b": 0.75, "c": 0.5}),
    ScoredSession("far", "t", {"a": 0.0, "b": 1.0, "c": None}, {"c": "it broke"}),
    ScoredSession("alone", "t", {"a": None, "b": 1.0, "c": None}),
]


def test_sessions_and_scorer_pairs_are_sorted_by_disagreement():
    found = disagreement_of(["a", "b", "c"], SESSIONS, 1.0)

    assert [one.session_id for one in found.sessions] == ["far", "near", "same", "alone"]
    assert [one.session_id for one in found.differing] == ["far", "near"]
    counts = [(pair.scorers, pair.differing, pair.compared) for pair in found.pairs]
    assert counts == [(("a", "b"), 2, 3), (("b", "c"), 1, 2), (("a", "c"), 0, 2)]
    assert [pair.difference for pair in found.pairs] == pytest.approx([1.25 / 3, 0.125, 0.0])


def test_scorers_without_a_common_session_have_difference_none():
    found = disagreement_of(["a", "c"], SESSIONS[3:], 1.0)

    assert [(pair.compared, pair.difference) for pair in found.pairs] == [(0, None)]

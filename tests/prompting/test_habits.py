"""A history that was changed is named by what was done to it."""

import pytest
from tests.prompting.talk import Talk, call, result, said, system, user

from bridle.prompting.conversation import Habit, habit_of

OLD = (
    system("It is 10:00."),
    user("go"),
    said(calls=[call("1")]),
    result("1", "long"),
    said("so"),
    user("on"),
)


@pytest.mark.parametrize(
    ("new", "habit"),
    [
        ((system("It is 10:01."), *OLD[1:], said("x"), user("y")), Habit.SYSTEM),
        ((OLD[0], *OLD[4:], said("x"), user("y")), Habit.WINDOW),
        ((*OLD[:2], *OLD[4:], said("x"), user("y")), Habit.WINDOW),
        ((*OLD[:3], result("1", "[gone]"), *OLD[4:], said("x"), user("y")), Habit.MASKED),
        ((OLD[0], user("summary"), said("I see."), user("on")), Habit.SUMMARY),
        ((*OLD[:2], user("summary"), OLD[4], user("y")), Habit.SUMMARY),
        ((OLD[0], said("I see."), user("on")), Habit.OTHER),
        ((OLD[0],), Habit.OTHER),
    ],
)
def test_a_history_change_is_classified_as_system_window_masked_summary_or_other(new, habit):
    talk = Talk()
    assert habit_of(talk.canonical(*OLD), talk.canonical(*new)) is habit

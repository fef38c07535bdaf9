"""Sticky, with bounded load: the laws of choosing a replica."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engines.pool_replica import ReplicaRouter, RoutingReason


@dataclass(eq=False)
class Place:
    name: str
    load: int = 0


def places(*loads):
    return [Place(str(number), load) for number, load in enumerate(loads)]


@dataclass
class Running:
    """A call that has not ended."""

    place: Place


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 99)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("join"), st.integers(0, 3)),
    ),
    max_size=80,
)


@given(STEPS, st.floats(1, 3), st.integers(0, 6))
def test_no_replica_exceeds_its_bound_and_no_session_moves_without_need(steps, factor, slack):
    choice: ReplicaRouter[Place] = ReplicaRouter(load_factor=factor, slack=slack)
    all_places, running = places(0, 0, 0, 0), []
    here = list(all_places)
    home: dict[str, Place] = {}
    for step, number in steps:
        if step == "end" and running:
            running.pop(number % len(running)).place.load -= 1
        elif step == "leave" and len(here) > 1 and all_places[number] in here:
            here.remove(all_places[number])
        elif step == "join" and all_places[number] not in here:
            here.append(all_places[number])
        elif step == "call":
            session = str(number)
            bound = choice.bound(here)
            place, how = choice.pick(session, here)
            before = home.get(session)
            # Bounded: nobody is given more than the bound, whoever else may be had.
            assert place in here
            assert place.load + 1 <= bound
            # Sticky: a session leaves its replica only for one of two reasons.
            if how is RoutingReason.STUCK:
                assert place is before
            elif how is RoutingReason.SPILLED:
                assert before is not None
                assert before.load + 1 > bound
            elif how is RoutingReason.MOVED:
                assert before not in here
            else:
                assert before is None
            home[session] = place
            place.load += 1
            running.append(Running(place))
    counted = Counter(place.name for place in home.values())
    assert all(choice.sessions(place) == counted[place.name] for place in all_places)


@given(st.integers(1, 5), st.integers(1, 60))
def test_idle_replicas_get_equal_numbers_of_new_sessions(count, sessions):
    choice: ReplicaRouter[Place] = ReplicaRouter()
    here = places(*([0] * count))
    for number in range(sessions):
        choice.pick(str(number), here)
    living = [choice.sessions(place) for place in here]
    assert sum(living) == sessions
    assert max(living) - min(living) <= 1


def test_when_a_replica_leaves_only_its_own_sessions_move():
    choice: ReplicaRouter[Place] = ReplicaRouter()
    here = places(0, 0, 0)
    before = {str(n): choice.pick(str(n), here)[0] for n in range(30)}
    left = here.pop(1)
    after = {session: choice.pick(session, here) for session in before}
    for session, (place, how) in after.items():
        assert (how is RoutingReason.MOVED) == (before[session] is left)
        assert place is before[session] or before[session] is left
    # It comes back: nobody runs after it.
    here.append(left)
    assert all(choice.pick(session, here)[1] is RoutingReason.STUCK for session in before)


def test_a_session_that_spilled_stays_where_it_went():
    choice: ReplicaRouter[Place] = ReplicaRouter(slack=2)
    here = places(0, 0)
    home, _ = choice.pick("a", here)
    home.load = 9
    other, how = choice.pick("a", here)
    assert (other is home, how) == (False, RoutingReason.SPILLED)
    home.load = 0
    assert choice.pick("a", here) == (other, RoutingReason.STUCK)


def test_without_stickiness_every_call_goes_where_the_fewest_run():
    choice: ReplicaRouter[Place] = ReplicaRouter(sticky=False)
    here = places(3, 1, 2)
    for _ in range(3):
        assert choice.pick("a", here) == (here[1], RoutingReason.FIRST)
        here[1].load -= 1
    here = places(0, 0)
    assert len({choice.pick("a", here)[0].name for _ in range(2)}) == 2


def test_a_call_of_no_session_is_remembered_nowhere():
    choice: ReplicaRouter[Place] = ReplicaRouter()
    (here,) = places(0)
    assert choice.pick(None, [here]) == (here, RoutingReason.FIRST)
    assert choice.sessions(here) == 0


def test_sessions_that_ended_or_called_long_ago_are_forgotten():
    choice: ReplicaRouter[Place] = ReplicaRouter(remembered=2)
    here = places(0, 0)
    for session in "abc":
        choice.pick(session, here)
    assert sum(map(choice.sessions, here)) == 2
    assert choice.pick("a", here)[1] is RoutingReason.FIRST
    choice.forget("a")
    choice.forget("never seen")
    assert choice.pick("a", here)[1] is RoutingReason.FIRST
    for place in here:
        choice.drop(place)
    assert sum(map(choice.sessions, here)) == 0
    assert choice.pick("a", here)[1] is RoutingReason.FIRST


@pytest.mark.parametrize(("loads", "bound"), [((0, 0), 8), ((15, 15), 20), ((40, 0, 0, 0), 13)])
def test_the_bound_is_a_share_of_all_calls_but_at_least_the_slack(loads, bound):
    assert ReplicaRouter[Place]().bound(places(*loads)) == bound

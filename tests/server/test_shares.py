from collections import Counter, deque

import pytest

from bridle.server.claiming import Shares


def run(shares, capacity, waiting, sessions, *, length=1):
    """Start `sessions` one after the other as slots become free; each takes `length` starts."""
    running, started = deque[str](), list[str]()
    for _ in range(sessions):
        while len(running) >= capacity * length:
            running.popleft()
        (owner,) = shares.divide(1, waiting, Counter(list(running)[-capacity + 1 :]))
        shares.started(waiting, {owner: 1})
        running.append(owner)
        started.append(owner)
    return started


def test_free_slots_are_divided_evenly():
    assert Shares().divide(6, ["a", "b", "c"], {}) == {"a": 2, "b": 2, "c": 2}


def test_free_slots_go_to_those_who_run_less():
    assert Shares().divide(2, ["a", "b"], {"a": 6}) == {"b": 2}
    assert Shares().divide(4, ["a", "b"], {"a": 3, "b": 1}) == {"a": 1, "b": 3}


def test_an_owner_without_waiting_sessions_leaves_its_slots_to_the_others():
    assert Shares().divide(3, ["a"], {"b": 9}) == {"a": 3}
    assert Shares().divide(3, [], {"b": 9}) == {}


def test_weights_are_kept_where_slots_allow():
    shares = Shares({"a": 3.0})
    assert shares.divide(8, ["a", "b"], {}) == {"a": 6, "b": 2}


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_owners_take_turns_where_there_are_fewer_slots_than_owners(capacity):
    started = run(Shares(), capacity, "abcd", 40)
    for begin in range(0, 36, 4):
        assert len(set(started[begin : begin + 5])) >= 3
    assert set(Counter(started).values()) <= {9, 10, 11}


def test_a_small_weight_on_one_slot_is_served_now_and_then():
    started = Counter(run(Shares({"a": 9.0}), 1, "ab", 100))
    assert 8 <= started["b"] <= 12


def test_who_comes_new_gets_the_next_slot():
    shares = Shares()
    run(shares, 4, "a", 100)
    assert shares.divide(1, "ab", {"a": 3}) == {"b": 1}
    assert shares.divide(1, "ab", {}) == {"b": 1}

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bridle.embedded.slots import SHORTEST, PrefixStore

parts = st.lists(st.sampled_from([0, 1]), min_size=0, max_size=4)


def ids_of(parts: list[int], tail: int = 0) -> np.ndarray:
    """Ids for each part, and a few more."""
    blocks = [np.full(SHORTEST, part + 1) for part in parts]
    return np.concatenate([*blocks, np.arange(tail) + 7]).astype(np.int32)


@given(st.lists(st.tuples(parts, st.integers(0, 3)), max_size=8), parts, st.integers(0, 3))
def test_the_longest_common_beginning_is_found(kept, wanted, tail):
    store = PrefixStore(10**9)
    for given_parts, more in kept:
        store.add(ids_of(given_parts, more), None, 1)
    sought = ids_of(wanted, tail)
    entry, matched = store.find(sought)
    longest = 0
    for given_parts, _ in kept:
        n = 0
        while n < min(len(given_parts), len(wanted)) and given_parts[n] == wanted[n]:
            n += 1
        longest = max(longest, n)
    assert matched // SHORTEST == longest
    if entry is not None:
        assert entry.ids[:matched].tolist() == sought[:matched].tolist()


@given(st.lists(st.tuples(parts, st.integers(1, 40)), max_size=20), st.integers(1, 100))
def test_the_budget_is_never_exceeded(adds, budget):
    store = PrefixStore(budget)
    for given_parts, size in adds:
        store.add(ids_of(given_parts), None, size)
        assert store.size_bytes <= budget
    assert store.size_bytes == sum(entry.size_bytes for entry in store._entries)
    store.clear()
    assert (len(store), store.size_bytes) == (0, 0)


def test_the_least_recently_used_is_dropped_first():
    store = PrefixStore(2)
    a, b, c = ids_of([0]), ids_of([1]), ids_of([0, 1])[SHORTEST // 2 :]
    store.add(a, "a", 1)
    store.add(b, "b", 1)
    store.find(a)
    store.add(c, "c", 1)
    entry, _ = store.find(a)
    assert entry is not None
    assert entry.cache == "a"
    assert store.find(b)[0] is None


def test_the_next_turn_replaces_the_one_before():
    store = PrefixStore(10)
    store.add(ids_of([0]), "turn 1", 1)
    store.add(ids_of([0, 1], 3), "turn 2", 2)
    assert (len(store), store.size_bytes) == (1, 2)
    assert store.covers(ids_of([0]))
    assert not store.covers(ids_of([0, 0]))
    assert not store.covers(ids_of([]))


def test_removing_twice_changes_nothing():
    store = PrefixStore(10)
    store.add(ids_of([0]), None, 1)
    entry, _ = store.find(ids_of([0]))
    assert entry is not None
    store.remove(entry)
    store.remove(entry)
    assert store.size_bytes == 0

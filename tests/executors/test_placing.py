import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import RuntimeSpec
from bridle.executors import members
from bridle.executors.members import Place, needs_of, relevant


def place(name, free=4, capacity=4, **offers):
    return Place(name, offers, node_id=f"id-{name}", capacity=capacity, open=True, told_free=free)


def choose(*given):
    return members.choose(*given)


def test_a_session_needs_what_its_runtime_names():
    spec = RuntimeSpec(
        backend="docker", cpus=2, memory_mb=512, gpus=1, resources={"licence": 1, "docker": 0.5}
    )
    assert needs_of(spec) == {
        "CPU": 2,
        "memory": 512 * 2**20,
        "GPU": 1.0,
        "licence": 1,
        "docker": 0.5,
    }
    assert needs_of(RuntimeSpec()) == {}


def test_what_no_node_offers_counts_only_where_it_was_asked_for_by_name():
    spec = RuntimeSpec(backend="docker", cpus=2, gpus=1, resources={"licence": 1})
    assert relevant(spec, {"CPU"}) == {"CPU": 2, "GPU": 1.0, "licence": 1}
    assert relevant(spec, {"docker"}) == {"docker": 1.0, "GPU": 1.0, "licence": 1}


def test_the_node_with_the_greatest_share_of_free_slots_is_chosen():
    places = [place("a", free=4, capacity=8), place("b", free=3), place("c", free=0)]
    assert choose({}, frozenset(), places) is places[1]


def test_one_that_does_not_have_what_is_needed_or_is_closed_is_not_chosen():
    gpu, closed, other = place("gpu", GPU=1.0), place("closed", GPU=1.0), place("other")
    closed.open = False
    assert choose({"GPU": 1.0}, frozenset(), [gpu, closed, other]) is gpu
    gpu.take({"GPU": 1.0})
    assert choose({"GPU": 1.0}, frozenset(), [gpu, closed, other]) is None
    gpu.give({"GPU": 1.0})
    assert choose({"GPU": 1.0}, frozenset(), [gpu]) is gpu


def test_nodes_to_avoid_are_taken_only_where_no_other_could_ever_do_it():
    bad, busy = place("bad"), place("busy", free=0)
    assert choose({}, frozenset({"id-bad"}), [bad, busy]) is None
    assert choose({"x": 1}, frozenset({"id-bad"}), [place("bad", x=1), busy]).name == "bad"
    busy.open = False
    assert choose({}, frozenset({"id-bad"}), [bad, busy]) is bad


def test_what_is_on_its_way_to_a_node_is_not_free():
    one = place("a", free=2)
    one.placed = 2
    assert one.free == 0
    one.told_free, one.told_placed = 0, 2
    assert one.free == 0
    one.told_free = 1
    assert one.free == 1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 40))
def test_sessions_that_come_together_fill_nodes_evenly_and_never_too_much(capacities, count):
    places = [
        place(str(number), free=capacity, capacity=capacity)
        for number, capacity in enumerate(capacities)
    ]
    given_away = 0
    for _ in range(count):
        chosen = choose({}, frozenset(), places)
        if chosen is None:
            break
        chosen.placed += 1
        given_away += 1
    assert given_away == min(count, sum(capacities))
    shares = [one.placed / one.capacity for one in places]
    assert max(shares) - min(shares) <= 1 / min(capacities) + 1e-9


@pytest.mark.parametrize("much", [0.1, 1 / 3])
def test_shares_that_add_up_to_all_of_it_fit(much):
    one = place("a", x=1.0)
    for _ in range(round(1 / much)):
        assert one.fits({"x": much})
        one.take({"x": much})
    assert not one.fits({"x": much})

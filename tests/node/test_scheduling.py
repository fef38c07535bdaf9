import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.node.nodes import FakeRemote, task

from bridle.config import RuntimeSpec
from bridle.errors import NodeLostError
from bridle.node import fleet
from bridle.node.base import RemoteNode
from bridle.node.fleet import (
    ExecutorSettings,
    Member,
    NodeSlots,
    PendingRun,
    RaySettings,
    needs_of,
    relevant,
)


def place(name, free=4, capacity=4, **offers):
    return NodeSlots(
        name, offers, node_id=f"id-{name}", capacity=capacity, open=True, reported_free=free
    )


def choose(*given):
    return fleet.choose(*given)


def test_resource_needs_of_a_session_come_from_its_runtime_spec():
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


def test_gpus_and_named_resources_are_required_even_if_no_node_offers_them():
    spec = RuntimeSpec(backend="docker", cpus=2, gpus=1, resources={"licence": 1})
    assert relevant(spec, {"CPU"}) == {"CPU": 2, "GPU": 1.0, "licence": 1}
    assert relevant(spec, {"docker"}) == {"docker": 1.0, "GPU": 1.0, "licence": 1}


def test_the_node_with_the_greatest_share_of_free_slots_is_chosen():
    places = [place("a", free=4, capacity=8), place("b", free=3), place("c", free=0)]
    assert choose({}, frozenset(), places) is places[1]


def test_a_node_without_the_resources_or_closed_is_not_chosen():
    gpu, closed, other = place("gpu", GPU=1.0), place("closed", GPU=1.0), place("other")
    closed.open = False
    assert choose({"GPU": 1.0}, frozenset(), [gpu, closed, other]) is gpu
    gpu.take({"GPU": 1.0})
    assert choose({"GPU": 1.0}, frozenset(), [gpu, closed, other]) is None
    gpu.release({"GPU": 1.0})
    assert choose({"GPU": 1.0}, frozenset(), [gpu]) is gpu


def test_a_node_to_avoid_is_chosen_only_if_no_other_has_the_resources():
    bad, busy = place("bad"), place("busy", free=0)
    assert choose({}, frozenset({"id-bad"}), [bad, busy]) is None
    assert choose({"x": 1}, frozenset({"id-bad"}), [place("bad", x=1), busy]).name == "bad"
    busy.open = False
    assert choose({}, frozenset({"id-bad"}), [bad, busy]) is bad


def test_free_slots_exclude_runs_that_are_placed_and_not_yet_reported():
    one = place("a", free=2)
    one.placed = 2
    assert one.free == 0
    one.reported_free, one.reported_placed = 0, 2
    assert one.free == 0
    one.reported_free = 1
    assert one.free == 1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 40))
def test_concurrent_sessions_fill_nodes_evenly_within_their_capacity(capacities, count):
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
def test_fractional_resources_that_add_up_to_the_whole_fit(much):
    one = place("a", x=1.0)
    for _ in range(round(1 / much)):
        assert one.fits({"x": much})
        one.take({"x": much})
    assert not one.fits({"x": much})


async def test_a_member_reports_its_node_as_json():
    remote: RemoteNode = FakeRemote("a")
    member = Member(remote, NodeSlots(remote.name))
    facts = member.json()
    assert (facts["name"], facts["node_id"], facts["state"]) == ("a", None, "opening")
    assert (facts["slots"], facts["free"], facts["sessions"]) == (0, 0, 0)


async def test_only_the_first_end_of_a_pending_run_counts():
    done = asyncio.get_running_loop().create_future()
    run = PendingRun("s", task(), 0, frozenset(), done)
    run.finish(NodeLostError("gone"))
    run.finish(NodeLostError("gone again"))
    with pytest.raises(NodeLostError, match=r"^gone$"):
        await done


def test_the_default_executor_is_local():
    assert ExecutorSettings().kind == "local"
    changed = ExecutorSettings.model_validate({"kind": "ray", "node": {"run_slots": 3}})
    assert (changed.kind, changed.node.run_slots) == ("ray", 3)
    with pytest.raises(ValidationError):
        ExecutorSettings.model_validate({"kind": "slurm"})


def test_executor_settings_pass_only_the_given_node_settings():
    given = ExecutorSettings.model_validate({"node": {"run_slots": 3}}).node
    assert given.model_dump(exclude_unset=True) == {"run_slots": 3}


def test_default_timeouts_detect_a_lost_node_within_10_seconds():
    assert RaySettings().lost_after_s + RaySettings().watch_s < 10

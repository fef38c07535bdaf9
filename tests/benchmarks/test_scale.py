"""The laws of the simulation of many nodes."""

import math
from dataclasses import replace

import pytest
from benchmarks.scale import MEASURED, Costs, Fleet, Simulation
from hypothesis import given, settings
from hypothesis import strategies as st

FREE = Costs(session_cpu_s=0.0, dispatch_s=0.0, lost_after_s=5.0)
SMALL = Fleet(nodes=4, slots=8, mean_s=100.0, costs=FREE)


@given(
    nodes=st.integers(2, 5),
    slots=st.integers(1, 6),
    sessions=st.integers(1, 80),
    mtbf_s=st.floats(200.0, 1e5),
    cpu_s=st.floats(0.0, 5.0),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_every_simulated_session_ends_once_when_nodes_die(
    nodes, slots, sessions, mtbf_s, cpu_s, seed
):
    costs = replace(MEASURED, session_cpu_s=cpu_s)
    fleet = Fleet(nodes, slots, mean_s=50.0, node_mtbf_s=mtbf_s, repair_s=60.0, costs=costs)
    seen = Simulation(fleet, sessions, seed=seed).run()
    assert (seen.ended, seen.made_twice) == (sessions, 0)
    assert 0 <= seen.slot_use <= 1 + 1e-9
    assert 0 <= seen.server_use <= 1 + 1e-9
    assert seen.took_s >= sessions * cpu_s
    assert seen.useful_s + seen.wasted_s <= nodes * slots * seen.took_s + 1e-6
    assert (seen.wasted_s > 0) <= (seen.lost_runs > 0) <= (seen.deaths > 0)


def test_the_cluster_simulation_is_determined_by_its_seed():
    fleet = replace(SMALL, node_mtbf_s=1000.0)
    once, again = (Simulation(fleet, 200, seed=3).run() for _ in range(2))
    assert once == again
    assert once != Simulation(fleet, 200, seed=4).run()


def test_a_simulated_cluster_without_failures_wastes_no_work_and_keeps_slots_busy():
    seen = Simulation(SMALL, 1000).run()
    assert (seen.deaths, seen.lost_runs, seen.wasted_share) == (0, 0, 0.0)
    assert seen.slot_use > 0.97
    assert seen.server_use == 0


def test_a_slow_server_limits_the_throughput_of_the_simulated_cluster():
    fleet = replace(SMALL, costs=replace(FREE, session_cpu_s=10.0))
    seen = Simulation(fleet, 500).run()
    assert seen.server_use == pytest.approx(1.0, abs=0.02)
    assert seen.took_s == pytest.approx(500 * 10.0, rel=0.1)
    assert seen.slot_use < 0.6
    assert seen.delay_s(0.5) > 10.0


def test_the_simulated_share_of_wasted_work_equals_its_formula():
    # A run of length R dies with rate r: r * E[R^2] / 2 is lost per run of E[R].
    fleet = replace(SMALL, nodes=20, node_mtbf_s=5000.0, repair_s=1.0)
    seen = Simulation(fleet, 6_000, seed=1).run()
    expected = fleet.mean_s * math.exp(fleet.sigma**2) / 2 / fleet.node_mtbf_s
    assert seen.wasted_share == pytest.approx(expected, rel=0.35)


def test_more_node_failures_waste_more_simulated_work():
    shares = [
        Simulation(replace(SMALL, node_mtbf_s=mtbf_s), 1000).run().wasted_share
        for mtbf_s in (math.inf, 20_000.0, 2_000.0)
    ]
    assert shares == sorted(shares)
    assert shares[0] == 0 < shares[2]


def test_a_simulation_without_sessions_has_zero_delay():
    assert Simulation(SMALL, 0).run().delay_s(0.99) == 0.0

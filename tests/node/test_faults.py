"""Batches in which things go wrong in many ways at once (`tests/node/faults.py`)."""

import pytest
from tests.node.faults import FAULTS, hold
from tests.sandbox.images import spec_of


@pytest.mark.timeout(180)
async def test_every_session_with_an_injected_fault_ends_with_the_cause_of_that_fault(tmp_path):
    # One of each kind: twenty sessions with a harness of bash, about two seconds of computing.
    await hold(tmp_path, len(FAULTS), 1, [{"backend": "local"}])


@pytest.mark.sandbox
@pytest.mark.timeout(600)
async def test_a_hundred_sessions_with_injected_faults_in_three_runtimes_leave_nothing_behind(
    tmp_path,
):
    runtimes = [{"backend": "local"}, await spec_of("bubblewrap"), await spec_of("docker")]
    await hold(tmp_path, 100, 2, runtimes)

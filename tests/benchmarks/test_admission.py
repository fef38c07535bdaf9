"""The attacks of `benchmarks/admission.py` on a real process; slow, so in `make long` only."""

import asyncio
import signal

import pytest
from benchmarks.admission import attacked, body_of, bomb, one_letter, values, within_bounds

from bridle.aio import Nursery
from bridle.cli.gateway import END_S

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("attack", "expected"), [(bomb, {413}), (one_letter, {413}), (values, {413, 200})]
)
async def test_oversized_requests_are_refused_while_other_calls_succeed_in_bounded_memory(
    attack, expected, tmp_path
):
    async with attacked(tmp_path) as (on, _):
        assert await on.post(on.bystander, body_of("go")) == 200
        before = on.memory("VmRSS")
        async with Nursery(print) as nursery:
            nursery.start(on.stand_by(), name="bystander")
            assert set(await attack(on)) == expected
            calls = on.calls
            async with asyncio.timeout(60):
                while on.calls == calls:  # noqa: ASYNC110 - another process counts
                    await asyncio.sleep(0.05)
        assert on.memory("VmHWM") < before + 200


async def test_sigterm_ends_a_gateway_in_the_middle_of_an_attack(tmp_path):
    async with attacked(tmp_path) as (on, process), Nursery(print) as nursery:
        attack = nursery.start(within_bounds(on), name="attack")
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(2 * END_S):
            assert await process.wait() in {0, 1}
        attack.cancel()

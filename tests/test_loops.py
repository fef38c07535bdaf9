import asyncio
import threading
import time

import pytest
from tests.loops import JumpingLoop


def test_the_jumping_event_loop_wakes_hour_long_sleeps_in_order_at_once():
    async def hours():
        loop, order = asyncio.get_running_loop(), []
        assert isinstance(loop, JumpingLoop)
        began = loop.time()

        async def wait(seconds):
            await asyncio.sleep(seconds)
            order.append((seconds, round(loop.time() - began)))

        with loop.jumping():
            async with asyncio.TaskGroup() as group:
                for seconds in (7200, 60, 3600):
                    group.create_task(wait(seconds))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3600):
                    await asyncio.sleep(7200)
            assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
            with pytest.raises(ZeroDivisionError):
                await asyncio.to_thread(lambda: 1 // 0)
        assert loop.time() - began >= 3 * 3600
        await asyncio.sleep(0.01)
        return order

    began = time.monotonic()
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(hours()) == [(60, 60), (3600, 3600), (7200, 7200)]
    assert time.monotonic() - began < 3600

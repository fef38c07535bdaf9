import asyncio

from bridle.aio import Condition
from bridle.server.service import BACKLOG, EventBus


async def test_a_notification_wakes_waiters_with_an_earlier_ticket_only():
    condition = Condition()
    ticket = condition.ticket()
    condition.notify_all()
    await condition.wait(ticket, 60)
    later = condition.ticket()
    assert not later.is_set()
    await condition.wait(later, 0.01)


async def test_subscribers_get_the_events_that_are_published_while_they_subscribe():
    bus = EventBus()
    bus.publish({"type": "before"})
    with bus.subscribe() as subscriber:
        bus.publish({"type": "a"})
        bus.publish({"type": "b"})
        assert [await subscriber.next(1), await subscriber.next(1)] == [
            {"type": "a"},
            {"type": "b"},
        ]
        assert await subscriber.next(0.001) is None
    bus.publish({"type": "after"})
    assert await subscriber.next(0.001) is None


async def test_a_slow_subscriber_gets_the_number_of_lost_events_and_delays_nobody():
    bus = EventBus()
    with bus.subscribe() as slow, bus.subscribe() as quick:
        for number in range(BACKLOG + 3):
            bus.publish({"n": number})
            assert await quick.next(1) == {"n": number}
        assert await slow.next(1) == {"type": "lost", "count": 3}
        assert await slow.next(1) == {"n": 3}


async def test_a_published_event_wakes_a_waiting_subscriber():
    bus = EventBus()
    with bus.subscribe() as subscriber:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(subscriber.next(30))
            await asyncio.sleep(0)
            bus.publish({"n": 1})
        assert waiting.result() == {"n": 1}

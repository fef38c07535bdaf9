import asyncio

from bridle.server.telling import BACKLOG, Broadcast, Pulse


async def test_a_beat_wakes_all_who_took_their_ticket_before():
    pulse = Pulse()
    ticket = pulse.ticket()
    pulse.beat()
    await pulse.after(ticket, 60)
    later = pulse.ticket()
    assert not later.is_set()
    await pulse.after(later, 0.01)


async def test_readers_hear_what_is_told_while_they_read():
    broadcast = Broadcast()
    broadcast.tell({"type": "before"})
    with broadcast.reading() as reader:
        broadcast.tell({"type": "a"})
        broadcast.tell({"type": "b"})
        assert [await reader.next(1), await reader.next(1)] == [{"type": "a"}, {"type": "b"}]
        assert await reader.next(0.001) is None
    broadcast.tell({"type": "after"})
    assert await reader.next(0.001) is None


async def test_a_slow_reader_is_told_how_much_it_lost_and_holds_nobody_up():
    broadcast = Broadcast()
    with broadcast.reading() as slow, broadcast.reading() as quick:
        for number in range(BACKLOG + 3):
            broadcast.tell({"n": number})
            assert await quick.next(1) == {"n": number}
        assert await slow.next(1) == {"type": "lost", "count": 3}
        assert await slow.next(1) == {"n": 3}


async def test_a_waiting_reader_is_woken():
    broadcast = Broadcast()
    with broadcast.reading() as reader:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(reader.next(30))
            await asyncio.sleep(0)
            broadcast.tell({"n": 1})
        assert waiting.result() == {"n": 1}

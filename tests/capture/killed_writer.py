"""Writes sessions to a capture file until it is killed; tells each id when it is acknowledged.

Run by `test_sqlite.py` as `python -m tests.capture.killed_writer FILE SEED`. With a third argument
it writes `full` where a commit fails, and goes on (`tests/sandbox/test_full_disk.py`).
"""

import asyncio
import os
import sys

from tests.capture.made import MadeSession

from bridle.capture.sqlite import SqliteStore
from bridle.errors import StoreError


async def write_for_ever(store, made):
    await store.open_session(made.record)
    last = None
    while True:
        exchange = made.call(last, new=40, output=25)
        last = exchange.exchange_id
        try:
            await store.commit(exchange, made.new_bodies[last])
        except StoreError:
            if len(sys.argv) < 4:
                raise
            os.write(1, b"full\n")
            last = None
            continue
        os.write(1, f"{made.session_id} {last} {exchange.prompt_digest.hex()}\n".encode())
        await store.deliver(made.deliveries[last])


async def main(path, seed):
    async with await SqliteStore.open(path) as store, asyncio.TaskGroup() as group:
        for number in range(4):
            made = MadeSession(f"{seed}-{number}", seed=number)
            group.create_task(write_for_ever(store, made))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))

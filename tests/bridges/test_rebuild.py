"""Rebuilding in bulk: the same bytes whatever the number of processes."""

import asyncio
import os

import pytest
from tests.capture.made import MadeSession

from bridle.bridges.parquet import BATCH, TrajectoryWriter, rebuild_all
from bridle.capture.sqlite import SqliteStore
from bridle.config import BuilderSpec
from bridle.errors import BridleError, ConfigError

SESSIONS = [f"s{number}" for number in range(3 * BATCH + 1)]


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    path = tmp_path_factory.mktemp("rebuild") / "capture.sqlite"

    async def write():
        async with await SqliteStore.open(path) as store:
            for number, name in enumerate(SESSIONS):
                made = MadeSession(name, seed=number)
                for turn in range(number % 4):
                    made.call(f"x{turn - 1}" if turn else None)
                made.end()
                await made.write(store)

    asyncio.run(write())
    return path


def written(folder, path, spec, workers):
    """The bytes of both files."""
    lines = b""
    with TrajectoryWriter(folder / f"{workers}.parquet") as parquet:
        for rebuilt in rebuild_all(path, SESSIONS, spec, workers=workers):
            lines += rebuilt.line + b"\n"
            parquet.add(rebuilt.rows)
    return lines, (folder / f"{workers}.parquet").read_bytes()


def test_rebuilding_with_one_or_two_processes_gives_the_same_bytes(capture, tmp_path):
    spec = BuilderSpec(strategy="per_request")
    assert written(tmp_path, capture, spec, 1) == written(tmp_path, capture, spec, 2)


def test_rebuilt_sessions_are_returned_in_the_requested_order(capture):
    wanted = SESSIONS[::-1]
    found = [r.line.count(b"exchange_ids") for r in rebuild_all(capture, wanted, None)]
    assert found == [int(int(name[1:]) % 4 > 0) for name in wanted]


def test_rebuilding_with_an_unknown_builder_raises_a_config_error(capture):
    with pytest.raises(ConfigError, match="unknown builder 'best'"):
        list(rebuild_all(capture, SESSIONS, BuilderSpec(strategy="best"), workers=1))


def kill(_graph, _marks):
    os._exit(9)


def test_a_killed_rebuild_process_raises_an_error(capture):
    spec = BuilderSpec(strategy="tests.bridges.test_rebuild:kill")
    with pytest.raises(BridleError, match="a worker process that rebuilt its trajectories died"):
        list(rebuild_all(capture, SESSIONS, spec, workers=2))

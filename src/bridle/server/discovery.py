"""Engines that a file or a URL names, which join and leave while the server runs.

The source has lines, JSON, the Prometheus file that verl writes for its servers, or is a router's
list of its workers. `KIND:` before it is the kind of servers that it names without one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import aiohttp
import structlog

from bridle.errors import BridleError, ConfigError
from bridle.node.base import SessionRunner
from bridle.types import without_user_info

log = structlog.get_logger()

READ_EVERY_S = 5.0
PATIENCE_S = 1800.0
"""Time that a server waits for the first engine: a trainer may load its model first."""
DRAIN_S = 30.0
"""Time that the calls of an engine that leaves may continue there."""
MOST_BYTES = 1 << 20
"""Limit of the file or answer that names engines; a longer one names none."""

ENGINE = re.compile(
    r"""(?:(?<![a-z])[a-z]+:)?https?://[^\s"',{}]+"""
    r"|(?<![\w./:-])(?:\[[0-9a-fA-F:]+\]|\w[\w.-]*):\d{1,5}(?![\w:])"
)

KIND = re.compile(r"sglang:(?=https?://|/|\.)")
"""Kind of a source's servers; `http://` alone means vLLM."""


def engines_in(text: str) -> list[str]:
    """Return the engines that a text names, each once, as `--engine` takes them."""
    found = [one if "://" in one else f"http://{one}" for one in ENGINE.findall(text)]
    return list(dict.fromkeys(found))


async def engines_named(source: str) -> list[str]:
    """Return the engines that a file or an `http(s)://` URL names now; none where it cannot be
    read.
    """
    if kind := KIND.match(source):
        found = await engines_named(source[kind.end() :])
        return [kind[0] + one if one.startswith("http") else one for one in found]
    try:
        if "://" not in source:
            return engines_in(await asyncio.to_thread(_read, Path(source)))
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as http,
            http.get(source) as answer,
        ):
            content = b""
            async for part in answer.content.iter_any():
                content = _short(content + part)
            return engines_in(content.decode())
    except (OSError, ValueError, TimeoutError, aiohttp.ClientError):
        return []


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return _short(file.read(MOST_BYTES + 1)).decode()


def _short(content: bytes) -> bytes:
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return content


async def first_named(source: str, stop: asyncio.Event) -> list[str]:
    """Wait until engines are named; none if `stop` is set before.

    `ConfigError` if none is named for half an hour.
    """
    log.info("waiting_for_engines", source=source)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not stop.is_set():
                if found := await engines_named(source):
                    return found
                with suppress(TimeoutError):
                    async with asyncio.timeout(READ_EVERY_S):
                        await stop.wait()
            return []
    except TimeoutError:
        raise ConfigError(f"{source} named no engine for {PATIENCE_S:g} s") from None


async def follow(
    source: str, workers: SessionRunner, there: Iterable[str], *, every_s: float = READ_EVERY_S
) -> None:
    """Have engines join and leave as `source` names them; runs until it is cancelled.

    `there` are those that serve already. A source that names none, or cannot be read, changes
    nothing. An engine that cannot serve, or cannot leave as the only one, is tried again each time.
    """
    joined, failing = set(there), set[str]()
    while True:
        await asyncio.sleep(every_s)
        if not (wanted := await engines_named(source)):
            continue
        failing -= joined.intersection(wanted)
        for engine in [one for one in wanted if one not in joined]:
            try:
                await workers.add_replica(engine)
            except BridleError as error:
                _note("engine_cannot_join", engine, error, failing)
                continue
            failing.discard(engine)
            joined.add(engine)
        for engine in joined - set(wanted):
            try:
                await workers.remove_replica(engine, DRAIN_S)
            except BridleError as error:
                known = [one["name"] for one in workers.policy()["engines"]]
                if not known or without_user_info(engine) in known:
                    _note("engine_cannot_leave", engine, error, failing)
                    continue
            failing.discard(engine)
            joined.discard(engine)


def _note(event: str, engine: str, error: BridleError, failing: set[str]) -> None:
    """Log the first of an engine's failures in a row."""
    if engine not in failing:
        log.warning(event, engine=without_user_info(engine), error=str(error))
    failing.add(engine)

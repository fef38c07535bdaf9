"""The `docker` command line, as the `docker` runtime needs it: calls, images, what was left behind.

Which daemon is spoken to is the command's own affair (`DOCKER_HOST`, `docker context`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from bridle.aio import Nursery
from bridle.errors import RuntimeFailure
from bridle.runtimes.owner import is_dead
from bridle.runtimes.process import Command, run_process

OWNER_LABEL = "bridle.owner"
SESSION_LABEL = "bridle.session"
CALL_S = 120.0
"""How long one call of the daemon may take; pulling an image may take as long as it takes."""
OUTPUT = 16 << 20
LOOK_S = 2.0
"""Between looks at how far a pull is."""
DONE = ("Pull complete", "Already exists")
CLIENT = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY")

_pulls: dict[str, asyncio.Lock] = {}
log = structlog.get_logger(__name__)


async def docker(
    words: Sequence[str],
    *,
    stdin: bytes | Path | None = None,
    stdout: Path | None = None,
    stdout_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = CALL_S,
    log: Path | None = None,
) -> str:
    """Run `docker WORDS` and return its stdout. `RuntimeFailure` carries its stderr."""
    result = await run_process(
        Command(
            argv=[program(), *words],
            cwd="/",
            env={**(env or {}), **client_environment()},
            stdin=stdin,
            stdout=stdout,
            stdout_limit=stdout_limit,
            timeout_s=timeout_s,
            output_limit=OUTPUT,
            log=log,
        )
    )
    if result.ok:
        return result.stdout.decode(errors="replace").strip()
    said = result.stderr.decode(errors="replace").strip()
    how = f"did not end within {timeout_s:g} s" if result.timed_out else said[-1000:]
    raise RuntimeFailure(f"docker {words[0]}: {how}")


def program() -> str:
    """Path of the `docker` command. `RuntimeFailure` says what to do where there is none."""
    found = shutil.which("docker")
    if found is None:
        message = (
            "the docker runtime needs the command docker on PATH, and a daemon it may speak to"
        )
        raise RuntimeFailure(message)
    return found


def client_environment() -> dict[str, str]:
    """Return the variables of this process that docker itself needs: daemon address and logins."""
    config = os.environ.get("DOCKER_CONFIG") or str(Path("~/.docker").expanduser())
    found = {name: os.environ[name] for name in CLIENT if name in os.environ}
    return {**found, "DOCKER_CONFIG": config, "PATH": os.environ.get("PATH", "/usr/bin:/bin")}


async def image_facts(image: str, *, build: str | None = None) -> dict[str, Any]:
    """Return the daemon's metadata of an image; a missing image is built or pulled, one at a time.

    `build` is a folder with a `Dockerfile` that it is built of; `None` = it is pulled.
    """
    async with _pulls.setdefault(image, asyncio.Lock()):
        with suppress(RuntimeFailure):
            return await _inspected(image)
        if build is not None:
            log.info("building an image", image=image, folder=build)
            try:
                words = ["build", "--quiet", "--force-rm", "--tag", image, build]
                await docker(words, timeout_s=None)
            except RuntimeFailure as error:
                message = f"image {image!r} cannot be built of {build}: {error}"
                raise RuntimeFailure(message) from error
            return await _inspected(image)
        log.info("pulling an image", image=image)
        try:
            await _pull(image)
        except RuntimeFailure as error:
            message = f"image {image!r} is not here and cannot be pulled: {error}"
            raise RuntimeFailure(message) from error
        log.info("pulled an image", image=image)
        return await _inspected(image)


async def _pull(image: str) -> None:
    """Pull an image; the log is told how far it is."""
    with tempfile.TemporaryDirectory(prefix="bridle-pull-") as folder:
        said = Path(folder, "said")
        async with Nursery(_raise_nothing) as nursery:
            nursery.start(_tell_layers(image, said), name="image-pull")
            await docker(["pull", image], timeout_s=None, log=said)


async def _tell_layers(image: str, said: Path) -> None:
    logged = (0, 0)
    while True:
        await asyncio.sleep(LOOK_S)
        found = layers(said.read_text(errors="replace")) if said.exists() else logged  # noqa: ASYNC240 - quick
        if found != logged:
            logged = found
            log.info("pulling an image", image=image, layers_done=found[0], layers=found[1])


def layers(said: str) -> tuple[int, int]:
    """Return how many layers of an image are complete, and of how many, from the output of `docker
    pull` so far.
    """
    states = dict(re.findall(r"^([0-9a-f]{12}): (.+?)\s*$", said, re.MULTILINE))
    return sum(state in DONE for state in states.values()), len(states)


def _raise_nothing(_error: BaseException) -> None:
    """Ignore an error of the progress report: it must not end the pull."""


async def _inspected(image: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(await docker(["image", "inspect", image]))[0]
    return facts


async def remove_left_behind() -> int:
    """Remove the containers of sessions whose process has ended; returns how many.

    Without a `docker` command or its daemon there are none.
    """
    if shutil.which("docker") is None:
        return 0
    try:
        form = f'{{{{.ID}}}} {{{{.Label "{OWNER_LABEL}"}}}}'
        words = ["ps", "--all", "--no-trunc", "--filter", f"label={OWNER_LABEL}", "--format", form]
        lines = (await docker(words, timeout_s=10)).splitlines()
    except RuntimeFailure:
        return 0
    dead = [line.split()[0] for line in lines if is_dead(line.split()[1])]
    if dead:
        with suppress(RuntimeFailure):  # another process removes it at the same moment
            await docker(["rm", "--force", "--volumes", *dead])
    return len(dead)

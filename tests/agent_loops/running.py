"""Runs one agent program against a gateway of its own and returns what was captured."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agent_loops.loops import Facts, Loop
from tests.gateway.house import house, scripted
from tests.gateway.test_images import Sighted

from bridle.capture.records import SessionCapture
from bridle.gateway.replay import Replay
from bridle.harnesses.bundles import bundles_dir, ensure
from bridle.harnesses.packaged import NODE, PYTHON, node_recipe, python_recipe

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
LOCKS = HERE / "locks"


async def command(loop: Loop, programs: Path) -> list[str]:
    """The command line of a program; its environment is installed if it is not there yet."""
    npm = loop.lock.startswith("npm")
    recipe = (
        node_recipe(loop.lock, "1", size_mb=600, locks=LOCKS)
        if npm
        else python_recipe(loop.lock, "1", size_mb=1000, locks=LOCKS)
    )
    bundle = await ensure(recipe, bundles_dir(), print)
    if npm:
        (programs / "node_modules").symlink_to(bundle / "node_modules")
    interpreter = bundle / (NODE if npm else PYTHON)
    return [str(interpreter), str(programs / loop.program), *loop.arguments]


@dataclass(frozen=True, slots=True)
class Run:
    """Output of a program, and what its session left."""

    code: int
    output: str
    stats: dict[str, Any]
    capture: SessionCapture

    @property
    def exchanges(self) -> list[Any]:
        return list(self.capture.exchanges)

    def facts(self) -> Facts:
        """The facts that a row of the table states."""
        roots = Counter(e.root_reason for e in self.exchanges if e.parent_id is None)
        return Facts(
            calls=self.stats["exchanges"],
            conversations=roots.pop("first", 0),
            forks=dict(roots),
            verbatim=self.stats["turns_verbatim"],
            shown=self.stats["turns_shown"],
            habits=self.stats["habits"],
            excluded=self.stats["tokens_excluded"],
        )

    def table(self) -> str:
        """One line for each exchange, for the report of a failure."""
        return "\n".join(
            f"{e.exchange_id} <- {e.parent_id} {e.root_reason} {e.kind} {e.finish_reason} {e.extra}"
            for e in self.exchanges
        )


async def run_program(
    argv: Sequence[str], home: Path, loop: Loop, replay: Replay | None = None
) -> Run:
    """Run `argv` to its end with the URLs and the key of a new session in its environment."""
    turns = loop.script[0]["turns"]
    engine = Sighted(*turns) if loop.sees else scripted(conversations=loop.script)
    async with house(engine=engine) as place:
        caller = await place.session(metadata={"harness": loop.harness}, replay=replay)
        urls = caller.handle.base_urls
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "KEY": caller.handle.key,
            "URL_OPENAI": urls["openai"],
            "URL_ANTHROPIC": urls["anthropic"],
            "URL_GOOGLE": urls["google"],
        }
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=home,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        status, trajectory = await place.control("GET", f"/sessions/{caller.session_id}/trajectory")
        assert status == 200, (trajectory, output.decode())
        stats = trajectory["metadata"]["stats"]
        capture = place.store.read(caller.session_id)
        return Run(process.returncode or 0, output.decode(), stats, capture)

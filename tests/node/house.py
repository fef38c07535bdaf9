"""A whole node for tests: real gateway, scripted engine, real processes, a run folder."""

import sys
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path

from tests.conformance.memory import MemoryStore

from bridle.config import AgentSpec, Budgets, EvaluatorSpec, Task
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.node.base import Event, SessionChanged
from bridle.node.local import LocalNode, NodeSettings
from bridle.node.results import RunFolder
from bridle.prompting.renderer import load_renderer
from bridle.runtimes.process import Leaders, members
from bridle.testing import scripted_engine

AGENT = f"{sys.executable} -S {Path(__file__).with_name('agent.py')}"

BEAT = "while true; do echo x >> {file}; sleep 0.02; done"
"""A process that shows in a file that it lives."""

WORK: list[dict[str, object]] = [{"shell": ["echo done > out.txt"]}, {"content": "It is done."}]
"""A script that writes a file in one turn and answers in the next."""


@lru_cache
def renderer():
    return load_renderer("builtin")


def task(command=AGENT, **changes):
    """A task for a command line; `budgets`, `evaluator`, `agent` are merged over small ones."""
    budgets = {"init_s": 60, "agent_s": 60, "evaluate_s": 60, **changes.pop("budgets", {})}
    agent = {"harness": "command", "command": command, **changes.pop("agent", {})}
    return Task(
        task_id=changes.pop("task_id", "t-1"),
        instruction="Write done to out.txt.",
        budgets=Budgets(**budgets),
        agent=AgentSpec(**agent),
        evaluator=EvaluatorSpec(**changes.pop("evaluator", {})),
        **changes,
    )


def checked(command="grep -q done out.txt", **more):
    """An evaluator spec that runs a command."""
    return {"strategy": "command", "config": {"command": command}, **more}


@asynccontextmanager
async def a_node(tmp_path, *turns, store=None, settings=None, engine=None, **gateway):
    """A node in `tmp_path` whose engine plays `turns`; `node.seen` gets its events."""
    (tmp_path / "scratch").mkdir(exist_ok=True)
    store = store or MemoryStore()
    with RunFolder.create(tmp_path / "run", config={}) as folder:
        async with (
            GatewayServer(
                engine=engine or scripted_engine(list(turns or WORK)),
                renderer=renderer(),
                store=store,
                settings=GatewaySettings(**gateway),
            ) as open_gateway,
            LocalNode(
                gateway=open_gateway,
                store=store,
                folder=folder,
                settings=NodeSettings(**{"limit_grace_s": 0.2, **(settings or {})}),
                scratch_base=tmp_path / "scratch",
            ) as node,
        ):
            seen: list[Event] = []
            with node.events.listening(seen.append):
                node.seen = seen  # type: ignore[attr-defined]  # for the tests
                yield node


def statuses(node):
    """The statuses that were reported, in order."""
    return [str(event.status) for event in node.seen if isinstance(event, SessionChanged)]


def nothing_lives(session_id):
    """Return whether no process of a session is left."""
    return members((f"BRIDLE_SESSION={session_id}".encode(),), Leaders()) == set()

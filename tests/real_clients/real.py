"""Runs an unmodified program through a real gateway with a scripted engine, for the suite's tests.

Every program runs in a network with nothing but the gateway (`alone`). The script is the same for
each: one call of the program's own shell tool, then two at once, then a last word. What each test
then asks of the result is in `did_its_work`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from tests.real_clients.alone import BACKEND
from tests.real_clients.shown import Shown

from bridle.capture.sqlite import SqliteStore
from bridle.config import AgentSpec, EvaluatorSpec, RuntimeSpec, Task
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.node.local import LocalNode, NodeSettings
from bridle.node.results import RunFolder
from bridle.prompting.renderer import load_renderer
from bridle.testing import scripted_engine

AT_ONCE = 3
"""Programs that work at the same time; each is busy half of its time."""

Case = TypeVar("Case", bound=Hashable)
Outcome = TypeVar("Outcome")

MADE = (
    'test "$(cat made.txt)" = hello && test "$(cat routes.txt)" = 1'
    ' && test "$(cat one.txt)" = 1 && test "$(cat two.txt)" = 2'
)
"""The shell tool's commands were run, in a network without routes (one line is the heading)."""

TURNS: list[dict[str, Any]] = [
    {
        "reasoning": "A file is asked for.",
        "content": "I make it.",
        "shell": ["echo hello > made.txt; wc -l < /proc/net/route > routes.txt"],
    },
    {"content": "Two more.", "shell": ["echo 1 > one.txt", "echo 2 > two.txt"]},
    {"content": "All three files are there."},
]


@asynccontextmanager
async def a_node(
    tmp_path,
    *,
    conversations=(),
    turns=TURNS,
    context_length=131_072,
    door=None,
    engine=None,
    live=False,
    **gateway,
):
    """A node with a real gateway whose engine plays `turns` where no conversation fits.

    Programs reach it through `door`, if there is one. `engine` is one that plays by itself, with
    the shipped tokenizer; then nothing else says what it plays. With `live` replies leave as they
    are sampled, and none ends before its client was sent some of it.
    """
    if door is not None:
        gateway["public_url"] = door.url
    engine = engine or scripted_engine(
        list(turns), conversations=list(conversations), context_length=context_length
    )
    shown = Shown(engine) if live else None
    if shown is not None:
        engine, gateway["stream"] = shown, "live"
    (tmp_path / "scratch").mkdir()
    async with await SqliteStore.open(tmp_path / "capture.sqlite") as store:
        with RunFolder.create(tmp_path / "run", config={}) as folder:
            async with (
                GatewayServer(
                    engine=engine,
                    renderer=load_renderer("builtin"),
                    store=store,
                    settings=GatewaySettings(**gateway),
                ) as open_gateway,
                LocalNode(
                    gateway=open_gateway,
                    store=store,
                    folder=folder,
                    settings=NodeSettings(),
                    scratch_base=tmp_path / "scratch",
                ) as node,
            ):
                if shown is not None:
                    shown.gateway = open_gateway
                if door is not None:
                    door.upstream = urlsplit(open_gateway.control_url).port
                yield node


async def run(tmp_path, harness, *, check=MADE, agent=None, runtime=None, **house):
    """One session of `harness`; returns its result and the exchanges that it left."""
    task = Task(
        task_id=f"real-{harness}",
        instruction='Make the files "made.txt", one.txt and two.txt.',
        agent=AgentSpec(harness=harness, **(agent or {})),
        runtime=RuntimeSpec(**{"backend": BACKEND, **(runtime or {})}),
        evaluator=EvaluatorSpec(strategy="command", config={"command": check}),
        task_dir=str(tmp_path),
    )
    async with a_node(tmp_path, **house) as node:
        result = await node.run(task)
        return result, node.store.read(result.session_id).exchanges


def did_its_work(result, exchanges, *, calls=3):
    """The run succeeded, every call extends the one before, and all that was sampled trains."""
    assert (result.status, result.cause, result.error) == ("COMPLETED", None, None), result.error
    assert (result.reward, result.exit_code, result.signal) == (1.0, 0, None)
    stats = result.trajectory.metadata["stats"]
    assert (stats["exchanges"], stats["roots"], stats["branches"]) == (calls, 1, 0), [
        (e.kind, e.root_reason, e.parent_id) for e in exchanges
    ]
    assert stats["merge_ratio"] == (1.0 if calls > 1 else None)
    assert stats["unknown"] == {}
    assert stats["breaks"] == []
    assert stats["tokens_captured"] == stats["tokens_trained"]
    assert [len(trace.exchange_ids) for trace in result.trajectory.traces] == [calls]


def chosen(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """Values of the parameter `name` with which tests of the asking module are to run."""
    found = set()
    for item in request.session.items:
        made = getattr(item, "callspec", None)
        if item.path == request.path and made is not None and name in made.params:
            found.add(made.params[name])
    return found


async def at_once(
    works: Mapping[Case, Callable[[], Awaitable[Outcome]]],
) -> dict[Case, Future[Outcome]]:
    """Do the works, `AT_ONCE` at a time; each has a result or an exception of its own."""
    outcomes: dict[Case, Future[Outcome]] = {case: Future() for case in works}
    room = asyncio.Semaphore(AT_ONCE)

    async def do(case: Case) -> None:
        async with room:
            try:
                outcomes[case].set_result(await works[case]())
            except Exception as error:  # noqa: BLE001 - reported by the case's own test
                outcomes[case].set_exception(error)

    async with asyncio.TaskGroup() as group:
        for case in works:
            group.create_task(do(case))
    return outcomes

"""Many sessions of real programs beside each other in one node, each with its own script.

A session's instruction ends with a mark of its own, by which its conversations of the script are
found. Its work folder is also known under a path that the script can name beforehand, because many
file tools take absolute paths only.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.real_clients.alone import BACKEND
from tests.real_clients.real import a_node

from bridle.capture.records import Exchange
from bridle.config import Action, AgentSpec, Budgets, EvaluatorSpec, RuntimeSpec, Task
from bridle.engines.base import Engine
from bridle.node.results import SessionResult
from bridle.types import Kind

ONE_DIALECT = frozenset(
    (
        "aider",
        "claude_agent_sdk",
        "claude_code",
        "codex",
        "gemini_cli",
        "google_adk",
    )
)
"""Programs whose wire format is no setting."""

CLINE_GOOGLE = "gemini-3-bridle"
"""With this dialect Cline gives tools to no other name."""


Script = Callable[[str, str], list[dict[str, Any]]]
"""Mark and folder of a session -> its conversations."""


@dataclass(frozen=True)
class Run:
    """One session to run: who, and what its model says."""

    harness: str
    dialect: str
    script: Script
    check: str
    """A command that exits 0 in the work folder if the work was done."""
    settings: dict[str, Any] = field(default_factory=dict)
    budgets: Budgets = field(default_factory=lambda: Budgets(agent_s=1500))
    """Long: many programs at once, with long prompts, on a machine that may be busy."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.harness}-{self.dialect}"


@dataclass(frozen=True)
class Ran:
    """Result of a run."""

    run: Run
    result: SessionResult
    exchanges: Sequence[Exchange]

    @property
    def stats(self) -> dict[str, Any]:
        """The law numbers."""
        return self.result.trajectory.metadata["stats"]

    def table(self) -> str:
        """The conversation graph, a line per exchange, for messages of failed assertions."""
        place = {exchange.exchange_id: i for i, exchange in enumerate(self.exchanges)}
        lines = [
            f"{i} {e.kind} parent={place.get(e.parent_id or '')} "
            f"continues={place.get(e.continues or '')} {e.root_reason} {e.prompt_length}"
            for i, e in enumerate(self.exchanges)
        ]
        return "\n".join([f"{self.run.name}: {self.result.status} {self.result.error}", *lines])

    def roots(self) -> list[list[Exchange]]:
        """The exchanges of each root, in order of commit, the root itself first."""
        trees: dict[str, list[Exchange]] = {}
        owner: dict[str, str] = {}
        for exchange in self.exchanges:
            root = owner[exchange.parent_id] if exchange.parent_id else exchange.exchange_id
            owner[exchange.exchange_id] = root
            trees.setdefault(root, []).append(exchange)
        return list(trees.values())


async def side_by_side(
    tmp_path: Any,
    runs: Sequence[Run],
    *,
    context_length: int = 131_072,
    play: Callable[[list[dict[str, Any]]], Engine] | None = None,
    **gateway: Any,
) -> list[Ran]:
    """Run them all; results in the order of `runs`, none where the draw left no program.

    `play` gives the engine that plays the conversations; `None` = the scripted one, of that context
    length. `gateway` are further settings of the gateway.
    """
    if not runs:
        return []
    places = tmp_path / "places"
    places.mkdir()
    marks = [f"[work-{number}]" for number in range(len(runs))]
    scripts = [
        conversation
        for number, run in enumerate(runs)
        for conversation in run.script(marks[number], f"{places}/{number}")
    ]
    sessions: list[asyncio.Task[SessionResult]] = []
    async with a_node(
        tmp_path,
        conversations=scripts,
        turns=(),
        context_length=context_length,
        engine=None if play is None else play(scripts),
        **gateway,
    ) as node:
        async with asyncio.TaskGroup() as group:
            for number, run in enumerate(runs):
                task = _task(run, number, marks[number], places)
                sessions.append(group.create_task(node.run(task)))
        results = [session.result() for session in sessions]
        captured = [node.store.read(result.session_id).exchanges for result in results]
    return [Ran(*ran) for ran in zip(runs, results, captured, strict=True)]


def _task(run: Run, number: int, mark: str, places: Any) -> Task:
    api = {} if run.harness in ONE_DIALECT else {"api": run.dialect}
    agent = AgentSpec(harness=run.harness, settings={**api, **run.settings})
    if run.name == "cline-google":
        agent = agent.model_copy(update={"model_name": CLINE_GOOGLE})
    link = Action(type="exec", command=f'ln -s "$PWD" {places}/{number}')
    return Task(
        task_id=f"{run.name}-{number}",
        instruction=f"Do the work. {mark}",
        agent=agent,
        runtime=RuntimeSpec(backend=BACKEND, prepare=(link,)),
        evaluator=EvaluatorSpec(strategy="command", config={"command": run.check}),
        budgets=run.budgets,
    )


def succeeded(ran: Ran) -> None:
    """The work is done, the exit true, and every sampled token is accounted for."""
    result, stats = ran.result, ran.stats
    assert (result.status, result.cause, result.exit_code) == ("COMPLETED", None, 0), ran.table()
    assert result.reward == 1.0, ran.table()
    excluded = sum(stats["tokens_excluded"].values())
    assert stats["tokens_captured"] == stats["tokens_trained"] + excluded
    assert stats["unknown"] == {}
    trained = Counter(e for trace in result.trajectory.traces for e in trace.exchange_ids)
    assert set(trained) == {exchange.exchange_id for exchange in ran.exchanges}, ran.table()
    assert {str(exchange.dialect) for exchange in ran.exchanges} == {ran.run.dialect}


def never_forked(ran: Ran, *, roots: dict[Kind, int]) -> None:
    """So many conversations of each kind, each append-only and of one kind, all of it trained."""
    trees = ran.roots()
    assert Counter(tree[0].kind for tree in trees) == Counter(roots), ran.table()
    assert all(e.kind is tree[0].kind for tree in trees for e in tree), ran.table()
    assert {tree[0].root_reason for tree in trees} == {"first"}, ran.table()
    stats = ran.stats
    assert (stats["roots"], stats["branches"]) == (len(trees), 0), ran.table()
    assert (stats["merge_ratio"], stats["breaks"]) == (1.0, []), ran.table()
    assert (stats["tokens_excluded"], stats["traces"]) == ({}, len(trees)), ran.table()

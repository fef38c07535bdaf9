"""Unmodified programs with a model that is slow, fails, or breaks off in mid-reply.

One test, because its sessions mostly wait: they run side by side, and each records the cells of
docs/harnesses.md that it tried. A row's faults are survived one after another in one session;
a fault that ends the program has a session of its own.
"""

import asyncio
import itertools
from dataclasses import dataclass

import pytest
from tests.real_clients.door import Cut, Door
from tests.real_clients.matrix import (
    FAILS,
    FORKS,
    NOTES,
    OWN_WAIT,
    Case,
    cases,
    faulty_steps,
    wanted,
)
from tests.real_clients.real import AT_ONCE, run

from bridle.types import Cause, Dialect

pytestmark = [pytest.mark.harnesses, pytest.mark.core, pytest.mark.timeout(1800)]

ASLEEP = 20
"""Sessions of a slow model that sleep beside those that work."""
SLOW_S = 90
FAULTS = ("500", "429", "late_error", "cut_before", "cut_after")
RETRY_AFTER_S = 1.0
ROWS = {case.row for case in cases()}
LOST_BY_FAULTS = {"superseded", "cut", "abandoned"}
"""Why a token of these sessions may not train."""


@dataclass(frozen=True)
class Trial:
    """One session: faults of one row that it goes through."""

    case: Case
    columns: tuple[str, ...]

    def __str__(self):
        return f"{self.case} {'+'.join(self.columns)}"


def trials():
    for case in filter(lambda case: wanted(case.harness), cases()):
        fatal = [column for column in FAULTS if (case.row, column) in FAILS]
        without = [column for column in FAULTS if column in case.without]
        together = tuple(column for column in FAULTS if column not in {*fatal, *without})
        alone = ("slow", *fatal)
        if case.harness == "aider":  # it makes one call
            alone, together = (*alone, *together), ()
        yield from (Trial(case, (column,)) for column in alone)
        if case.harness == "openclaw":  # its retries share one time window, and wait ever longer
            yield from (Trial(case, (column,)) for column in together)
        elif together:
            yield Trial(case, together)
    for dialect in Dialect:  # the wire formats for which it has no row
        case = Case("openclaw", str(dialect), {"api": str(dialect)})
        if wanted(case.harness) and case.row not in ROWS:
            yield from (Trial(case, (column,)) for column in ("500", "429", "late_error"))


async def go_through(trial, tmp_path):
    """The session of a trial: its result, its exchanges, and the door they went through."""
    case, columns = trial.case, trial.columns
    names = ("start", *columns)
    shows = "{}.txt" if case.harness == "aider" else "did-{}"
    cuts = [
        Cut(shows.format(before).encode(), name.removeprefix("cut_"))
        for before, name in itertools.pairwise(names)
        if name.startswith("cut_")
    ]
    async with Door(*cuts) as door:
        result, exchanges = await run(
            tmp_path,
            case.harness,
            agent=case.agent,
            check=" && ".join(f"test -e {name}.txt" for name in names),
            turns=[],
            conversations=faulty_steps(case.harness, columns, slow_s=SLOW_S),
            door=door,
        )
    assert len(door.made) == len(cuts)
    return result, exchanges, door


def nothing_is_lost(result, exchanges, case):
    stats = result.trajectory.metadata["stats"]
    excluded = stats["tokens_excluded"]
    assert stats["tokens_captured"] == stats["tokens_trained"] + sum(excluded.values()), stats
    assert excluded.keys() <= LOST_BY_FAULTS, stats
    assert stats["unknown"] == {}
    reasons = {exchange.root_reason for exchange in exchanges} - {None}
    reasons |= {found["reason"] for found in stats["breaks"]}
    assert reasons <= {"first", *FORKS.get(case.row, ())}, stats


async def survived(trial, tmp_path):
    result, exchanges, door = await go_through(trial, tmp_path)
    assert (result.status, result.error, result.reward) == ("COMPLETED", None, 1.0)
    assert (result.exit_code, result.signal) == (0, None)
    nothing_is_lost(result, exchanges, trial.case)
    if "429" in trial.columns and trial.case.row not in OWN_WAIT:
        assert door.waits[0] >= 0.95 * RETRY_AFTER_S, door.waits


async def gave_up(trial, tmp_path, exit_code):
    result, exchanges, _ = await go_through(trial, tmp_path)
    assert (result.status, result.exit_code) == ("ERROR", exit_code)
    assert result.reward is None or result.cause is not Cause.INFRASTRUCTURE
    nothing_is_lost(result, exchanges, trial.case)


def of_rows(cell):
    """Records a cell, if the page has its row."""

    def note(row, *result):
        if row in ROWS:
            cell(*row, *result)

    return note


async def test_each_harness_survives_or_reports_model_faults_without_losing_tokens(tmp_path, cell):
    note = of_rows(cell)
    working, sleeping = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(ASLEEP)
    failures = []

    async def tried(trial, folder):
        row = trial.case.row
        failing = FAILS.get((row, trial.columns[0]))
        async with sleeping if "slow" in trial.columns else working:
            folder.mkdir()
            try:
                if failing is None:
                    await survived(trial, folder)
                else:
                    await gave_up(trial, folder, failing.exit_code)
            except Exception as error:  # noqa: BLE001 - each cell has its own result
                failures.append(f"{trial}: {type(error).__name__}: {error}")
                for column in trial.columns:
                    note(row, column, "broken")
                return
        for column in trial.columns:
            if failing is None:
                note(row, column, "ok", NOTES.get((row, column), ""))
            else:
                note(row, column, "fails", failing.note)

    async with asyncio.TaskGroup() as group:
        for number, trial in enumerate(trials()):
            group.create_task(tried(trial, tmp_path / str(number)))
    for case in cases():
        for column, why in case.without.items():
            cell(*case.row, column, "n/a", why)
    assert not failures, "\n".join(["", *failures])

"""Mixed batches of sessions with injected faults: what each must come to, and that all is gone.

The harness is a bash script that speaks HTTP, so that it runs in any runtime.
"""

import random
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.conformance.memory import MemoryStore
from tests.node.house import a_node, checked, nothing_lives, statuses, task

from bridle.config import Action, Limits, RuntimeSpec
from bridle.errors import StoreError
from bridle.node.base import SessionChanged
from bridle.node.local import LocalExecutor
from bridle.node.session import TRANSITIONS
from bridle.runtimes.docker import SESSION_LABEL, docker
from bridle.testing import scripted_engine
from bridle.types import Cause, SessionStatus

CLIENT = r"""
turn() { # turn WORDS: asks the model; fails if it does not answer
  local rest=${OPENAI_BASE_URL#http://}; local host=${rest%%/*} path=/${rest#*/} line
  local body='{"model": "m", "messages": [{"role": "user", "content": "'$1'"}]}'
  exec 3<>"/dev/tcp/${host%:*}/${host#*:}" || return 1
  printf 'POST %s/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n' "$path" >&3
  printf 'Authorization: Bearer %s\r\nContent-Type: application/json\r\n' "$OPENAI_API_KEY" >&3
  printf 'Content-Length: %s\r\n\r\n%s' "${#body}" "$body" >&3
  read -r line <&3; cat <&3 >/dev/null; [ "${line:9:3}" = 200 ]
}
"""

ENGINE: dict[str, Any] = {
    "conversations": [{"when": {"user_contains": "broken"}, "turns": [{"fault": 500}]}],
    "context_length": 2000,
}


@dataclass(frozen=True)
class Fault:
    """One kind of session in a batch."""

    script: str
    status: str
    cause: Cause | None
    reward: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    cancel: bool = False
    """Whether somebody cancels it when it runs."""


def failing(command):
    return (Action(type="exec", command=command),)


_WORK = "turn hello && echo done > out.txt"
_SHORT = {"agent_s": 1.0}
_DAEMON = "(setsid sleep 3600 </dev/null >/dev/null 2>&1 &)"
_TIMEOUT = ("TIMEOUT", Cause.TIMEOUT)

FAULTS: dict[str, Fault] = {
    "none": Fault(_WORK, "COMPLETED", None, 1.0),
    "wrong": Fault("turn hello", "COMPLETED", None, 0.0),
    "no-workdir": Fault(f'{_WORK}; rm -rf "$PWD"; true', "COMPLETED", None, 0.0),
    "loud": Fault(f"{_WORK}; head -c 8000000 /dev/zero", "COMPLETED", None, 1.0),
    "daemon": Fault(f"{_WORK}; {_DAEMON}", "COMPLETED", None, 1.0),
    "crash": Fault(f"{_WORK}; exit 3", "ERROR", Cause.HARNESS_CRASH, 1.0),
    "signal": Fault(f"{_WORK}; kill -KILL $$", "ERROR", Cause.HARNESS_CRASH, 1.0),
    "silent": Fault("true", "ERROR", Cause.HARNESS_NO_CALL),
    "deaf": Fault(
        f"{_WORK}; turn \"$(printf '%09000d' 0)\"; exit 0", "ERROR", Cause.HARNESS_MODEL_ERROR, 1.0
    ),
    "engine": Fault(f"{_WORK}; turn broken; exit 0", "ERROR", Cause.INFRASTRUCTURE),
    "slow": Fault(f"{_WORK}; sleep 3600", *_TIMEOUT, 1.0, changes={"budgets": {"agent_s": 4.0}}),
    "stubborn": Fault(
        f"trap '' TERM; {_DAEMON}; while true; do sleep 1; done",
        *_TIMEOUT,
        changes={"budgets": _SHORT},
    ),
    "greedy": Fault(
        "for n in 1 2 3 4; do turn $n || exit 0; done",
        "TIMEOUT",
        Cause.LIMIT,
        0.0,
        changes={"limits": Limits(max_turns=2)},
    ),
    "prepare": Fault(_WORK, "ERROR", Cause.INFRASTRUCTURE, changes={"prepare": failing("exit 9")}),
    "endless-init": Fault(
        _WORK,
        "ERROR",
        Cause.TIMEOUT,
        changes={"prepare": failing(f"{_DAEMON}; sleep 3600"), "budgets": {"init_s": 2.0}},
    ),
    "evaluator": Fault(
        _WORK, "ERROR", Cause.EVALUATOR, changes={"evaluator": checked("no-such-checker")}
    ),
    "endless-evaluator": Fault(
        _WORK,
        "ERROR",
        Cause.EVALUATOR,
        changes={"evaluator": checked("sleep 3600"), "budgets": {"evaluate_s": 1.0}},
    ),
    "fresh": Fault(
        _WORK,
        "ERROR",
        Cause.EVALUATOR,
        changes={
            "evaluator": checked(),
            "eval_prepare": failing("exit 9"),
        },
    ),
    "cancelled": Fault(f"{_WORK}; sleep 3600", "CANCELLED", Cause.CANCELLED, cancel=True),
    "store": Fault(_WORK, "ERROR", Cause.INFRASTRUCTURE),
}


class FaultyStore(MemoryStore):
    """Cannot take the sessions of tasks called `store`."""

    async def open_session(self, session):
        if (session.task_id or "").startswith("store."):
            raise StoreError("no space left")
        await super().open_session(session)


def a_task(name, number, runtime):
    fault = FAULTS[name]
    changes = {"evaluator": checked(), "budgets": {}, **fault.changes}
    steps = {key: changes.pop(key) for key in ("prepare", "eval_prepare") if key in changes}
    budgets = {"init_s": 120.0, "agent_s": 120.0, "evaluate_s": 120.0, **changes.pop("budgets")}
    return task(
        f"bash -c {shlex.quote(CLIENT + fault.script)}",
        task_id=f"{name}.{number}",
        runtime=RuntimeSpec(**{**runtime, **steps}),
        budgets=budgets,
        **changes,
    )


async def hold(tmp_path, sessions, seed, runtimes):
    """Run a batch of `sessions` with faults drawn by `seed` over `runtimes` and hold it against
    what each must come to; every kind is drawn before one is drawn again."""
    draw = random.Random(seed)
    names: list[str] = []
    while len(names) < sessions:
        names += draw.sample(sorted(FAULTS), len(FAULTS))
    tasks = [a_task(name, n, draw.choice(runtimes)) for n, name in enumerate(names[:sessions])]
    settings = {"run_slots": 6}
    engine = scripted_engine([{"content": "hello"}], **ENGINE)
    async with a_node(tmp_path, engine=engine, store=FaultyStore(), settings=settings) as node:

        def cancel(event):
            if isinstance(event, SessionChanged) and event.status is SessionStatus.RUNNING:
                name = event.task_id.partition(".")[0]
                if FAULTS[name].cancel:
                    node.cancel(event.session_id)

        with node.events.listening(cancel):
            async with LocalExecutor(node).run(tasks) as results:
                ended = {result.task_id: result async for result in results}
        summary = node.folder.finish(node.store)
        _each_has_its_cause(tasks, ended)
        _each_is_accounted_for(node, tasks, ended, summary)
        assert node.free == node.capacity
        assert not node.session_ids()
        for result in ended.values():
            with suppress(KeyError):  # it was never opened
                assert node.gateway.facts(result.session_id).sealed
            assert nothing_lives(result.session_id), result.task_id
    assert list((tmp_path / "scratch").iterdir()) == []
    if any(runtime["backend"] == "docker" for runtime in runtimes):
        assert not await containers() & {result.session_id for result in ended.values()}


def _each_has_its_cause(tasks, ended):
    wrong = {}
    for one in tasks:
        fault, result = FAULTS[one.task_id.partition(".")[0]], ended[one.task_id]
        if (result.status, result.cause, result.reward) != (
            fault.status,
            fault.cause,
            fault.reward,
        ):
            wrong[one.task_id] = (result.status, result.cause, result.reward, result.error)
    assert not wrong, wrong


def _each_is_accounted_for(node, tasks, ended, summary):
    assert sorted(ended) == sorted(one.task_id for one in tasks)
    assert {entry["task_id"]: entry["status"] for entry in summary["sessions"]} == {
        name: result.status for name, result in ended.items()
    }
    assert len(node.folder.trajectories.read_text().splitlines()) == len(tasks)
    outcome: dict[str, list[SessionStatus]] = {}
    for event in node.seen:
        if isinstance(event, SessionChanged):
            outcome.setdefault(event.task_id, []).append(event.status)
    assert outcome.keys() == ended.keys()
    for way in outcome.values():
        assert all(after in TRANSITIONS[at] for at, after in pairwise(way))
        assert not TRANSITIONS[way[-1]]
    assert len(statuses(node)) == sum(map(len, outcome.values()))


async def containers():
    """The sessions that this machine's daemon has a container of."""
    form = f'{{{{.Label "{SESSION_LABEL}"}}}}'
    return set((await docker(["ps", "--all", "--format", form])).split())

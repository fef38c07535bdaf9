"""Run folders for the dashboard: sessions through a real gateway, and made-up large ones.

`HOSTILE` is in every place where somebody else's text can be: messages, calls, tool results,
task ids, errors, file names, logs.
"""

import asyncio
import json
import time
from typing import Any

from starlette.testclient import TestClient
from tests.capture.made import MadeSession
from tests.gateway.house import SHELL_TOOL, house, tool_result, user

from bridle.capture.records import Outcome
from bridle.capture.sqlite import SqliteStore
from bridle.dashboard.app import make_app
from bridle.dashboard.folder import FolderSource
from bridle.types import FinishReason, Kind, VersionSpan

HOSTILE = '<script>alert("x")</script><img src=//evil.example/x onerror=alert(1)>\u202e"\'&lt;'
FILE = "</script><script>alert(1)</script>\"'\u202e javascript:alert(1).svg"
"""A name of a kept file, which is a picture with a script."""
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><script>document.title = "ran"</script></svg>'
SYSTEM = {"role": "system", "content": "You fix tests."}


def script(word):
    """Return what the scripted engine says: two calls, then an answer; all of it hostile."""
    call = {"name": "bash", "arguments": {"command": f"echo {HOSTILE}"}}
    return {
        "when": {"user_contains": word},
        "turns": [
            {"reasoning": f"Look first. {HOSTILE}", "tool_calls": [call]},
            {"tool_calls": [call]},
            {"content": f"Done. {HOSTILE}"},
        ],
    }


async def talk(caller, word):
    """A session of three turns, a branch of the last one, and a fork with other tools."""
    messages = [SYSTEM, user(f"{word}: fix it {HOSTILE}")]
    for _ in range(2):
        said = await caller.ask(messages, tools=[SHELL_TOOL])
        messages += [said, tool_result(said["tool_calls"][0], f"result {HOSTILE}")]
    await caller.ask(messages, tools=[SHELL_TOOL])
    await caller.ask([*messages[:-1], {**messages[-1], "content": "other"}], tools=[SHELL_TOOL])
    other = {**SHELL_TOOL, "function": {**SHELL_TOOL["function"], "name": "shell"}}
    await caller.ask([*messages, user("again")], tools=[other])


def metadata(index, **more):
    return {
        "sample_index": index,
        "harness": "mini_swe_agent",
        "harness_version": "2.4.6",
        "runtime": "local",
        "contains": False,
        **more,
    }


async def captured(folder, *, rewards=(1.0, 0.0, None)):
    """A run folder of one group whose sessions have these rewards; `None` = a failed evaluator.

    Returns the ids of its sessions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = await SqliteStore.open(folder / "capture.sqlite")
    names = []
    turns = {"conversations": [script("one")]}
    async with store, house(store=store, engine=_engine(turns)) as made:
        for index, reward in enumerate(rewards):
            caller = await made.session(f"one.{index}", task_id="one", metadata=metadata(index))
            await talk(caller, "one")
            facts = await made.gateway.seal(caller.session_id)
            assert facts.calls == 5
            failed: Any = {"cause": "evaluator", "error": f"it broke {HOSTILE}"}
            log = folder / "sessions" / caller.session_id / "stdout.log"
            log.parent.mkdir(parents=True)
            log.write_text(HOSTILE)
            picture = log.with_name("picture.svg")
            picture.write_text(SVG)
            logs = {"stdout": log, FILE: picture}
            more = {
                "timing": {"queue": 0.5, "run": 2.0, "evaluate": 0.1},
                "exit_code": 0,
                "logs": {name: str(path.relative_to(folder)) for name, path in logs.items()}
                | {"escape": "../../secret"},
                "left_out": {FILE: HOSTILE},
                "evaluation": {"output": HOSTILE, "stayed": [FILE]},
            }
            await store.close_session(
                Outcome(
                    caller.session_id,
                    "COMPLETED" if reward is not None else "ERROR",
                    time.time(),
                    reward,
                    metadata=more,
                    **(failed if reward is None else {}),
                )
            )
            names.append(caller.session_id)
    reply = {"config": {"engines": ["scripted:x"], "tasks": [task("one", len(rewards) + 1)]}}
    (folder / "run.json").write_text(json.dumps(reply))
    return names


def certified(text, turns=(("one.0", "x"),)):
    """The certificate of a mismatch whose texts are all somebody else's."""
    cause = {"cause": "unknown", "score": 0.9, "evidence": text}
    shares = {"token_share": 0.5, "kl_share": 1.0}
    return {
        "made_at": 1.7e9,
        "trainer": text,
        "faithful": False,
        "tokens": 90, "missing": 3, "kl": 0.2, "rms": 0.4, "tolerance": 2e-4,
        "facts": [{"name": text, "rollout": text, "trainer": [text], "same": False}],
        "mismatches": [{"causes": [cause, cause], **shares}],
        "turns": [
            {"trace_id": f"{session}/prefix_merging/0", "exchange_id": exchange, "tokens": 9,
             "kl": 0.3, "largest": 3.0, "causes": [text], **shares}
            for session, exchange in turns
        ],
    }  # fmt: skip


def task(task_id, samples):
    return {"task_id": task_id, "num_samples": samples, "instruction": f"Fix it. {HOSTILE}"}


def _engine(turns):
    from bridle.scripted.engine import ScriptedEngine
    from bridle.scripted.script import make_script

    return ScriptedEngine(make_script(turns, "test"))


async def write(folder, *made):
    """A run folder of made-up sessions."""
    folder.mkdir(parents=True, exist_ok=True)
    async with await SqliteStore.open(folder / "capture.sqlite") as store:
        for one in made:
            await store.open_session(one.record)
            for start in range(0, len(one.exchanges), 500):  # many at once are one transaction
                async with asyncio.TaskGroup() as group:
                    for exchange in one.exchanges[start : start + 500]:
                        bodies = one.new_bodies[exchange.exchange_id]
                        group.create_task(store.commit(exchange, bodies))
                        if (reply := one.deliveries.get(exchange.exchange_id)) is not None:
                            group.create_task(store.deliver(reply))
            if one.outcome is not None:
                await store.close_session(one.outcome)


def busy(session_id="busy"):
    """A made-up session with all that a tree can hold."""
    made = MadeSession(session_id, metadata=metadata(0))
    made.call(None, exchange_id="a1", new=40, output=12)
    made.call("a1", exchange_id="a2", new=9, output=8)
    made.call(None, exchange_id="sub", new=30, output=7, kind=Kind.SUBAGENT, root_reason="subagent")
    made.call(None, exchange_id="title", new=6, output=3, kind=Kind.SIDE, root_reason="side")
    made.call("a2", exchange_id="a3", new=5, output=9, state=None)
    made.call("a2", exchange_id="b3", new=7, output=4, finish_reason=FinishReason.LENGTH)
    made.call(
        None, exchange_id="short", new=20, output=6, continues="b3", kind=Kind.COMPACTION,
        root_reason="history_changed",
    )  # fmt: skip
    return made


def long(exchanges, session_id="long", *, new=3, output=2, chain=1000):
    """A made-up session of chains of so many exchanges."""
    made = MadeSession(session_id, texts=False, metadata=metadata(0))
    before = None
    for number in range(exchanges):
        before = before if number % chain else None
        before = made.call(before, new=new, output=output).exchange_id
    made.end()
    return made


def steps(folder):
    """A run whose task `task-1` got better from version 3 to 4, and failed once."""
    made = []
    for name, version, reward in (("old", 3, 0.0), ("older", 3, 1.0), ("new", 4, 1.0)):
        one = MadeSession(name)
        one.call(None, exchange_id=name, output=6, versions=(VersionSpan(version, 0, 6),))
        one.end(reward)
        made.append(one)
    broken = MadeSession("broken")
    broken.call(None, exchange_id="broken", output=6, versions=(VersionSpan(3, 0, 6),))
    broken.end(None, status="TIMEOUT", cause="timeout")
    asyncio.run(write(folder, *made, broken))


LOOKED_AT: list[FolderSource] = []
"""Folders of the test that runs; it closes them (conftest)."""


def looked_at(folder, **options):
    """A folder that is closed when the test has ended."""
    LOOKED_AT.append(FolderSource(folder, **options))
    return LOOKED_AT[-1]


def client(folder, guard=None, **options):
    """A browser without scripts."""
    source = looked_at(folder, **options)
    browser = TestClient(make_app(source, guard), follow_redirects=False)
    browser.source = source  # type: ignore[attr-defined]  # for the tests
    return browser


STORY = (
    ("Let me look at the failing test first.", "pytest -q tests/test_totals.py"),
    ("The total is off by one line: the header is counted.", "sed -n 1,20p totals.py"),
    ("Skip the first line and run the test again.", "sed -i 's/lines/lines[1:]/' totals.py"),
)
FOUND = (
    "F\nE   assert 4 == 3\n1 failed in 0.02s",
    "def total(path):\n    lines = open(path).read().splitlines()\n    return len(lines)\n",
    "",
)


async def shown(folder):
    """Return what a newcomer would like to see: `run`, a group that varies, and a `training`."""
    course = {
        "steps": [_step(n) for n in range(1, 41)],
        "evaluations": [{"step": n, "reward": 0.1 + 0.018 * n} for n in range(0, 41, 8)],
    }
    (folder / "training").mkdir(parents=True)
    (folder / "training" / "course.json").write_text(json.dumps(course))
    turns = [
        {"reasoning": why, "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
        for why, command in STORY
    ]
    say = {"turns": [*turns, {"content": "The header is not counted any more; the test passes."}]}
    (folder / "run").mkdir()
    (folder / "run" / "certificate.json").write_text(json.dumps(certified(FOUND[1])))
    store = await SqliteStore.open(folder / "run" / "capture.sqlite")
    async with store, house(store=store, engine=_engine({"conversations": [say]})) as made:
        for index, reward in enumerate((1.0, 0.0, 1.0, 1.0, 0.0, None)):
            caller = await made.session(
                f"fix-totals.{index}", task_id="fix-totals", metadata=metadata(index)
            )
            messages = [SYSTEM, user("The total in totals.py is wrong. Fix it.")]
            for found in FOUND:
                said = await caller.ask(messages, tools=[SHELL_TOOL])
                messages += [said, tool_result(said["tool_calls"][0], found)]
            await caller.ask(messages, tools=[SHELL_TOOL])
            if index % 2:
                await caller.ask([*messages[:4], user("Stop. Look again.")], tools=[SHELL_TOOL])
            await made.gateway.seal(caller.session_id)
            failed: Any = {"cause": "timeout", "error": "the agent's budget of 600 s ran out"}
            await store.close_session(
                Outcome(
                    caller.session_id,
                    "TIMEOUT" if reward is None else "COMPLETED",
                    time.time(),
                    reward,
                    metadata={"timing": {"queue": 0.4, "init": 1.2, "run": 31.0, "evaluate": 2.0}},
                    **(failed if reward is None else {}),
                )
            )


def _step(number):
    wave = 0.06 * ((number * 7) % 5 - 2)
    return {
        "step": number,
        "reward": max(0.0, min(1.0, 0.1 + 0.019 * number + wave)),
        "groups": 8,
        "flat": number % 4,
        "waited_s": 4.0 + wave,
        "published_s": 0.2,
        "update": {
            "logprob_error": 1e-6 * (1 + (number * 3) % 7),
            "lags": {"0": 700, "1": 300 * (number % 2)},
            "norm": 0.5 + wave,
            "seconds": 1.5,
        },
    }

"""The tree of attempts: its means, its page, and forks that a person begins from it."""

import asyncio
import json
import shlex
import time
from statistics import mean
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tests.capture.made import MadeSession
from tests.dashboard.house import SYSTEM, client, metadata, script, task, write
from tests.dashboard.test_app import Page
from tests.gateway.house import SHELL_TOOL, house, tool_result, user

from bridle.capture.records import Outcome
from bridle.capture.sqlite import SqliteStore
from bridle.dashboard.app import MAX_FORM, make_app
from bridle.dashboard.source import attempts_of
from bridle.dashboard.summaries import SessionRow
from bridle.errors import ServerError
from bridle.gateway.replay import replay_of
from bridle.scripted.engine import ScriptedEngine
from bridle.scripted.script import make_script

pytestmark = pytest.mark.timeout(120)

SESSION = "one.0"
HOSTILE_ID = "'; touch ran #<img src=x onerror=alert(1)>$(id)\u202e"


@st.composite
def trees(draw):
    """Rewards of sessions, and for each fork the session above it and its number of replies."""
    count = draw(st.integers(1, 8))
    rewards = draw(st.lists(st.none() | st.integers(0, 4), min_size=count, max_size=count))
    above = [(draw(st.integers(0, fork - 1)), draw(st.integers(1, 3))) for fork in range(1, count)]
    return rewards, above


def passing(session, at, rewards, above):
    """The rewards of a session and of all that began behind one of its replies."""
    found = [] if rewards[session] is None else [rewards[session]]
    for fork, (origin, reply) in enumerate(above, 1):
        if origin == session and reply >= at:
            found += passing(fork, 0, rewards, above)
    return found


@given(trees(), st.data())
def test_value_of_a_reply_is_the_mean_reward_of_the_sessions_through_it(tree, data):
    rewards, above = tree
    lines = [SessionRow(f"s.{n}", "run", reward=reward) for n, reward in enumerate(rewards)]
    origins = {("run", f"s.{n}"): (("run", f"s.{o}"), at) for n, (o, at) in enumerate(above, 1)}
    wanted = data.draw(st.integers(0, len(lines) - 1))

    found = attempts_of(("run", f"s.{wanted}"), lines, origins)

    sessions = [row for row in found.rows if row.at is None]
    assert sorted(row.line.session_id for row in sessions) == [line.session_id for line in lines]
    assert found.sessions == len(lines)
    whole = passing(0, 0, rewards, above)
    assert found.mean == (pytest.approx(mean(whole)) if whole else None)
    for row in found.rows:
        if row.at is not None:
            own = passing(int(row.line.session_id[2:]), row.at, rewards, above)
            assert row.rewarded == len(own)
            assert row.mean == (pytest.approx(mean(own)) if own else None)


def test_attempt_tree_terminates_on_sessions_that_name_each_other_as_origin():
    lines = [SessionRow(name, "run", reward=1.0) for name in "ab"]
    origins = {("run", "a"): (("run", "b"), 1), ("run", "b"): (("run", "a"), 1)}

    found = attempts_of(("run", "a"), lines, origins)

    assert [row.line.session_id for row in found.rows if row.at is None] == ["b", "a"]


async def talk(caller, calls):
    messages = [SYSTEM, user("one: fix it")]
    for _ in range(calls):
        said = await caller.ask(messages, tools=[SHELL_TOOL])
        messages += [said, *(tool_result(one, "done") for one in said.get("tool_calls", ()))]


async def run_of(folder, sessions):
    """A run folder of sessions (id, reward, its origin); captures by id."""
    folder.mkdir(parents=True)
    store = await SqliteStore.open(folder / "capture.sqlite")
    found = {}
    engine = ScriptedEngine(make_script({"conversations": [script("one")]}, "test"))
    async with store, house(store=store, engine=engine) as made:
        for session_id, reward, origin in sessions:
            more, replay = {}, None
            if origin is not None:
                capture, path, at = origin
                fork = {"capture": str(path), "session": capture.session.session_id, "at": at}
                more, replay = {"fork": fork}, replay_of(capture, at)
            caller = await made.session(
                session_id, task_id="one", metadata=metadata(0, **more), replay=replay
            )
            await talk(caller, 3)
            await made.gateway.seal(session_id)
            facts = {} if replay is None else {"fork": replay.facts()}
            ended = Outcome(session_id, "COMPLETED", time.time(), reward, metadata=facts)
            await store.close_session(ended)
            found[session_id] = store.read(session_id)
    (folder / "run.json").write_text(json.dumps({"config": {"tasks": [task("one", 1)]}}))
    return found


async def attempts(folder):
    """A run of one session, and a run of its forks; one of these is forked once more."""
    path = folder / "its run" / "capture.sqlite"
    captures = await run_of(path.parent, [(SESSION, 0.0, None)])
    below = folder / "forks" / "capture.sqlite"
    forks = [("one.0.a", 1.0, 2), ("one.0.b", 0.0, 1), ("one.0.c", None, 1)]
    origins = [(name, reward, (captures[SESSION], path, at)) for name, reward, at in forks]
    captures |= await run_of(below.parent, origins)
    again = (captures["one.0.a"], below, 2)
    await run_of(folder / "again", [("one.0.d", 1.0, again)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("attempts")
    asyncio.run(attempts(made / "runs"))
    return made / "runs"


def test_attempts_page_shows_the_fork_points_and_the_mean_reward_after_each_reply(folder):
    with client(folder) as browser:
        pages = [
            browser.get(f"/session/{name}/attempts?run={run}")
            for name, run in ((SESSION, "its run"), ("one.0.d", "again"))
        ]
        alone = browser.get(f"/session/{SESSION}?run=its run")
    for page in pages:
        assert page.status_code == 200
        assert "<script>alert" not in page.text
        assert Page(page.text).inline == []
        text = " ".join("".join(Page(page.text).text).split()).partition("sessions, mean")[2]
        assert text.startswith(" reward 0.5.")
        # One session that got 0; from its second reply on two more with 1; from its first on one
        # with 0 and one without a reward.
        assert "0.5 after reply 1: 2 forks, mean of 4" in text
        assert "0.667 after reply 2: 1 fork, mean of 3" in text
        assert text.index("one.0.b") < text.index("one.0.a") < text.index("one.0.d")
        assert text.count("exact") == 4
    assert "/attempts?run=its" in alone.text


def test_attempts_page_shows_the_fork_command_for_each_reply(folder):
    with client(folder) as browser:
        page = browser.get(f"/session/{SESSION}/attempts?run=its run").text
        tree = browser.get(f"/session/{SESSION}?run=its run").text
        links = [link for link in Page(tree).links if "/exchange/" in link and ".json" not in link]
        exchange = browser.get(links[0]).text
    commands = [text for text in Page(page).text if text.startswith("bridle fork")]
    parts = [shlex.split(command) for command in commands]
    where = str(folder / "its run")
    assert parts == [["bridle", "fork", SESSION, "--run", where, "--at", str(n)] for n in (1, 2, 3)]
    assert commands[0] in Page(exchange).text


def test_a_hostile_session_id_is_shell_quoted_in_the_fork_command_and_escaped_in_html(tmp_path):
    run = tmp_path / HOSTILE_ID
    made = MadeSession(HOSTILE_ID, metadata=metadata(0, fork={"session": 1}))
    made.call(None, exchange_id="a", new=4, output=3)
    made.end()
    asyncio.run(write(run, made))
    (run / "run.json").write_text(json.dumps({"config": {"tasks": [task("task-1", 1), 7]}}))
    with client(run) as browser:
        page = browser.get(f"/session/{quote(HOSTILE_ID)}/attempts").text

    assert Page(page).inline == []
    assert "<img" not in page
    (command,) = [text for text in Page(page).text if text.startswith("bridle fork")]
    words = ["bridle", "fork", HOSTILE_ID, "--run", str(run), "--at", "1"]
    assert shlex.split(command) == words


def test_a_session_whose_task_is_not_in_the_run_cannot_be_forked(folder, tmp_path):
    (tmp_path / "run").mkdir()
    capture = folder / "its run" / "capture.sqlite"
    (tmp_path / "run" / "capture.sqlite").write_bytes(capture.read_bytes())
    with client(tmp_path) as browser:
        page = browser.get(f"/session/{SESSION}/attempts")
        posted = browser.post(f"/session/{SESSION}/fork", headers={"origin": "http://testserver"})

    assert "bridle fork" not in page.text
    assert '<form class="fork"' not in page.text
    assert posted.status_code == 403


class Submitted:
    """A source over a folder whose sessions can be forked as those of a server; keeps what was."""

    def __init__(self, source, error=None):
        self._source, self._error, self.forks = source, error, []

    def __getattr__(self, name):
        return getattr(self._source, name)

    def fork(self, session_id, at, samples):
        if self._error:
            raise self._error
        self.forks.append((session_id, at, samples))
        return "new task"


OURS = {"origin": "http://testserver"}


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        ({"at": "2", "samples": "3"}, [(SESSION, 2, 3)]),
        ({"at": "2", "samples": "9999"}, [(SESSION, 2, 64)]),
        ({"at": "-1", "samples": "x"}, [(SESSION, 1, 1)]),
    ],
)
def test_fork_form_submits_a_fork_with_bounded_position_and_samples(folder, form, asked):
    with client(folder) as browser:
        source = Submitted(browser.source)
        with TestClient(make_app(source), follow_redirects=False) as pages:
            page = pages.get(f"/session/{SESSION}/attempts?run=its run")
            answer = pages.post(f"/session/{SESSION}/fork", data=form, headers=OURS)

    assert f'action="/session/{SESSION}/fork"' in page.text
    assert source.forks == asked
    assert (answer.status_code, answer.headers["location"]) == (303, "/task?id=new+task")


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://testserver:81"])
def test_a_fork_request_from_another_origin_is_refused(folder, origin):
    with client(folder) as browser:
        source = Submitted(browser.source)
        headers = {} if origin is None else {"origin": origin}
        with TestClient(make_app(source)) as pages:
            answer = pages.post(f"/session/{SESSION}/fork", data={"at": "1"}, headers=headers)

    assert answer.status_code == 403
    assert source.forks == []


def test_a_refused_fork_and_an_oversized_form_get_pages_with_the_reason(folder):
    with client(folder) as browser:
        refusing = Submitted(browser.source, ServerError("at: it has 3 replies <b>", status=422))
        with TestClient(make_app(refusing)) as pages:
            refused = pages.post(f"/session/{SESSION}/fork", data={"at": "9"}, headers=OURS)
            large = pages.post(
                f"/session/{SESSION}/fork", data={"at": "1" * MAX_FORM}, headers=OURS
            )

    assert (refused.status_code, "it has 3 replies &lt;b&gt;" in refused.text) == (422, True)
    assert (large.status_code, "larger than" in large.text) == (413, True)


def test_task_page_with_forks_links_to_the_attempt_tree(folder):
    with client(folder) as browser:
        tree = browser.get("/task?id=one").text
        flat = browser.get("/task?id=one&run=its run").text

    assert "branch by branch" in tree
    assert "/attempts" in tree
    assert "branch by branch" not in flat

"""Samples for slime and Miles: groups, siblings, masks, versions; advantages by session."""

import asyncio
import json
from collections import Counter
from heapq import heappop, heappush
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.bridges.by_hand import Player, group, rows, session, trace
from tests.bridges.samples import Sample, Status

from bridle.bridges.base import TaskTable
from bridle.bridges.remote import ServerSessions, open_server
from bridle.bridges.slime import (
    Ahead,
    generate_rollout,
    generate_rollout_async,
    play_groups,
    post_process_rewards,
    samples_of,
)
from bridle.config import Task
from bridle.errors import ConfigError
from bridle.server.scheduler import engines_named

TASKS = TaskTable([Task(task_id=name, instruction="go") for name in "ab"])
ARGS = SimpleNamespace(grpo_std_normalization=True)


def templates(*names):
    return [
        [
            Sample(group_index=place, index=2 * place + at, metadata={"task_id": name})
            for at in range(2)
        ]
        for place, name in enumerate(names)
    ]


def test_traces_of_a_session_are_slime_samples_with_one_rollout_id():
    groups = [group(session("s", 1.0, trace(), trace("t1")), session("u", 0.0, trace()))]
    ((two, one),), _ = samples_of(groups, templates("a"))
    first, second = two
    assert (len(one), first.rollout_id, second.rollout_id, one[0].rollout_id) == (1, 0, 0, 1)
    assert first.tokens == [*range(1, 11)]
    assert first.response_length == 7
    assert first.loss_mask == [1, 1, 0, 0, 1, 1, 1]
    assert first.rollout_log_probs == [-0.5, -0.5, 0, 0, -0.5, -0.5, -0.5]
    assert first.weight_versions == ["3", "4"]
    assert (first.reward, first.group_index, first.status) == (1.0, 0, Status.COMPLETED)
    assert first.response == "\nDone."
    assert (first.metadata["session_id"], first.metadata["task_id"]) == ("s", "a")
    for sample in (*two, *one):
        sample.validate()


def test_slime_samples_have_routed_experts_of_all_tokens_but_the_last_or_none():
    result = [trace(routed_experts=rows()), trace("t1", routed_experts=rows(known=8)), trace("t2")]
    groups = [group(session("s", 1.0, *result), session("u", None, status="ERROR"))]
    (((first, second, third), (failed,)),) = samples_of(groups, templates("a"))[0]
    assert first.rollout_routed_experts.dtype == np.int32
    assert np.array_equal(first.rollout_routed_experts, rows()[:-1])
    for sample in (first, second, third, failed):
        sample.validate()
        assert sample is first or sample.rollout_routed_experts is None


def test_a_session_without_a_reward_is_a_removed_slime_sample_in_its_place():
    for early in ("TIMEOUT", "CANCELLED"):
        sessions = session("s", 1.0, trace(), status=early), session("u", None, status="ERROR")
        (((late,), (failed,)),) = samples_of([group(*sessions)], templates("a"))[0]
        assert (late.status, late.remove_sample) == (Status.ABORTED, False)
    assert (failed.status, failed.remove_sample, failed.loss_mask) == (Status.FAILED, True, [0])
    assert failed.reward == 1.0
    cut = [group(session("s", 1.0, trace(finish_reason="length")), session("u", 1.0, trace()))]
    assert samples_of(cut, templates("a"))[0][0][0][0].status is Status.TRUNCATED
    first = trace(versions=np.array([0, 0, -1, -1, 0, 0, 1], np.int32))
    groups = [group(session("s", 1.0, first), session("u", 1.0, trace()))]
    assert samples_of(groups, templates("a"))[0][0][0][0].weight_versions == ["0", "1"]


def test_slime_advantages_of_trace_rewards_are_computed_within_a_role():
    def played(name, agent, helper):
        sub = trace("t1", reward=helper, metadata={"kind": "subagent", "agent": "helper"})
        return session(name, agent, trace(metadata={"kind": "agent"}), sub)

    groups = [group(played("s", 1.0, 0.0), played("u", 1.0, 1.0))]
    samples, _ = samples_of(groups, templates("a"))
    flat = [one for two in samples[0] for one in two]
    raw, advantages = post_process_rewards(ARGS, flat)
    assert raw == [1.0, 0.0, 1.0, 1.0]
    assert advantages == [0.0, -1.0, 0.0, 1.0]


def test_slime_advantage_of_a_trace_alone_in_its_role_is_that_of_its_session_s_reward():
    helper = trace(reward=0.0, metadata={"kind": "subagent"})
    masked = trace("t1", loss_mask=np.zeros(7, np.uint8))
    groups = [group(session("s", 1.0, helper, masked), session("u", 0.0, trace()))]
    samples, _ = samples_of(groups, templates("a"))
    flat = [one for two in samples[0] for one in two]
    assert post_process_rewards(ARGS, flat) == ([0.0, 0.0], [1.0, -1.0])


def test_slime_advantages_count_a_session_once_and_ignore_unknown_rewards():
    unknown = session("x", None, trace())
    groups = [
        group(session("s", 1.0, trace(), trace("t1"), trace("t2")), session("u", 0.0, trace())),
        group(session("w", 1.0, trace()), unknown),
    ]
    samples, _ = samples_of(groups, templates("a", "b"))
    flat = [one for of in samples for two in of for one in two]
    assert [sample.rollout_id for sample in flat] == [0, 0, 0, 1, 2, 3]
    raw, advantages = post_process_rewards(ARGS, flat)
    assert raw == [1, 1, 1, 0, 1, 1]
    assert advantages == [1, 1, 1, -1, 0, 0]
    plain = SimpleNamespace(grpo_std_normalization=False)
    assert post_process_rewards(plain, flat)[1] == [0.5, 0.5, 0.5, -0.5, 0, 0]
    assert post_process_rewards(SimpleNamespace(), flat)[1] == advantages
    three = [Sample(group_index=0, index=at, metadata={"task_id": "a"}) for at in range(3)]
    known = session("s", 1.0, trace()), session("u", 0.0, trace())
    (of,), _ = samples_of([group(*known, unknown)], [three])
    assert post_process_rewards(ARGS, [one for (one,) in of])[1] == [1, -1, 0]


def test_slime_groups_play_the_tasks_that_their_samples_name():
    player = Player(*(session(name, 1.0, trace()) for name in "wxyz"))
    wanted = templates("a", "b")
    wanted[1] = [Sample(group_index=1, index=at, prompt="b", metadata={}) for at in (2, 3)]
    samples, counts = play_groups(player, TASKS, wanted)
    assert [of[0].metadata["session_id"] for two in samples for of in two] == ["w", "x", "y", "z"]
    assert counts.sessions == 4


@pytest.fixture
def opened(tmp_path):
    """Return what `generate_rollout` opens, with a player in the server's place."""
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a", "instruction": "go"}\n')
    tasks = str(tmp_path / "tasks.jsonl")
    args = SimpleNamespace(
        bridle_server="http://127.0.0.1:1", bridle_tasks=tasks, bridle_eval_tasks=tasks,
        rollout_batch_size=1, n_samples_per_eval_prompt=2,
    )  # fmt: skip
    yield args, open_server(args.bridle_server, tasks)[0]
    open_server(args.bridle_server, tasks)[0].__exit__()
    open_server.cache_clear()


def test_slime_s_rollout_function_takes_groups_from_the_data_source(opened):
    args, sessions = opened
    player = Player(session("s", 1.0, trace()), session("u", 0.0, trace()))
    sessions.play, sessions.set_version = player.play, player.set_version
    source = SimpleNamespace(get_samples=lambda count: templates("a")[:count])
    ((first, _),) = generate_rollout(args, 5, source)
    assert first[0].metadata["session_id"] == "s"
    assert player.versions == [5]


@pytest.mark.parametrize("evaluation", [False, True])
def test_colocated_engines_serve_only_while_slime_s_rollout_function_runs(opened, evaluation):
    args, sessions = opened
    args.colocate = True
    player, states = Player(session("s", 1.0, trace()), session("u", 0.0, trace())), []

    def play(tasks):
        states.append("played")
        return player.play(tasks)

    sessions.play, sessions.set_version = play, player.set_version
    sessions.give_up = lambda: states.append("released")
    sessions.take_back = lambda: states.append("serving")
    source = SimpleNamespace(get_samples=lambda count: templates("a")[:count])
    generate_rollout(args, 5, source, evaluation=evaluation)
    assert states == ["serving", "played", "released"]


def test_slime_s_asynchronous_rollout_function_refuses_colocated_engines(opened):
    args, _ = opened
    args.colocate = True
    with pytest.raises(ConfigError, match="GPUs of their own"):
        generate_rollout_async(args, 5, None)


@pytest.mark.parametrize("function", [generate_rollout, generate_rollout_async])
def test_a_slime_evaluation_returns_the_known_rewards(opened, function):
    args, sessions = opened
    sessions.play = Player(session("s", 1.0, trace()), session("u", None)).play
    result = function(args, 5, None, evaluation=True)
    assert result["bridle"]["rewards"] == [1.0]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (
            "/workers",
            {"workers": [{"id": "a", "url": "http://127.0.0.1:1@0"}, {"url": "http://h:2"}]},
        ),
        ("/list_workers", {"urls": ["http://127.0.0.1:1", "http://h:2"]}),
    ],
)
async def test_engines_of_slime_s_router_are_written_to_the_engines_file(
    opened, tmp_path, path, answer
):
    async def workers(request):
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get(path, workers)
    args, sessions = opened
    args.bridle_engines = str(tmp_path / "engines.json")
    sessions.play = Player(session("s", 1.0, trace()), session("u", None)).play
    async with TestServer(app) as router:
        args.sglang_router_ip, args.sglang_router_port = router.host, router.port
        await asyncio.to_thread(generate_rollout, args, 5, None, evaluation=True)
    named = await engines_named(f"sglang:{args.bridle_engines}")
    assert named == ["sglang:http://127.0.0.1:1", "sglang:http://h:2"]


def test_slime_settings_are_read_from_arguments_or_environment(opened, monkeypatch):
    args, sessions = opened
    sessions.play = Player(session("s", 1.0, trace()), session("u", None)).play
    server, args = args.bridle_server, SimpleNamespace(**vars(args))
    del args.bridle_server
    with pytest.raises(ConfigError, match="BRIDLE_SERVER"):
        generate_rollout(args, 5, None, evaluation=True)
    monkeypatch.setenv("BRIDLE_SERVER", server)
    assert generate_rollout(args, 5, None, evaluation=True)["bridle"]["rewards"] == [1.0]


class Slots(ServerSessions):
    """A server with 64 run slots on a simulated clock; one session of every 64 takes 10, not 1."""

    def __init__(self):
        self.now, self.busy, self.started = 0.0, 0.0, 0
        self.queue: list[str] = []
        self.running: list[tuple[float, str]] = []
        self.left: Counter[str] = Counter()
        self.order: list[str] = []
        self.acked: list[str] = []
        self.versions: list[int] = []

    def hand_in(self, groups, *, hand_out=True):
        known = [name for name in groups if name in self.left]
        for name, (_, samples) in groups.items():
            if name not in known:
                self.queue += [name] * samples
                self.left[name] = samples
        self.fill()
        return [name for name in known if name in self.order]

    def fill(self):
        while self.queue and len(self.running) < 64:
            self.started += 1
            length = 10 if self.started % 64 == 1 else 1
            heappush(self.running, (self.now + length, self.queue.pop(0)))

    def until(self, time):
        """Let sessions end, and others begin in their place."""
        while self.running and self.running[0][0] <= time:
            end = self.running[0][0]
            self.busy += len(self.running) * (end - self.now)
            self.now, name = heappop(self.running)
            self.left[name] -= 1
            if not self.left[name]:
                self.order.append(name)
            self.fill()
        self.busy += len(self.running) * (time - self.now)
        self.now = time

    def ended(self, after):
        while len(self.order) == after:
            self.until(self.running[0][0])
        return after + 1, self.order[after]

    def fetch(self, name, task_id, samples):
        return [session(f"{name}.{at}", 1.0, trace()) for at in range(samples)]

    def ack(self, names):
        self.acked += names

    def set_version(self, version):
        self.versions.append(version)


class Groups:
    """A data source of groups of eight."""

    def __init__(self):
        self.given = 0
        self.metadata: dict = {}

    def get_samples(self, count):
        numbers = range(self.given, self.given + count)
        self.given += count
        return [
            [Sample(group_index=n, index=8 * n + at, metadata={"task_id": "a"}) for at in range(8)]
            for n in numbers
        ]


def names_of(groups):
    return [f"one.{group[0][0].group_index}" for group in groups]


def test_slime_s_asynchronous_rollouts_have_the_version_of_the_update_before(opened, monkeypatch):
    args, slots = opened[0], Slots()
    args.bridle_run = "one"
    monkeypatch.setattr("bridle.bridges.slime.open_server", lambda *_: (slots, TASKS))
    source = Groups()
    taken = [names_of(generate_rollout_async(args, rollout, source)) for rollout in range(4)]
    assert slots.versions == [0, 0, 1, 2]
    assert slots.acked == [*taken[0], *taken[1]]  # 2 may be in training, 3 waits for it


def test_slime_s_restarted_run_acknowledges_what_is_trained_and_takes_the_rest_again():
    slots, source = Slots(), Groups()
    ahead = Ahead(slots, TASKS, source, "one")
    taken = [names_of(ahead.take(rollout, 2, 2)[0]) for rollout in range(3)]
    slots.acked.clear()
    again = Groups()
    again.given = source.given
    again.metadata = json.loads(json.dumps(source.metadata))
    restarted = Ahead(slots, TASKS, again, "one")
    assert names_of(restarted.take(2, 2, 2)[0]) == taken[2]
    assert sorted(slots.acked) == sorted(taken[1])  # those of 0 were acknowledged before


def lost_share(ahead):
    """Engine time that is lost over 40 batches of 64 sessions, each with a slow one."""
    slots = Slots()
    groups = Ahead(slots, TASKS, Groups(), "run")
    start = busy = 0.0
    for rollout in range(48):
        if rollout == 8:
            start, busy = slots.now, slots.busy
        groups.take(rollout, 8, ahead)
        slots.until(slots.now + 0.5)  # the trainer's step
    return 1 - (slots.busy - busy) / (64 * (slots.now - start))


def test_a_slow_session_per_batch_idles_engines_under_a_tenth_with_async_rollouts():
    assert lost_share(0) > 0.7  # whole batches: all wait for the slow one
    assert lost_share(16) < 0.1

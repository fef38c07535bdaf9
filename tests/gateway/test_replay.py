"""Forks: a session that is answered with the captured replies of another one first."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.memory import MemoryStore
from tests.gateway.house import SHELL_TOOL, house, tool_result, user
from tests.gateway.sdk_agents import CLIENTS, reading

from bridle.capture.records import no_logprobs
from bridle.errors import ConfigError, StoreError
from bridle.gateway.replay import replay_of
from bridle.gateway.weights import SetPolicy
from bridle.harness_rules import Varying
from bridle.scripted.engine import ScriptedEngine
from bridle.scripted.script import make_script
from bridle.trajectory import rebuild
from bridle.trajectory.graph import grow
from bridle.types import FinishReason, Kind, LogprobMode, VersionSpan

TURNS = 6
NONSENSE = {"content": "nothing that was captured"}


async def captured(home, caller):
    """End a session and read its capture."""
    await home.gateway.seal(caller.session_id)
    return home.store.read(caller.session_id)


def facts_of(replay):
    """The facts of a replay but for the session and the reply that it begins at."""
    return {name: fact for name, fact in replay.facts().items() if name not in ("session", "at")}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("stream", ["whole", "live"])
async def test_every_sdk_reads_captured_replies_as_it_read_them_when_they_were_sampled(
    client, stream
):
    engine = ScriptedEngine(make_script(reading(TURNS), "book"))
    async with house(engine=engine, stream=stream) as home:
        first = await home.session()
        await client(first.handle, TURNS)
        original = await captured(home, first)
    async with house(NONSENSE, stream=stream) as home:
        replay = replay_of(original, TURNS - 1)
        fork = await home.session(replay=replay)
        await client(fork.handle, TURNS)
        again = await captured(home, fork)
    assert facts_of(replay) == {"replayed": TURNS - 1, "left": 0, "verdict": "exact", "noise": []}
    for old, new in zip(original.exchanges, again.exchanges, strict=True):
        assert (new.prompt_digest, new.kept) == (old.prompt_digest, old.kept)
    for old, new in list(zip(original.exchanges, again.exchanges, strict=True))[:-1]:
        assert np.array_equal(new.output_ids, old.output_ids)
        assert np.array_equal(new.logprobs, old.logprobs)
        assert new.extra["replayed"] == old.exchange_id
    assert "replayed" not in again.exchanges[-1].extra
    trained = rebuild(again).metadata["stats"]
    assert trained["tokens_trained"] == len(again.exchanges[-1].output_ids)


async def played(home, caller, calls=2):
    """An agent that makes some calls, each with a command."""
    messages = [user("go")]
    for number in range(calls):
        message = await caller.ask(messages, tools=[SHELL_TOOL])
        messages.append(message)
        messages += [tool_result(one, f"done {number}") for one in message.get("tool_calls", ())]
        messages.append(user(f"more {number}"))
    return messages


RUNS = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}], "content": "I look."}


async def test_replay_returns_captured_call_ids_and_versions_and_keeps_the_policy_version():
    async with house(RUNS) as home:
        first = await home.session()
        said = await played(home, first)
        original = await captured(home, first)
    old = [
        replace(exchange, versions=(VersionSpan(7, 0, len(exchange.output_ids)),))
        for exchange in original.exchanges
    ]
    async with house(NONSENSE) as home:
        fork = await home.session(replay=replay_of(replace(original, exchanges=old), 2))
        assert await played(home, fork) == said
        assert [exchange.versions[0].version for exchange in fork.exchanges] == [7, 7]
        assert home.gateway.policy()["version"] == 0
        assert "bridle_sampled_tokens_total 0.0" in home.gateway.metrics()


async def test_samples_of_one_prompt_are_given_again_one_each():
    async with house(RUNS) as home:
        first = await home.session()
        for _ in range(3):
            await first.ask([user("vote")])
        original = await captured(home, first)
    async with house(NONSENSE) as home:
        fork = await home.session(replay=replay_of(original, 3))
        async with asyncio.TaskGroup() as group:
            for seed in range(3):
                group.create_task(fork.ask([user("vote")], seed=seed))
        again = await captured(home, fork)
    given_again = {exchange.extra["replayed"] for exchange in again.exchanges}
    assert given_again == {exchange.exchange_id for exchange in original.exchanges}


async def test_a_reply_that_a_stop_string_ended_ends_there_again():
    async with house({"content": "one two three"}) as home:
        first = await home.session()
        said = await first.ask([user("count")], stop=[" two"])
        original = await captured(home, first)
    async with house(NONSENSE) as home:
        fork = await home.session(replay=replay_of(original, 1))
        assert await fork.ask([user("count")], stop=[" two"]) == said
    assert said["content"] == "one"


@given(place=st.integers(0, 2), after=st.booleans())
async def test_a_prompt_that_was_not_captured_is_refused_before_the_fork_and_free_after_it(
    place, after
):
    async with house(RUNS) as home:
        first = await home.session()
        await played(home, first, calls=3)
        original = await captured(home, first)
    async with house(NONSENSE) as home:
        replay = replay_of(original, 2)
        fork = await home.session(replay=replay)
        messages = await played(home, fork, calls=3 if after else place)
        body = {"model": "m", "messages": [*messages[:-1], user("another")], "tools": [SHELL_TOOL]}
        if not messages[:-1]:
            body["messages"] = [user("another")]
        status, reply = await fork.post(body)
        assert status == (200 if after else 400), reply
        assert replay.facts()["verdict"] == ("exact" if after else "refused")
        if not after:
            assert "differs from token" in reply["error"]["message"]
            assert "another" in reply["error"]["message"]


async def test_calls_beside_the_conversation_are_sampled_where_they_were_not_captured():
    rules = [{"name": "title", "kind": "side", "system_contains": "Write a title"}]
    side = [{"role": "system", "content": "Write a title"}, user("go")]
    async with house(RUNS) as home:
        first = await home.session()
        await played(home, first)
        original = await captured(home, first)
    async with house(NONSENSE) as home:
        fork = await home.session(replay=replay_of(original, 2), metadata={"kind_rules": rules})
        first_message = await fork.ask([user("go")], tools=[SHELL_TOOL])
        title = await fork.ask(side)
        assert title["content"] == NONSENSE["content"]
        assert first_message["content"] == RUNS["content"]


class Failing(MemoryStore):
    """A store whose next commit fails."""

    fails = False

    async def commit(self, exchange, bodies):
        if self.fails:
            self.fails = False
            raise StoreError("the disk is full")
        await super().commit(exchange, bodies)


async def test_a_reply_whose_record_failed_is_given_again_to_the_retry():
    async with house(RUNS) as home:
        first = await home.session()
        await played(home, first)
        original = await captured(home, first)
    store = Failing()
    async with house(NONSENSE, store=store) as home:
        replay = replay_of(original, 2)
        fork = await home.session(replay=replay)
        store.fails = True
        status, _ = await fork.post({"model": "m", "messages": [user("go")], "tools": [SHELL_TOOL]})
        assert status >= 500
        assert replay.facts()["replayed"] == 0
        await played(home, fork)
    assert facts_of(replay) == {"replayed": 2, "left": 0, "verdict": "exact", "noise": []}


async def test_a_later_reply_that_broke_off_or_has_no_logprobs_keeps_no_earlier_fork_back():
    async with house(RUNS) as home:
        first = await home.session()
        await played(home, first, calls=3)
        original = await captured(home, first)
    *whole, last = original.exchanges
    bare = {"logprob_mode": LogprobMode.NONE, "logprobs": no_logprobs()}
    for change in ({"finish_reason": FinishReason.ABORT}, bare):
        cut = replace(original, exchanges=[*whole, replace(last, **change)])
        with pytest.raises(ConfigError, match=f"fork: call {last.index} of session"):
            replay_of(cut, 3)
        async with house(NONSENSE) as home:
            replay = replay_of(cut, 2)
            await played(home, await home.session(replay=replay), calls=3)
        assert facts_of(replay) == {"replayed": 2, "left": 0, "verdict": "exact", "noise": []}


async def test_a_reply_that_nobody_received_is_no_part_of_a_fork():
    async with house(RUNS) as home:
        first = await home.session()
        await played(home, first)
        original = await captured(home, first)
    (last, *_) = original.deliveries
    del original.deliveries[last]
    with pytest.raises(ConfigError, match="has 1 replies, fewer than at = 2"):
        replay_of(original, 2)


CHUNK = Varying("chunk", re.compile(r"chunk [0-9a-f]{6}"))


async def noisy(caller, ids, more=""):
    """An agent whose messages have a random id each."""
    messages = []
    for name in ids:
        messages.append(user(f"chunk {name}{more}"))
        messages.append(await caller.ask(messages))


async def test_replay_accepts_prompts_that_differ_only_by_declared_noise():
    async with house(RUNS) as home:
        first = await home.session()
        await noisy(first, ["00000a", "00000b", "00000c"])
        original = await captured(home, first)
    async with house({"content": "new"}) as home:
        replay = replay_of(original, 2, [CHUNK])
        fork = await home.session(replay=replay)
        await noisy(fork, ["10000a", "20000b", "30000c", "40000d"])
        again = await captured(home, fork)
    facts = {"replayed": 2, "left": 0, "verdict": "equivalent", "noise": ["chunk"]}
    assert facts_of(replay) == facts
    *same, own = again.exchanges
    assert [one.prompt_digest for one in same] == [e.prompt_digest for e in original.exchanges]
    assert [one.extra.get("noise") for one in again.exchanges] == [["chunk"]] * 3 + [None]
    assert own.parent_id == same[-1].exchange_id
    assert grow(again.session.session_id, again.exchanges).breaks == ()
    assert rebuild(again).metadata["stats"]["tokens_excluded"].keys() == {"replayed"}


@pytest.mark.parametrize("rules", [[CHUNK], []], ids=["more differs", "no rule"])
async def test_replay_refuses_a_prompt_that_differs_beyond_declared_noise(rules):
    async with house(RUNS) as home:
        first = await home.session()
        await noisy(first, ["00000a", "00000b"])
        original = await captured(home, first)
    async with house(NONSENSE) as home:
        replay = replay_of(original, 2, rules)
        fork = await home.session(replay=replay)
        with pytest.raises(AssertionError, match="differs from token"):
            await noisy(fork, ["10000a", "10000b"], more=" more" if rules else "")
        assert (replay.facts()["replayed"], replay.facts()["verdict"]) == (0, "refused")


async def test_replay_treats_session_folder_paths_in_prompts_as_noise():
    async with house(RUNS) as home:
        first = await home.session()
        await first.ask([user("You work in /tmp/bridle-abcdefgh/0a1b2c3d/work.")])
        original = await captured(home, first)
    async with house(NONSENSE) as home:
        replay = replay_of(original, 1)
        fork = await home.session(replay=replay)
        await fork.ask([user("You work in /tmp/bridle-12_45678/4e5f6a7b/work.")])
    assert (replay.facts()["replayed"], replay.facts()["noise"]) == (1, ["session_folder"])


@given(points=st.lists(st.integers(1, 3), min_size=1, max_size=3))
async def test_a_token_of_a_tree_of_forks_trains_once_under_the_ids_it_was_sampled_under(points):
    async with house(RUNS) as home:
        first = await home.session()
        await played(home, first, calls=4)
        tree = [await captured(home, first)]
        for at in points:
            fork = await home.session(replay=replay_of(tree[-1], at))
            await played(home, fork, calls=4)
            tree.append(await captured(home, fork))
    for before, after, at in zip(tree, tree[1:], points, strict=False):
        graph = grow(after.session.session_id, after.exchanges)
        assert (graph.breaks, graph.lost) == ((), ())
        assert all(node.sound for node in graph.nodes.values())
        prompts = [exchange.prompt_digest for exchange in after.exchanges]
        assert prompts[: at + 1] == [one.prompt_digest for one in before.exchanges[: at + 1]]
        stats = rebuild(after).metadata["stats"]
        again = sum(len(one.output_ids) for one in before.exchanges[:at])
        assert stats["tokens_excluded"] == {"replayed": again}
        assert stats["tokens_trained"] + again == stats["tokens_captured"]
        new = sum(len(one.suffix_ids) + len(one.output_ids) for one in after.exchanges)
        assert new == max(node.length for node in graph.nodes.values()), "each token is kept once"


async def test_a_session_is_forked_after_its_compaction():
    rules = [{"name": "summary", "kind": "compaction", "last_user_contains": "Summarize"}]

    async def compacting(caller):
        messages = await played(None, caller)
        await caller.ask([*messages, user("Summarize.")], tools=[SHELL_TOOL])
        await caller.ask([user("So far: two calls.")], tools=[SHELL_TOOL])

    async with house(RUNS) as home:
        first = await home.session(metadata={"kind_rules": rules})
        await compacting(first)
        original = await captured(home, first)
        assert original.exchanges[2].kind is Kind.COMPACTION
        for at in (2, 3, 4):
            replay = replay_of(original, at)
            fork = await home.session(replay=replay, metadata={"kind_rules": rules})
            await compacting(fork)
            assert replay.facts()["verdict"] == "exact"
            assert replay.facts()["replayed"] == at


async def test_a_session_is_forked_inside_its_sub_agents_that_ran_beside_each_other():
    rules = [{"name": "worker", "kind": "subagent", "system_contains": "You are a worker"}]

    async def worker(caller, number):
        messages = [{"role": "system", "content": "You are a worker."}, user(f"part {number}")]
        for turn in range(2):
            messages.append(await caller.ask(messages, tools=[SHELL_TOOL]))
            messages += [tool_result(one, f"{turn}") for one in messages[-1].get("tool_calls", ())]
        return messages[-1]["content"]

    async def leading(caller):
        said = await played(None, caller, calls=1)
        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(worker(caller, number)) for number in range(3)]
        found = user(", ".join(part.result() for part in parts))
        await caller.ask([*said, found], tools=[SHELL_TOOL])

    async with house(RUNS, {"content": "Found."}) as home:
        first = await home.session(metadata={"kind_rules": rules})
        await leading(first)
        original = await captured(home, first)
    assert [one.kind for one in original.exchanges].count(Kind.SUBAGENT) == 6
    for at in range(1, 9):
        async with house(RUNS, {"content": "Found."}) as home:
            replay = replay_of(original, at)
            fork = await home.session(replay=replay, metadata={"kind_rules": rules})
            await leading(fork)
            again = await captured(home, fork)
        assert facts_of(replay) == {"replayed": at, "left": 0, "verdict": "exact", "noise": []}
        given_again = {one.extra["replayed"] for one in again.exchanges if "replayed" in one.extra}
        assert given_again == {one.exchange_id for one in original.exchanges[:at]}
        stats = rebuild(again).metadata["stats"]
        old = sum(len(one.output_ids) for one in original.exchanges[:at])
        assert stats["tokens_excluded"].get("replayed", 0) == old
        assert stats["tokens_trained"] + old == stats["tokens_captured"]


async def test_a_fork_across_a_weight_update_trains_what_the_new_weights_sampled_alone():
    async with house(RUNS) as home:
        first = await home.session()
        messages = [user("go")]
        for version in (1, 2):
            await home.gateway.set_policy(SetPolicy(version=version))
            messages.append(await first.ask(messages, tools=[SHELL_TOOL]))
            messages += [tool_result(one, "done") for one in messages[-1].get("tool_calls", ())]
            messages.append(user("more"))
        await first.ask(messages, tools=[SHELL_TOOL])
        original = await captured(home, first)
        await home.gateway.set_policy(SetPolicy(version=3))
        fork = await home.session(replay=replay_of(original, 2))
        await fork.ask([user("go")], tools=[SHELL_TOOL])
        await fork.ask(messages[:4], tools=[SHELL_TOOL])
        await fork.ask(messages, tools=[SHELL_TOOL])
        again = await captured(home, fork)
    of_session, of_fork = (
        [one.versions[0].version for one in capture.exchanges] for capture in (original, again)
    )
    assert (of_session, of_fork) == ([1, 2, 2], [1, 2, 3])
    (trace,) = rebuild(again).traces
    trained = trace.loss_mask == 1
    assert set(trace.versions[trained]) == {3}
    assert set(trace.versions) >= {1, 2, 3}

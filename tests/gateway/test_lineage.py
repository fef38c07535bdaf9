"""Changes of a harness to its history are counted in its session's statistics."""

import time

import numpy as np
import orjson
import pytest
from tests.gateway.house import SHELL_TOOL, house, tool_result, user
from tests.gateway.test_data import request
from tests.gateway.test_restore import again, on_disk

from bridle.config import SamplingPolicy
from bridle.gateway import lineage
from bridle.prompting.prompt import PromptIds


def system(text):
    return {"role": "system", "content": text}


async def stats_of(home, caller):
    _, trajectory = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
    return trajectory["metadata"]["stats"]


def counts(stats):
    return {name: stats[f"turns_{name}"] for name in ("verbatim", "rerendered", "foreign", "given")}


async def test_a_clock_in_the_system_prompt_makes_each_turn_a_root_with_that_reason():
    async with house(*({"content": f"turn {n}"} for n in range(10))) as home:
        caller = await home.session()
        history = [user("go")]
        for turn in range(10):
            history.append(await caller.ask([system(f"It is 10:0{turn}."), *history]))
            history.append(user("on"))
        stats = await stats_of(home, caller)
        sampled = [len(exchange.output_ids) for exchange in caller.exchanges]
    assert (stats["roots"], stats["merge_ratio"]) == (10, 0.0)
    assert stats["habits"] == {"system_changed": 9}
    assert counts(stats) == {"verbatim": 0, "rerendered": 45, "foreign": 0, "given": 0}
    assert stats["tokens_rerendered"] == sum(sum(sampled[:turn]) for turn in range(10))
    assert [found["reason"] for found in stats["breaks"]] == ["history_changed"] * 9


async def test_a_sliding_window_of_history_is_counted_as_rerendered_turns():
    async with house(*({"content": f"turn {n}"} for n in range(8))) as home:
        caller = await home.session()
        history = [user("go")]
        for turn in range(8):
            history.append(await caller.ask([system("s"), *history[-3:]]))
            history.append(user(f"on {turn}"))
        stats = await stats_of(home, caller)
    assert stats["merge_ratio"] < 0.2
    assert counts(stats) == {"verbatim": 1, "rerendered": 6, "foreign": 0, "given": 0}


async def test_masked_observations_are_counted_as_rerendered_turns():
    turns = [{"content": f"LOOK {n}"} for n in range(5)]
    async with house(*turns) as home:
        caller = await home.session()
        history = [system("s"), user("go")]
        for turn in range(5):
            shown = [
                user("[gone]")
                if one["content"].startswith("saw") and at < len(history) - 1
                else one
                for at, one in enumerate(history)
            ]
            history.append(await caller.ask([*shown, history[-1]]))
            history.append(user(f"saw {turn}"))
        stats = await stats_of(home, caller)
    assert counts(stats)["rerendered"] > 0
    assert stats["turns_shown"] == 10
    assert stats["turns_verbatim"] < 10


async def test_turns_of_an_append_only_harness_are_verbatim_and_its_examples_given():
    shell = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
    async with house(
        {"content": "unused"}, shell, {"content": "one file"}, {"content": "x"}
    ) as home:
        caller = await home.session()
        examples = [user("2+2?"), {"role": "assistant", "content": "4"}, user("list")]
        history = [*examples, await caller.ask(examples, tools=[SHELL_TOOL])]
        history.append(tool_result(history[-1]["tool_calls"][0], "a.txt"))
        history += [await caller.ask(history, tools=[SHELL_TOOL]), user("more")]
        await caller.ask(history, tools=[SHELL_TOOL])
        stats = await stats_of(home, caller)
    assert counts(stats) == {"verbatim": 3, "rerendered": 0, "foreign": 0, "given": 3}
    assert (stats["turns_shown"], stats["merge_ratio"], stats["roots"]) == (3, 1.0, 1)


async def test_a_turn_that_the_harness_appended_text_to_counts_as_rerendered():
    async with house({"content": "I run <f>ls"}, {"content": "done"}) as home:
        caller = await home.session()
        turn = await caller.ask([user("go")])
        await caller.ask([user("go"), turn | {"content": turn["content"] + "</f>"}, user("on")])
        stats = await stats_of(home, caller)
    assert counts(stats) == {"verbatim": 0, "rerendered": 1, "foreign": 0, "given": 0}
    assert stats["merge_ratio"] == 0.0


async def test_counts_of_verbatim_turns_continue_after_a_restart(tmp_path):
    turns = ({"content": "one"}, {"content": "two"}, {"content": "three"})
    async with on_disk(tmp_path / "c.sqlite", *turns) as home:
        caller = await home.session("s")
        history = [user("go"), await caller.ask([user("go")]), user("on")]
        history += [await caller.ask(history), user("on")]
    async with on_disk(tmp_path / "c.sqlite", *turns) as home:
        await again(home, caller).ask(history)
        stats = await stats_of(home, caller)
    assert counts(stats) == {"verbatim": 3, "rerendered": 0, "foreign": 0, "given": 0}
    assert stats["merge_ratio"] == 1.0


async def test_few_shot_examples_still_count_as_given_after_a_restart(tmp_path):
    examples = [user("2+2?"), {"role": "assistant", "content": "4"}]
    turns = [{"content": f"turn {n}"} for n in range(3)]
    async with on_disk(tmp_path / "c.sqlite", *turns) as home:
        caller = await home.session("s")
        for clock in ("10:00", "10:01"):
            await caller.ask([system(clock), *examples, user("3+3?")])
    async with on_disk(tmp_path / "c.sqlite", *turns) as home:
        await again(home, caller).ask([system("10:02"), *examples, user("3+3?")])
        stats = await stats_of(home, caller)
    assert counts(stats) == {"verbatim": 0, "rerendered": 0, "foreign": 0, "given": 3}


async def test_few_shot_examples_still_count_as_given_after_a_clock_jump_and_a_restart(
    tmp_path, monkeypatch
):
    """The clock goes back an hour before the second call, whose foreign turn no example is."""
    example, foreign = ({"role": "assistant", "content": text} for text in ("4", "by hand"))
    turns = [{"content": f"turn {n}"} for n in range(5)]
    now = time.time
    async with on_disk(tmp_path / "c.sqlite", *turns) as home:
        caller = await home.session("s")
        await caller.ask([user("2+2?"), example, user("3+3?")])
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        await caller.ask([user("other"), foreign, user("3+3?")])
    async with on_disk(tmp_path / "c.sqlite", *turns) as home:
        for clock in ("10:00", "10:01"):
            await again(home, caller).ask([system(clock), user("2+2?"), example, user("3+3?")])
        await again(home, caller).ask([system("now"), user("other"), foreign, user("3+3?")])
        stats = await stats_of(home, caller)
    assert counts(stats) == {"verbatim": 0, "rerendered": 0, "foreign": 2, "given": 3}


async def test_an_engine_made_prompt_extends_the_turn_whose_token_ids_it_begins_with():
    async with house({"content": "a"}, {"content": "b"}) as home:
        caller = await home.session()
        await caller.ask([user("go")])
        parent = caller.calls[0]
        before, output_ids = parent.sampled()
        whole = np.concatenate((before.array(), output_ids, output_ids))
        assert lineage.standing(PromptIds.root(whole), parent) is parent
        assert lineage.standing(PromptIds.root(whole[1:]), parent) is None
        assert lineage.standing(PromptIds.root(whole), None) is None


async def test_on_rewrite_fork_starts_a_root_at_a_turn_with_dropped_text():
    for policy, roots in ((SamplingPolicy(), 1), (SamplingPolicy(on_rewrite="fork"), 2)):
        turn = {"content": "I look.", "tool_calls": [{"name": "bash", "arguments": {}}]}
        async with house(turn, {"content": "done"}) as home:
            caller = await home.session(sampling=policy)
            echo = await caller.ask([user("go")], tools=[SHELL_TOOL])
            dropped = [user("go"), echo | {"content": None}]
            await caller.ask(
                [*dropped, tool_result(echo["tool_calls"][0], "x")], tools=[SHELL_TOOL]
            )
            stats = await stats_of(home, caller)
        assert (stats["roots"], stats["drift"]) == (roots, {"text_dropped": 1})
        assert stats["turns_verbatim" if roots == 1 else "turns_rerendered"] == 1


async def test_identical_replies_get_one_continuation_each_also_after_a_restart(tmp_path):
    turns = ({"content": "same"}, {"content": "next"})
    path = tmp_path / "c.sqlite"
    async with on_disk(path, *turns) as home:
        caller = await home.session("s")
        for _ in range(2):
            answer = await caller.ask([user("go")])
        await caller.ask([user("go"), answer, user("on")])
    async with on_disk(path, *turns) as home:
        await again(home, caller).ask([user("go"), answer, user("on")], temperature=0.5)
        children = [exchange.continues for exchange in again(home, caller).exchanges[2:]]
    assert len(set(children)) == 2


async def test_ties_between_equal_replies_are_counted_by_what_decided_them():
    async with house({"content": "same"}, {"content": "next"}) as home:
        caller = await home.session()
        for _ in range(2):
            answer = await caller.ask([user("go")])
        for text in ("on", "off"):
            await caller.ask([user("go"), answer, user(text)])
        assert (await stats_of(home, caller))["ties"] == {"newest": 1, "childless": 1}


THINK_ONLY = {"raw": "<think>\nI wonder.\n</think>\n\n<|im_end|>"}


@pytest.mark.parametrize("echoed", [True, False])
async def test_a_reply_of_reasoning_only_is_extended(echoed):
    async with house(THINK_ONLY, {"content": "yes"}) as home:
        caller = await home.session()
        turn = await caller.ask([user("go")])
        assert (turn["content"] or "", turn["reasoning_content"]) == ("", "I wonder.")
        kept = {"role": "assistant", "content": ""}
        shown = kept | ({"reasoning_content": "I wonder."} if echoed else {})
        await caller.ask([user("go"), shown, user("well?")])
        stats = await stats_of(home, caller)
    assert (stats["roots"], stats["turns_verbatim"], stats["merge_ratio"]) == (1, 1, 1.0)


async def test_a_reply_of_reasoning_only_is_extended_in_anthropic_s_and_google_s_dialect():
    asked = {"role": "user", "content": "go"}
    more = {"role": "user", "content": "well?"}
    async with house(THINK_ONLY, {"content": "yes"}) as home:
        caller = await home.session()
        path = f"/s/{caller.session_id}/v1/messages"
        body = {"model": "m", "max_tokens": 200, "messages": [asked]}
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        _, _, raw = await request(home, "POST", path, key=caller.handle.key, body=body)
        turn = {"role": "assistant", "content": orjson.loads(raw)["content"]}
        assert turn["content"][0]["thinking"] == "I wonder."
        body["messages"] = [asked, turn, more]
        await request(home, "POST", path, key=caller.handle.key, body=body)
        assert (await stats_of(home, caller))["turns_verbatim"] == 1

        caller = await home.session()
        path = f"/s/{caller.session_id}/v1beta/models/m:generateContent"
        contents = [{"role": "user", "parts": [{"text": "go"}]}]
        _, _, raw = await request(
            home, "POST", path, key=caller.handle.key, body={"contents": contents}
        )
        turn = orjson.loads(raw)["candidates"][0]["content"]
        contents += [turn, {"role": "user", "parts": [{"text": "well?"}]}]
        await request(home, "POST", path, key=caller.handle.key, body={"contents": contents})
        assert (await stats_of(home, caller))["turns_verbatim"] == 1, turn

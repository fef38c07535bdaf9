"""Sub-agents and compacted conversations without a mark, over real HTTP."""

from tests.gateway.house import SHELL_TOOL, house, tool_result, user
from tests.gateway.test_restore import again, on_disk

from bridle.testing import scripted_engine
from bridle.types import JSON, Kind

SPAWN = {
    "type": "function",
    "function": {
        "name": "agent",
        "parameters": {"type": "object", "properties": {"task": {"type": "string"}}},
    },
}
TOOLS = [SHELL_TOOL, SPAWN]
START: JSON = {"tool_calls": [{"name": "agent", "arguments": {"task": "Count the files."}}]}
LOOK: JSON = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}


def system(text):
    return {"role": "system", "content": text}


async def test_a_conversation_whose_task_is_in_a_tool_call_is_a_subagent_and_stays_one():
    scripts: list[JSON] = [
        {"when": {"system_contains": "You count."}, "turns": [LOOK, {"content": "One."}]},
        {"turns": [START, {"content": "There is one file."}]},
    ]
    engine = scripted_engine(conversations=scripts)
    async with house(engine=engine) as home:
        caller = await home.session()
        main = [user("How many files?")]
        main.append(await caller.ask(main, tools=TOOLS))
        sub = [system("You count."), user("Count the files.")]
        sub.append(await caller.ask(sub, tools=[SHELL_TOOL]))
        sub.append(tool_result(sub[-1]["tool_calls"][0], "a.txt"))
        sub.append(await caller.ask(sub, tools=[SHELL_TOOL]))
        main.append(tool_result(main[-1]["tool_calls"][0], sub[-1]["content"]))
        await caller.ask(main, tools=TOOLS)
        exchanges = caller.exchanges
    assert [e.kind for e in exchanges] == [Kind.AGENT, Kind.SUBAGENT, Kind.SUBAGENT, Kind.AGENT]
    assert [e.extra.get("kind_rule") for e in exchanges] == [None, "spawned", "spawned", None]
    assert [e.root_reason for e in exchanges] == ["first", "first", None, None]
    assert exchanges[1].continues is None


async def test_a_conversation_that_begins_with_our_summary_continues_it():
    scripts: list[JSON] = [
        {
            "when": {"system_contains": "context summarization agent"},
            "turns": [{"content": "<summary>Files were counted.</summary>"}],
        },
        {"turns": [{"content": "One."}]},
    ]
    engine = scripted_engine(conversations=scripts)
    async with house(engine=engine) as home:
        caller = await home.session()
        await caller.ask([user("How many files?")], tools=TOOLS)
        summing = [system("You are a context summarization agent."), user("Sum up.")]
        await caller.ask(summing, {"User-Agent": "opencode/1.0"})
        answer = user("Summary of what was done:\nFiles were counted.")
        after = [answer, await caller.ask([answer], tools=TOOLS), user("On.")]
        await caller.ask(after, tools=TOOLS)
        first, summary, successor, last = caller.exchanges
    assert [e.kind for e in (first, summary, successor)] == [
        Kind.AGENT,
        Kind.COMPACTION,
        Kind.AGENT,
    ]
    assert (successor.parent_id, successor.continues) == (None, summary.exchange_id)
    assert successor.root_reason == "summarised"
    assert last.parent_id == successor.exchange_id


async def test_a_first_message_that_no_call_of_the_session_holds_makes_no_subagent():
    async with house(START, {"content": "Done."}) as home:
        caller = await home.session()
        await caller.ask([user("How many files?")], tools=TOOLS)
        await caller.ask([user("Count the files, please.")], tools=TOOLS)
        assert [e.kind for e in caller.exchanges] == [Kind.AGENT, Kind.AGENT]


async def test_a_restarted_gateway_still_recognises_subagents(tmp_path):
    path = tmp_path / "capture.sqlite"
    async with on_disk(path, START, {"content": "Done."}) as home:
        caller = await home.session("one")
        await caller.ask([user("How many files?")], tools=TOOLS)
    async with on_disk(path, {"content": "One."}) as home:
        caller = again(home, caller)
        await caller.ask([user("Count the files.")], tools=[SHELL_TOOL])
        assert [e.kind for e in caller.exchanges] == [Kind.AGENT, Kind.SUBAGENT]

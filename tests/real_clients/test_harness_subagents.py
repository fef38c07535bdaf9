"""Ten turns of programs that start agents of their own, two of them at once in one turn.

Each agent is a conversation of its own, of kind `subagent`, beside that of who started it; none of
the three loses a token or forks.
"""

import pytest
from tests.real_clients.matrix import cases, wanted
from tests.real_clients.side_by_side import Run, Script, never_forked, side_by_side, succeeded
from tests.real_clients.work import TEN, TOOLS, Turn, ten_turns, the_files_are_right, tool

from bridle.types import Kind

pytestmark = [pytest.mark.harnesses, pytest.mark.core, pytest.mark.timeout(1800)]

START = {
    "claude_agent_sdk": lambda name, text: tool(
        "Agent", description=name, prompt=text, subagent_type="general-purpose"
    ),
    "claude_code": lambda name, text: tool(
        "Agent", description=name, prompt=text, subagent_type="general-purpose"
    ),
    "cline": lambda name, text: tool(
        "spawn_agent", systemPrompt=f"You do {name} of a work.", task=text
    ),
    "codex": lambda _, text: tool("multi_agent_v1__spawn_agent", message=text),
    "copilot": lambda name, text: tool(
        "task",
        name=name,
        description=name,
        prompt=text,
        agent_type="general-purpose",
        mode="sync",
    ),
    "gemini_cli": lambda _, text: tool("invoke_agent", agent_name="generalist", prompt=text),
    "hermes": lambda name, text: tool("delegate_task", goal=text, context=name),
    "opencode": lambda name, text: tool(
        "task", description=name, prompt=text, subagent_type="general"
    ),
    "qwen_code": lambda name, text: tool(
        "agent",
        description=name,
        prompt=text,
        subagent_type="general-purpose",
        run_in_background=False,
    ),
}
"""The call by which each program starts an agent: name and instruction -> call."""

NO_AGENTS = {
    "aider": "the program starts no agents",
    "google_adk": "agents that start agents are for the SDK's user to write",
    "mini_swe_agent": "the program starts no agents",
    "openai_agents": "agents that start agents are for the SDK's user to write",
    "openclaw": "off: its tools for agents change the end of each request, so none would extend",
    "openhands": "its default agent starts no agents",
    "pi": "the program starts no agents",
}
CASES = [case.row for case in cases() if case.harness not in NO_AGENTS]
"""Why the others start none."""
SETTINGS = {"codex": {"multi_agent": True}}
CONTEXT = 262_144
"""So much that no program compacts."""
PARTS = ("part-a", "part-b")
STARTED_AT = 3
"""The turn before which the agents are started."""


def script(harness: str, dialect: str, *, lines: int = 9000) -> Script:
    """The conversations of both agents, then that of who starts them; see `ten_turns`."""

    def conversations(mark, folder):
        tools = TOOLS[harness]
        made = [_part(tools, harness, part, mark, folder) for part in PARTS]
        turns = ten_turns(harness, folder, dialect, lines=lines)
        both = " && ".join(f"test -e '{folder}/{part}.txt'" for part in PARTS)
        asked = [START[harness](part, f"Do {part}. {mark} {part}") for part in PARTS]
        between = [
            {"reasoning": "Two agents.", "content": "I start two.", "tool_calls": asked},
            {
                "content": "Are they done?",
                "tool_calls": [tools.run(f"until {both}; do sleep 0.1; done")],
            },
        ]
        main = [*turns[:STARTED_AT], *between, *turns[STARTED_AT:]]
        return [*made, {"when": {"user_contains": mark}, "turns": main}]

    return conversations


def _part(tools, harness, part, mark, folder):
    file = f"{folder}/{part}.txt"
    last: Turn = {"content": f"I did {part}."}
    if harness == "gemini_cli":  # its agents end with a call
        last["tool_calls"] = [tool("complete_task", result={"response": f"I did {part}."})]
    turns = [
        {"reasoning": f"{part}…", "content": " Mine:\n", "tool_calls": [tools.run("ls -a")]},
        {"tool_calls": [tools.run(f"echo é > '{file}'"), tools.run("ls /no/such")]},
        last,
    ]
    return {"when": {"user_contains": f"{mark} {part}"}, "turns": turns}


async def test_sub_agents_of_a_harness_are_separate_traces(tmp_path, subtests, tried):
    made = " && ".join(f'test "$(cat {part}.txt)" = é' for part in PARTS)
    runs = [
        Run(
            harness,
            dialect,
            script(harness, dialect),
            check=f"{made} && {the_files_are_right()}",
            settings=SETTINGS.get(harness, {}),
        )
        for harness, dialect in CASES
        if wanted(harness)
    ]
    for ran in await side_by_side(tmp_path, runs, context_length=CONTEXT):
        row = (ran.run.harness, ran.run.dialect, "subagent")
        with (
            subtests.test(ran.run.name),
            tried(*row),
        ):
            succeeded(ran)
            never_forked(ran, roots={Kind.AGENT: 1, Kind.SUBAGENT: 2})
            lengths = sorted(len(tree) for tree in ran.roots())
            assert lengths == [3, 3, TEN + 2], ran.table()


def test_harnesses_without_sub_agents_have_a_noted_table_cell(cell):
    others = [case for case in cases() if case.harness in NO_AGENTS]
    assert {case.harness for case in others} == NO_AGENTS.keys()
    for case in others:
        cell(*case.row, "subagent", "n/a", NO_AGENTS[case.harness])

"""A session's own kind rules: from its task's TOML to what trains."""

import tomllib

import pytest
from tests.gateway.house import SHELL_TOOL, house, tool_result, user

from bridle.config import Task
from bridle.types import Kind

TOML = """
task_id = "t"
instruction = "go"
[agent]
harness = "command"
command = "gptme"
[[agent.kind_rules]]
name = "names"
kind = "side"
system_contains = "conversation titles"
"""
TITLE = [{"role": "system", "content": "Generate concise conversation titles."}, user("go")]
CALL = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}


def declared():
    """The rules of a task file as a session's metadata has them."""
    rules = Task.model_validate(tomllib.loads(TOML)).agent.kind_rules
    return [rule.model_dump(mode="json") for rule in rules]


async def test_a_declared_rule_makes_a_call_a_side_call_that_does_not_train():
    async with house(CALL, {"content": "done"}, {"content": "A title"}) as home:
        options = {"harness": "command", "kind_rules": declared()}
        caller = await home.session(metadata=options)
        message = await caller.ask([user("go")], tools=[SHELL_TOOL])
        result = tool_result(message["tool_calls"][0], "a")
        await caller.ask([user("go"), message, result], tools=[SHELL_TOOL])
        await caller.ask(TITLE)
        *_, title = caller.exchanges
        assert (title.kind, title.extra["kind_rule"]) == (Kind.SIDE, "names")
        _, trajectory = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
        stats = trajectory["metadata"]["stats"]
        assert stats["tokens_excluded"] == {"kind": len(title.output_ids)}


async def test_a_declared_kind_rule_does_not_exclude_the_only_conversation():
    async with house({"content": "A title"}) as home:
        caller = await home.session(metadata={"kind_rules": declared()})
        await caller.ask(TITLE)
        _, trajectory = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
        stats = trajectory["metadata"]["stats"]
        assert stats["tokens_trained"] == stats["tokens_captured"] > 0


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"name": "a", "kind": "side"}], "needs system_contains, last_user_contains, model"),
        ([{"name": "a", "kind": "title", "model": "m"}], "'agent', 'subagent', 'compaction'"),
        ([{"name": "a", "kind": "side", "modle": "m"}], "0.modle: Extra inputs"),
        ("names", "given: 'names'"),
    ],
)
async def test_an_invalid_kind_rule_is_a_400_that_names_its_field(rules, message):
    async with house({"content": "a"}) as home:
        body = {"metadata": {"kind_rules": rules}}
        status, answer = await home.control("POST", "/sessions", body)
        assert status == 400
        assert "metadata.kind_rules" in str(answer)
        assert message in str(answer)

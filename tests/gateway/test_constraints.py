"""Constraints on the form of an answer are enforced, or recorded as not enforced."""

import dataclasses

import pytest
from tests.gateway.house import SHELL_TOOL, house, renderer, scripted, user

from bridle.config import SamplingPolicy
from bridle.gateway.budgets import without_calls
from bridle.scripted.engine import ScriptedEngine
from bridle.types import FinishReason, LogprobMode, Reply, ToolCall, ToolSpec

ANY_OBJECT = {"type": "json_object"}
CALL = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
_FUNCTION = SHELL_TOOL["function"]
BASH = (ToolSpec("bash", _FUNCTION["description"], _FUNCTION["parameters"]),)
FREE = SamplingPolicy(constraints="record")


class Constraining(ScriptedEngine):
    """A scripted engine that says it takes grammars, and keeps those it was given."""

    mode = LogprobMode.RAW

    def __init__(self, *turns):
        super().__init__(scripted(*turns).script)
        self.grammars = []

    async def start(self):
        info = await super().start()
        return dataclasses.replace(info, grammar=True, logprob_mode=self.mode)

    def generate(self, request):
        self.grammars.append(request.grammar)
        return super().generate(request)


class Processed(Constraining):
    """The same, with logprobs of the distribution that was sampled from."""

    mode = LogprobMode.PROCESSED


async def stats_of(home, caller):
    _, trajectory = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
    return trajectory["metadata"]["stats"]


async def test_a_schema_constrains_a_capable_engine_and_the_tokens_are_excluded_from_training():
    engine = Constraining({"content": "{}"})
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with house(engine=engine) as home:
        caller = await home.session()
        await caller.ask([user("go")], response_format=form)
        await caller.ask([user("on")])
        assert engine.grammars == [{"json_schema": schema}, None]
        assert [exchange.constrained for exchange in caller.exchanges] == [True, False]
        assert "unenforced" not in caller.exchanges[0].extra
        stats = await stats_of(home, caller)
        assert stats["tokens_excluded"] == {"constrained": len(caller.exchanges[0].output_ids)}


async def test_constrained_tokens_train_if_logprobs_are_of_the_constrained_distribution():
    async with house(engine=Processed({"content": "{}"})) as home:
        caller = await home.session()
        await caller.ask([user("go")], response_format=ANY_OBJECT)
        assert caller.exchanges[0].constrained
        assert (await stats_of(home, caller))["tokens_excluded"] == {}


@pytest.mark.parametrize(("make", "policy"), [(Constraining, FREE), (scripted, SamplingPolicy())])
async def test_a_schema_that_is_not_enforced_is_recorded_and_the_tokens_train(make, policy):
    """The task wants free samples, or the engine knows no grammars."""
    engine = make({"content": "{}"})
    async with house(engine=engine) as home:
        caller = await home.session(sampling=policy)
        await caller.ask([user("go")], response_format=ANY_OBJECT)
        [exchange] = caller.exchanges
        assert (exchange.constrained, exchange.extra["unenforced"]) == (False, ["response_format"])
        assert getattr(engine, "grammars", [None]) == [None]
        assert (await stats_of(home, caller))["tokens_excluded"] == {}


async def test_a_response_format_that_the_engine_refuses_is_a_400_naming_the_field():
    async with house(engine=Constraining({"content": "a", "fault": 400})) as home:
        caller = await home.session()
        body = {"model": "m", "messages": [user("go")], "response_format": ANY_OBJECT}
        status, reply = await caller.post(body)
        assert (status, reply["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize(
    ("choice", "turn", "held"),
    [
        ("required", CALL, True),
        ("required", {"content": "no"}, False),
        ({"type": "function", "function": {"name": "bash"}}, CALL, True),
        ({"type": "function", "function": {"name": "bash"}}, {"content": "no"}, False),
        ("none", {"content": "no"}, True),
        ("auto", CALL, True),
    ],
)
async def test_a_tool_choice_that_the_model_did_not_keep_is_recorded(choice, turn, held):
    async with house(turn) as home:
        caller = await home.session()
        await caller.ask([user("go")], tools=[SHELL_TOOL], tool_choice=choice)
        [exchange] = caller.exchanges
        assert exchange.extra.get("unenforced") == (None if held else ["tool_choice"])
        assert not exchange.constrained


NO_CALLS = [{"tools": [SHELL_TOOL], "tool_choice": "none"}, {}]


@pytest.mark.parametrize("asked", NO_CALLS, ids=["choice none", "no tools"])
@pytest.mark.parametrize("streams", ["live", "whole", None])
async def test_an_unwanted_tool_call_is_sent_as_text_and_the_next_turn_extends_its_tokens(
    asked, streams
):
    """Nothing of it is lost, none of it is sampled under another distribution, and it trains."""
    sampled = {"content": "I look.", **CALL}
    async with house(sampled, {"content": "Well."}, stream=streams or "whole") as home:
        caller = await home.session()
        if streams:
            chunks = [
                c["choices"][0] for c in await caller.stream([user("go")], **asked) if c != "[DONE]"
            ]
            deltas = [chunk["delta"] for chunk in chunks]
            message = {
                "role": "assistant",
                "content": "".join(d.get("content") or "" for d in deltas),
            }
            assert not any("tool_calls" in delta for delta in deltas)
            assert chunks[-1]["finish_reason"] == "stop"
        else:
            message = await caller.ask([user("go")], **asked)
        assert "tool_calls" not in message
        text = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
        assert message["content"] == f"I look.\n{text}"
        await caller.ask([user("go"), message, user("on")], **asked)
        first, second = caller.exchanges
        assert (first.extra["calls_as_text"], first.constrained) == (1, False)
        assert first.extra.get("stream") == streams
        assert "calls_as_text" not in second.extra
        assert second.parent_id == first.exchange_id
        assert (await stats_of(home, caller))["tokens_excluded"] == {}


async def test_tools_stay_in_the_prompt_with_tool_choice_none():
    async with house({"content": "no"}) as home:
        caller = await home.session()
        await caller.ask([user("go")], tools=[SHELL_TOOL], tool_choice="none")
        await caller.ask([user("on")], tools=[SHELL_TOOL])
        shown = [renderer().decode(exchange.suffix_ids) for exchange in caller.exchanges]
        assert shown[0].replace("go", "on") == shown[1]
        assert '"bash"' in shown[0]


def test_unwanted_calls_that_the_engine_parsed_become_lines_of_text():
    call = ToolCall("call_1", "bash", '{"command": "ls"}')
    line = '{"name": "bash", "arguments": {"command": "ls"}}'
    for content, text in (("I look.", f"I look.\n{line}"), ("", line)):
        reply = without_calls(Reply(content, "hm", (call,), FinishReason.STOP))
        assert reply == Reply(text, "hm", (), FinishReason.STOP, calls_as_text=1)
    plain = Reply("Hello.", None, (), FinishReason.STOP)
    assert without_calls(plain) == plain


async def test_a_required_tool_call_is_a_grammar_in_the_chat_template_s_call_syntax():
    engine = Constraining(CALL)
    async with house(engine=engine) as home:
        caller = await home.session()
        message = await caller.ask([user("go")], tools=[SHELL_TOOL], tool_choice="required")
        assert message["tool_calls"][0]["function"]["name"] == "bash"
        [grammar] = engine.grammars
        assert grammar == {"structural_tag": renderer().call_grammar(BASH, "required")}
        [exchange] = caller.exchanges
        assert exchange.constrained
        assert "unenforced" not in exchange.extra
        assert set((await stats_of(home, caller))["tokens_excluded"]) == {"constrained"}


async def test_a_call_grammar_that_the_engine_refuses_is_dropped_and_recorded_as_unenforced():
    engine = Constraining({"content": "no", "fault": 400, "fault_times": 1})
    async with house(engine=engine) as home:
        caller = await home.session()
        await caller.ask([user("go")], tools=[SHELL_TOOL], tool_choice="required")
        assert [grammar is None for grammar in engine.grammars] == [False, True]
        [exchange] = caller.exchanges
        assert (exchange.constrained, exchange.extra["unenforced"]) == (False, ["tool_choice"])


async def test_a_sampling_policy_can_leave_a_required_tool_choice_unconstrained():
    engine = Constraining(CALL)
    async with house(engine=engine) as home:
        caller = await home.session(sampling=FREE)
        await caller.ask([user("go")], tools=[SHELL_TOOL], tool_choice="required")
        assert engine.grammars == [None]
        assert (await stats_of(home, caller))["tokens_excluded"] == {}


@pytest.mark.parametrize(("make", "left"), [(Constraining, "whole"), (scripted, "live")])
async def test_grammar_constrained_replies_are_sent_whole_and_others_streamed_live(make, left):
    async with house(engine=make({"content": "{}"}), stream="live") as home:
        caller = await home.session()
        await caller.stream([user("go")], response_format=ANY_OBJECT)
        assert caller.exchanges[0].extra["stream"] == left

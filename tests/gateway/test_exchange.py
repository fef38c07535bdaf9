"""A call from its request to its commit, over real HTTP."""

import asyncio
from dataclasses import replace

import numpy as np
import orjson
import pytest
from tests.conformance.memory import MemoryStore
from tests.gateway.gated import Gated
from tests.gateway.house import SHELL_TOOL, house, renderer, scripted, tool_result, user

from bridle.config import FieldPolicy, Limits, SamplingPolicy
from bridle.dialects import DIALECTS
from bridle.dialects.base import Route, RouteKind
from bridle.engines.base import GenerateChunk
from bridle.errors import EngineError, StoreError
from bridle.gateway.call import Asked, Stage
from bridle.trajectory import rebuild
from bridle.types import DeliveryState, Dialect, FinishReason, Kind

CALL = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}


def whole_prompt(exchanges, index):
    """All prompt ids of an exchange, put together from its parents."""
    by_id = {exchange.exchange_id: i for i, exchange in enumerate(exchanges)}
    exchange = exchanges[index]
    if exchange.parent_id is None:
        return exchange.suffix_ids.tolist()
    parent = exchanges[by_id[exchange.parent_id]]
    before = whole_prompt(exchanges, by_id[exchange.parent_id]) + parent.output_ids.tolist()
    return before[: exchange.kept] + exchange.suffix_ids.tolist()


async def test_a_conversation_extends_the_exact_ids_that_were_sampled():
    turns = ({"reasoning": "look", **CALL}, {"content": "one file"}, {"content": "bye"})
    async with house(*turns) as home:
        caller = await home.session()
        messages = [user("list"), await caller.ask([user("list")], tools=[SHELL_TOOL])]
        messages.append(tool_result(messages[1]["tool_calls"][0], "a.txt"))
        messages.append(await caller.ask(messages, tools=[SHELL_TOOL]))
        messages.append(user("thanks"))
        await caller.ask(messages, tools=[SHELL_TOOL])
        exchanges = caller.exchanges
        first, second, third = exchanges
    assert [e.index for e in exchanges] == [0, 1, 2]
    assert [e.parent_id for e in exchanges] == [None, first.exchange_id, second.exchange_id]
    assert [e.continues for e in exchanges] == [None, first.exchange_id, second.exchange_id]
    assert [e.root_reason for e in exchanges] == ["first", None, None]
    for parent, child in ((first, second), (second, third)):
        assert child.kept == parent.prompt_length + len(parent.output_ids)
    text = renderer().decode(np.array(whole_prompt(exchanges, 2), dtype=np.int32))
    assert text.count("look") == 1  # the reasoning stays in context
    assert text.endswith("<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n")


async def test_reasoning_that_the_harness_dropped_is_restored_and_recorded():
    async with house({"reasoning": "hm", "content": "a"}, {"content": "b"}) as home:
        caller = await home.session()
        reply = await caller.ask([user("go")])
        assert reply.pop("reasoning_content") == "hm"
        await caller.ask([user("go"), reply, user("on")])
        assert caller.exchanges[1].extra["reasoning_restored"] is True
        assert caller.exchanges[1].parent_id == caller.exchanges[0].exchange_id
        assert "reasoning_restored" not in caller.exchanges[0].extra


async def test_a_changed_tool_list_starts_a_new_root_with_its_reason_and_predecessor():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        reply = await caller.ask([user("go")], tools=[SHELL_TOOL])
        await caller.ask([user("go"), reply, user("on")])
        first, second = caller.exchanges
    assert (second.parent_id, second.continues) == (None, first.exchange_id)
    assert second.root_reason == "tools_removed"
    assert second.kept == 0


async def test_only_new_messages_are_stored():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        messages = [user("go")]
        for _ in range(4):
            messages += [await caller.ask(messages), user("on")]
        kept = [(e.request.kept_spans, len(e.request.spans)) for e in caller.exchanges]
        bodies = home.store.bodies(caller.session_id)
    assert kept == [(0, 1), (1, 2), (3, 2), (5, 2)]
    assert len(bodies) == 3  # "go", the reply, "on"


async def test_the_effective_sampling_is_used_and_recorded():
    policy = SamplingPolicy(
        temperature=FieldPolicy(mode="respect"),
        seed=FieldPolicy(mode="override", value=5),
        max_output_tokens=50,
    )
    async with house({"content": "a"}) as home:
        caller = await home.session(sampling=policy)
        await caller.ask([user("go")], temperature=0.3, top_p=0.1, stop=["END"], max_tokens=900)
        await caller.ask([user("go on")])
        first, second = (exchange.sampling for exchange in caller.exchanges)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.3, 1.0, -1, 50)
    assert first.stop == ("END",)
    assert first.stop_token_ids == renderer().stop_token_ids
    assert first.seed != second.seed


async def test_the_output_budget_is_the_room_that_the_context_leaves():
    async with house(engine=scripted({"content": "a"}, context_length=300)) as home:
        caller = await home.session()
        await caller.ask([user("go")], max_tokens=100_000)
        exchange = caller.exchanges[0]
        assert exchange.sampling.max_tokens == 300 - exchange.prompt_length


async def test_a_prompt_without_room_is_refused_with_counted_tokens_and_never_sampled():
    async with house(engine=scripted({"content": "a"}, context_length=120)) as home:
        caller = await home.session()
        status, reply = await caller.post({"model": "m", "messages": [user("word " * 100)]})
        assert status == 400
        assert reply["error"]["code"] == "context_length_exceeded"
        assert "120 tokens" in reply["error"]["message"]
        assert caller.exchanges == []
        assert caller.facts.failed_last
        await caller.ask([user("short")])
        assert not caller.facts.failed_last


async def test_a_reply_cut_by_its_length_says_so_and_can_be_extended():
    async with house({"content": "cut of", "finish": "length"}, {"content": "rest"}) as home:
        caller = await home.session()
        body = {"model": "m", "messages": [user("go")]}
        _, reply = await caller.post(body)
        assert reply["choices"][0]["finish_reason"] == "length"
        await caller.ask([user("go"), reply["choices"][0]["message"], user("on")])
        first, second = caller.exchanges
    assert first.finish_reason is FinishReason.LENGTH
    assert second.parent_id == first.exchange_id
    assert second.kept == first.prompt_length + len(first.output_ids)


class AnotherPrompt:
    """An engine that samples under a prompt of its own, and says so."""

    def __init__(self, prompt: bytes):
        self._inner = scripted({"content": "a"})
        self._prompt = prompt

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def generate(self, request):
        async for chunk in self._inner.generate(request):
            yield GenerateChunk(
                chunk.output_ids,
                chunk.logprobs,
                chunk.finish_reason,
                prompt_ids_json=self._prompt,
                versions=chunk.versions,
            )


async def test_an_exchange_is_stored_under_the_ids_that_the_engine_says_it_used():
    async with house(engine=AnotherPrompt(b"[5,6,7]")) as home:
        caller = await home.session()
        reply = await caller.ask([user("go")])
        await caller.ask([user("go"), reply, user("on")])
        first, second = caller.exchanges
        _, trajectory = await home.control("GET", f"/sessions/{caller.session_id}/trajectory")
        reported = trajectory["metadata"]["stats"]["breaks"][0]
        assert (reported["exchange"], reported["reason"]) == (first.exchange_id, "engine_prompt")
    assert first.suffix_ids.tolist() == [5, 6, 7]
    assert first.extra["break"] == {"position": 0, "reason": "engine_prompt"}
    assert (second.parent_id, second.continues) == (None, first.exchange_id)
    assert second.root_reason == "engine_prompt"


async def test_a_parent_session_header_marks_an_exchange_as_a_subagent_s():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([user("go")], {"x-parent-session-id": "p"})
        assert caller.exchanges[0].kind is Kind.SUBAGENT
        assert caller.exchanges[0].extra["kind_rule"] == "subagent_header"


# ---- the store


class GatedStore(MemoryStore):
    """A store whose commits wait for `gate` and may fail."""

    def __init__(self):
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.failures = 0

    async def commit(self, exchange, bodies):
        self.arrived.set()
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise StoreError("disk full at /secret")
        await super().commit(exchange, bodies)


async def test_no_reply_leaves_before_its_exchange_is_committed():
    store = GatedStore()
    async with house({"content": "a"}, store=store) as home:
        caller = await home.session()
        store.gate.clear()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(caller.ask([user("go")]))
            await store.arrived.wait()
            await asyncio.sleep(0.05)
            assert not asking.done()
            store.gate.set()
        assert len(caller.exchanges) == 1


async def test_a_child_that_comes_while_its_parent_is_committed_waits_for_it():
    store = GatedStore()
    async with house({"content": "a"}, {"content": "b"}, store=store) as home:
        caller = await home.session()
        store.gate.clear()
        messages = [user("go"), {"role": "assistant", "content": "a"}, user("on")]
        async with asyncio.TaskGroup() as group:
            group.create_task(caller.ask([user("go")]))
            await store.arrived.wait()
            group.create_task(caller.ask(messages))
            await asyncio.sleep(0.05)
            store.gate.set()
        first, second = caller.exchanges
    assert second.parent_id == first.exchange_id


async def test_a_next_turn_starts_a_root_if_the_turn_it_extends_failed_to_commit():
    store = GatedStore()
    async with house({"content": "a"}, {"content": "b"}, store=store) as home:
        caller = await home.session()
        store.gate.clear()
        store.failures = 1
        messages = [user("go"), {"role": "assistant", "content": "a"}, user("on")]
        async with asyncio.TaskGroup() as group:
            failing = group.create_task(caller.post({"model": "m", "messages": messages[:1]}))
            await store.arrived.wait()
            group.create_task(caller.ask(messages))
            await asyncio.sleep(0.05)
            store.gate.set()
        assert failing.result()[0] == 503
        (exchange,) = caller.exchanges
    assert exchange.parent_id is None
    assert exchange.continues is None
    assert exchange.request.kept_spans == 0


async def test_a_store_that_cannot_write_is_a_store_error_that_leaks_no_path():
    store = GatedStore()
    async with house({"content": "a"}, store=store) as home:
        caller = await home.session()
        store.failures = 1
        status, reply = await caller.post({"model": "m", "messages": [user("go")]})
        assert (status, reply["error"]["code"]) == (503, "store_error")
        assert "secret" not in str(reply)
        assert (caller.facts.turns, caller.facts.failed_last) == (0, True)
        await caller.ask([user("go")])
        assert caller.facts.turns == 1
        assert len(home.store.bodies(caller.session_id)) == 1


# ---- limits


async def test_turns_beyond_the_limit_are_refused_and_the_facts_say_so():
    async with house({"content": "a"}) as home:
        caller = await home.session(limits=Limits(max_turns=1))
        await caller.ask([user("go")])
        before = caller.facts
        status, reply = await caller.post({"model": "m", "messages": [user("more")]})
        assert before.limit is None
        assert status == 429
        assert reply["error"]["code"] == "insufficient_quota"
        facts = caller.facts
        assert facts.limit == "turns"
        assert facts.turns == 1


async def test_a_token_limit_shortens_the_last_call_and_then_refuses():
    async with house({"content": "word " * 50}) as home:
        caller = await home.session(limits=Limits(max_tokens=30))
        await caller.ask([user("go")])
        assert caller.exchanges[0].finish_reason is FinishReason.LENGTH
        assert caller.facts.tokens == 30
        status, _ = await caller.post({"model": "m", "messages": [user("more")]})
        assert (status, caller.facts.limit) == (429, "tokens")


@pytest.mark.parametrize("limit", ["turns", "tokens"])
async def test_rejected_replies_use_up_the_session_s_calls_and_tokens(limit):
    async with house({"content": "a"}) as home:
        measured = await home.session()
        await measured.ask([user("go")])
        most = {"turns": 2, "tokens": 2 * measured.facts.tokens}[limit]
        caller = await home.session(limits=Limits.model_validate({f"max_{limit}": most}))
        for _ in range(2):
            await caller.ask([user("go")])
        status, _ = await caller.post({"model": "m", "messages": [user("go")]})
        assert (status, caller.facts.limit) == (429, limit)
        stats = rebuild(home.store.read(caller.session_id)).metadata["stats"]
        assert stats["rejected"] == {"exchanges": 1, "tokens": measured.facts.tokens}


async def test_calls_in_flight_beyond_the_limit_get_429_rate_limit_exceeded():
    engine = Gated({"content": "a"}, gate=0)
    async with house(engine=engine) as home:
        caller = await home.session(limits=Limits(max_calls_in_flight=1))
        async with asyncio.TaskGroup() as group:
            group.create_task(caller.ask([user("go")]))
            await engine.waits.wait()
            status, reply = await caller.post({"model": "m", "messages": [user("other")]})
            engine.sign.set()
        assert status == 429
        assert reply["error"]["code"] == "rate_limit_exceeded"
        assert caller.facts.limit is None


# ---- engine failures


@pytest.mark.parametrize(
    ("fault", "status"),
    [(429, 429), (503, 503), (529, 503), (500, 503), (400, 400), (404, 500), ("cut", 503)],
)
async def test_an_engines_failure_is_an_error_of_the_dialect_without_its_details(fault, status):
    async with house({"fault": fault, "content": "a"}) as home:
        caller = await home.session()
        reported, reply = await caller.post({"model": "m", "messages": [user("go")]})
        assert reported == status
        assert "scripted" not in str(reply)
        assert caller.facts.failed_last
        assert caller.exchanges == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [429, 500, 503])
async def test_the_gateway_retries_a_call_that_the_engine_refused_before_its_first_token(
    fault, stream
):
    async with house({"content": "ok", "fault": fault, "fault_times": 2}) as home:
        caller = await home.session()
        if stream:
            reported = await caller.stream([user("go")])
            said = "".join(one["choices"][0]["delta"].get("content") or "" for one in reported[:-1])
        else:
            said = (await caller.ask([user("go")]))["content"]
        (exchange,) = caller.exchanges
        assert said == "ok"
        assert (caller.facts.calls, len(exchange.output_ids)) == (1, len(exchange.logprobs))


async def test_a_longer_retry_after_of_the_engine_reaches_the_client():
    refusal = EngineError("full", status=429, retryable=True, retry_after_s=30.0)
    engine = Gated({"content": "a"}, gate=0, error=refusal)
    engine.sign.set()
    async with house(engine=engine) as home:
        caller = await home.session()
        body = {"model": "m", "messages": [user("go")]}
        async with home.client.post(caller.url, json=body, headers=caller.headers) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "30")
    assert engine.asked == 1


async def test_the_gateway_resumes_a_reply_that_the_engine_cut():
    turn = {"content": "a long answer of words", "fault": "cut", "fault_times": 1}
    async with house(turn) as home:
        caller = await home.session()
        reply = await caller.ask([user("go")])
        assert reply["content"] == "a long answer of words"
        (exchange,) = caller.exchanges
        assert exchange.extra["resumed"] >= 1
        assert caller.delivery(0) is DeliveryState.DELIVERED


async def test_an_unexpected_exception_of_the_engine_is_a_500_without_details():
    class Broken(AnotherPrompt):
        async def generate(self, request):
            raise KeyError("internal name")
            yield

    async with house(engine=Broken(b"")) as home:
        caller = await home.session()
        status, reply = await caller.post({"model": "m", "messages": [user("go")]})
        assert status == 500
        assert "internal name" not in str(reply)


async def test_an_image_for_a_text_model_is_a_400():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        message = {"role": "user", "content": [image]}
        status, reply = await caller.post({"model": "m", "messages": [message]})
        assert status == 400
        assert "cannot be shown" in reply["error"]["message"]


async def test_calls_are_refused_while_paused():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await home.control("POST", "/policy", {"paused": True})
        status, reply = await caller.post({"model": "m", "messages": [user("go")]})
        assert (status, reply["error"]["type"]) == (503, "server_error")
        await home.control("POST", "/policy", {"paused": False})
        await caller.ask([user("go")])


async def test_exchanges_record_the_policy_version_set_over_the_control_route():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([user("go")])
        assert (await home.control("POST", "/policy", {"version": 4}))[1]["version"] == 4
        await caller.ask([user("more")])
        versions = [exchange.versions[0].version for exchange in caller.exchanges]
        assert versions == [0, 4]


async def test_two_calls_at_once_do_not_overshoot_the_session_s_tokens():
    turn = {"content": "word " * 30, "delay_s": 0.02}
    async with house(turn) as home:
        caller = await home.session(limits=Limits(max_tokens=50))
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(caller.post({"model": "m", "messages": [user(name)]}))
                for name in ("a", "b", "c")
            ]
        statuses = sorted(task.result()[0] for task in asked)
        assert statuses == [200, 200, 429]
        assert caller.facts.tokens <= 50
        assert caller.facts.limit == "tokens"


async def test_reasoning_tokens_are_those_that_were_sampled_between_the_marks():
    async with house({"reasoning": "first this, then that", "content": "a"}) as home:
        caller = await home.session()
        _, reply = await caller.post({"model": "m", "messages": [user("go")]})
        reported = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
        ids = caller.exchanges[0].output_ids.tolist()
        vocabulary = renderer().tokenizer
        begin, end = (vocabulary.convert_tokens_to_ids(t) for t in ("<think>", "</think>"))
        assert reported == ids.index(end) - ids.index(begin) - 1 > 0
        assert caller.exchanges[0].extra["reasoning_tokens"] == reported


async def test_a_call_cancelled_before_its_task_ran_is_marked_as_failed_and_removed():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        session = home.known(caller.session_id)
        wire, body = DIALECTS[Dialect.OPENAI_CHAT], {"model": "m", "messages": [user("go")]}
        route = Route(Dialect.OPENAI_CHAT, RouteKind.GENERATE)
        request = wire.parse(route, orjson.dumps(body), session.messages)
        call = await home.gateway._exchanges.admit(session, wire, request, Asked())
        assert len(session.running) == 1
        assert call.task is not None
        call.task.cancel()
        async with asyncio.timeout(15):
            await call.done.wait()
        assert call.stage is Stage.FAILED
        assert len(session.running) == 0
        assert not session.calls


@pytest.mark.parametrize(("reported", "shown"), [(5, 5), (-3, 0), (10_000, 11)])
async def test_a_reply_has_no_more_cached_tokens_than_its_prompt_has_tokens(reported, shown):
    """A call that was resumed reports the tokens so far as cached ones of its prompt too."""

    class Caching(Gated):
        async def generate(self, request):
            async for one in self._inner.generate(request):
                yield replace(one, cached_tokens=reported)

    async with house(engine=Caching({"content": "hi"})) as home:
        caller = await home.session()
        caller.url = f"{caller.handle.base_urls['anthropic']}/v1/messages"
        body = {"max_tokens": 99, "messages": [user("go")], "model": "m"}
        status, reply = await caller.post(body)
        assert (status, caller.exchanges[0].prompt_length) == (200, 11)
    usage = reply["usage"]
    assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (shown, 11 - shown)

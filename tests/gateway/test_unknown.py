"""What a request holds that the gateway does not know or see to is served, recorded and counted."""

from typing import Any

import pytest
from tests.gateway.house import SHELL_TOOL, house, renderer, user
from tests.gateway.test_orphans import send

from bridle.config import SamplingPolicy
from bridle.trajectory import rebuild

CALLS = [{"name": "bash", "arguments": {"command": word}} for word in ("ls", "pwd")]


def prompt(caller):
    """The text of the first prompt."""
    return renderer().decode(caller.exchanges[0].suffix_ids)


async def test_unknown_fields_betas_and_blocks_are_counted_where_they_are_new():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        sticker = {"type": "sticker", "name": "smile", "id": "s1"}
        messages = [user([{"type": "text", "text": "look: "}, sticker])]
        headers = {"openai-beta": "odd=v1"}
        messages.append(await caller.ask(messages, headers, frobnicate=1))
        await caller.ask([*messages, user("on")], frobnicate=2)
        first, second = (exchange.extra.get("unknown") for exchange in caller.exchanges)
        assert first == {"frobnicate": 1, "beta: odd=v1": 1, "block: sticker": 1}
        assert second == {"frobnicate": 1}
        stats = rebuild(home.store.read(caller.session_id)).metadata["stats"]
        assert stats["unknown"] == {"beta: odd=v1": 1, "block: sticker": 1, "frobnicate": 2}
        assert 'look: [sticker] {"name":"smile"}' in prompt(caller)


async def test_unknown_fields_inside_new_messages_are_counted():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        part = {"type": "text", "text": "look", "mood": "blue"}
        messages = [{"role": "user", "content": [part], "weight": 2, "empty": None}]
        messages.append(await caller.ask(messages))
        await caller.ask([*messages, user("on")])
        first, second = (exchange.extra.get("unknown") for exchange in caller.exchanges)
        assert (first, second) == ({"message.weight": 1, "text.mood": 1}, None)


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        (
            "/v1/messages",
            {
                "max_tokens": 50,
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {
                                "type": "server_tool_use",
                                "id": "srvtoolu_1",
                                "name": "web_search",
                                "input": {"query": "bridles"},
                            },
                            {
                                "type": "web_search_tool_result",
                                "tool_use_id": "srvtoolu_1",
                                "content": [{"type": "web_search_result", "title": "Tack"}],
                            },
                        ],
                    },
                    user([{"type": "search_result", "source": "s", "title": "t", "content": []}]),
                ],
            },
            ("bridles", "Tack"),
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"type": "web_search_call", "id": "ws", "action": {"query": "bridles"}},
                    user("Tack"),
                ]
            },
            ("bridles", "Tack"),
        ),
        (
            "/v1beta/models/m:generateContent",
            {
                "contents": [
                    {
                        "role": "model",
                        "parts": [
                            {"executableCode": {"language": "PYTHON", "code": "bridles"}},
                            {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "Tack"}},
                        ],
                    },
                    {"parts": [{"text": "on"}]},
                ]
            },
            ("bridles", "Tack"),
        ),
    ],
)
async def test_what_a_provider_s_tool_did_is_shown_to_the_model(path, body, shown):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        status, told = await send(caller, path, body)
        assert status == 200, told
        assert all(word in prompt(caller) for word in shown)
        assert "unknown" not in caller.exchanges[0].extra


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "audio": {"id": "a1"}}, user("on")]},
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 50,
                "messages": [
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "compaction", "content": None, "encrypted_content": "x"}
                        ],
                    },
                    user("on"),
                ],
            },
        ),
        (
            "/v1/responses",
            {"input": [{"type": "compaction", "encrypted_content": "gAAA"}, user("on")]},
        ),
    ],
)
async def test_context_that_only_another_provider_can_read_is_refused(path, body):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        status, told = await send(caller, path, body)
        assert status == 400
        assert "send" in told["error"]["message"]
        assert caller.exchanges == []


async def test_a_turn_that_another_provider_paused_is_refused_by_its_block():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        use = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
        paused = {"role": "assistant", "content": [{"type": "text", "text": "Let me."}, use]}
        body = {"max_tokens": 50, "messages": [user("go"), paused]}
        status, told = await send(caller, "/v1/messages", body)
        assert status == 400
        assert "'server_tool_use'" in told["error"]["message"]


async def test_a_file_of_the_provider_s_is_refused_by_its_block():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        image = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}
        body = {"max_tokens": 50, "messages": [user([image])]}
        status, told = await send(caller, "/v1/messages", body)
        assert (status, told["error"]["type"]) == (400, "invalid_request_error")
        assert "file" in told["error"]["message"]
        assert "'image'" in told["error"]["message"]


async def test_more_calls_than_were_wanted_are_recorded():
    async with house({"tool_calls": CALLS}) as home:
        caller = await home.session()
        await caller.ask(
            [user("go")], tools=[SHELL_TOOL], parallel_tool_calls=False, logit_bias={"1": 2}
        )
        unenforced = caller.exchanges[0].extra["unenforced"]
        assert sorted(unenforced) == ["logit_bias", "parallel_tool_calls"]


SHAPED: dict[str, Any] = {"min_p": 0.1, "repetition_penalty": 1.05, "logit_bias": {"1": 2}}


async def test_min_p_repetition_penalty_and_logit_bias_reach_the_engine_where_the_task_says_so():
    async with house({"content": "a"}) as home:
        policy = SamplingPolicy.model_validate({name: {"mode": "respect"} for name in SHAPED})
        caller = await home.session(sampling=policy)
        await caller.ask([user("go")], **SHAPED)
        (exchange,) = caller.exchanges
        assert {name: getattr(exchange.sampling, name) for name in SHAPED} == SHAPED
        assert "unenforced" not in exchange.extra
        (trace,) = rebuild(home.store.read(caller.session_id)).traces
        assert trace.metadata["sampling"]["logit_bias"] == [{"1": 2}]
        assert trace.metadata["sampling"]["min_p"] == [0.1]


async def test_min_p_repetition_penalty_and_logit_bias_are_unenforced_by_default():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([user("go")], **SHAPED)
        await caller.ask([user("go")], min_p=0, repetition_penalty=1, logit_bias={})
        first, second = caller.exchanges
        assert {getattr(first.sampling, name) for name in SHAPED} == {None}
        assert sorted(first.extra["unenforced"]) == sorted(SHAPED)
        assert "unenforced" not in second.extra


@pytest.mark.parametrize(
    "body",
    [
        {"logit_bias": {"word": 1}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": [1]},
        {"min_p": 2},
        {"repetition_penalty": 0},
    ],
)
async def test_a_wrong_sampling_field_is_refused_by_its_name(body):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        status, told = await caller.post({"model": "m", "messages": [user("go")], **body})
        assert status == 400
        assert next(iter(body)) in told["error"]["param"]


async def test_the_name_of_a_user_reaches_the_prompt():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([{"role": "user", "name": "ada", "content": "hello"}])
        assert "ada: hello" in prompt(caller)

"""Unknown parts of a request are served, recorded and counted."""

import typing
from collections.abc import Iterable
from typing import Any

import pytest
import typing_extensions
from anthropic.types.beta import BetaContentBlockParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.response_output_item import ResponseOutputItem
from tests.gateway.house import SHELL_TOOL, house, renderer, user
from tests.gateway.test_images import Sighted
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


async def test_a_request_of_very_many_unknown_fields_records_some_names_and_their_number():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        fields = {f"{number:05}{'x' * (1000 if number < 9 else 1)}": 1 for number in range(20_000)}
        await caller.ask([user("go")], None, **fields)
        unknown = caller.exchanges[0].extra["unknown"]
        assert (len(unknown), sum(unknown.values()), unknown["more"]) == (1001, 20_000, 19_000)
        assert max(map(len, unknown)) == 200


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
async def test_results_of_provider_run_tools_are_shown_to_the_model(path, body, shown):
    async with house({"content": "a"}) as home:
        caller = await home.session()
        status, answer = await send(caller, path, body)
        assert status == 200, answer
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
        status, answer = await send(caller, path, body)
        assert status == 400
        assert "send" in answer["error"]["message"]
        assert caller.exchanges == []


def value_of(hint):
    """A value of a type of an SDK; an object with all of its fields."""
    members, args = typing.get_origin(hint), typing.get_args(hint)
    if typing_extensions.is_typeddict(hint):
        fields = typing.get_type_hints(hint).items()
        return {name: DATA.get(name) or value_of(field) for name, field in fields}
    if members is typing.Literal:
        return args[0]
    if members is typing.Union:
        return value_of(args[0])
    if members in (list, Iterable):
        return [value_of(args[0])]
    return {str: "c", int: 1, float: 1.0, bool: True}.get(hint, {})


PICTURE = "data:image/png;base64,aGk="
DATA = {"image_url": PICTURE, "url": PICTURE, "data": "aGk="}


ASSISTANT_S = ("thinking", "redacted_thinking", "tool_use")


async def test_every_item_type_of_openai_s_sdk_is_known():
    known = set()
    refused = {"compaction": "of another provider", "item_reference": "not kept by reference"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    async with house(engine=Sighted({"content": "a"})) as home:
        for kind in typing.get_args(ResponseInputItemParam):
            item, caller = value_of(kind), await home.session()
            body = {"input": [user("go"), call, item, user("on")]}
            status, answer = await send(caller, "/v1/responses", body)
            known.add(item["type"])
            if status != 200:
                assert refused.pop(item["type"]) in answer["error"]["message"]
                continue
            (exchange,) = caller.exchanges
            assert "unknown" not in exchange.extra, (item, exchange.extra)
    assert refused == {}
    outputs = typing.get_args(typing.get_args(ResponseOutputItem)[0])
    assert {value_of(item.model_fields["type"].annotation) for item in outputs} <= known


async def test_every_block_type_of_anthropic_s_sdk_is_known():
    refused = {"container_upload": "files are not kept here", "document": "application/pdf"}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    async with house(engine=Sighted({"content": "a"})) as home:
        blocks = filter(typing_extensions.is_typeddict, typing.get_args(BetaContentBlockParam))
        for kind in blocks:
            block, caller = value_of(kind), await home.session()
            role = "assistant" if block["type"] in ASSISTANT_S else "user"
            turns = [{"role": "assistant", "content": [call]}, {"role": role, "content": [block]}]
            body = {"max_tokens": 50, "messages": [user("go"), *turns, user("on")]}
            status, answer = await send(caller, "/v1/messages", body)
            if status != 200:
                assert refused.pop(block["type"]) in answer["error"]["message"]
                continue
            unknown = caller.exchanges[0].extra.get("unknown")
            foreign = {"redacted_thinking": {"redacted_thinking.data": 1}}
            assert unknown == foreign.get(block["type"]), block
    assert refused == {}


async def test_tools_that_are_added_within_the_conversation_are_shown_to_the_model():
    schema = {"type": "object", "properties": {"inches": {"type": "integer"}}}
    later = {"name": "measure", "input_schema": schema, "defer_loading": True}
    own = {"name": "weigh", "description": "Weighs a horse.", "input_schema": schema}
    added = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "measure"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": own}},
    ]
    async with house({"content": "a"}) as home:
        caller = await home.session()
        body = {"max_tokens": 50, "tools": [later], "messages": [user("go"), user(added)]}
        status, answer = await send(caller, "/v1/messages", body)
        assert status == 200, answer
        shown = prompt(caller)
        assert shown.count("inches") == 2
        assert "Weighs a horse." in shown


async def test_an_update_of_the_configuration_in_the_history_is_unenforced():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        update = {"type": "configuration_update", "reasoning": {"effort": "high"}}
        assert (await send(caller, "/v1/responses", {"input": [user("go"), update]}))[0] == 200
        assert caller.exchanges[0].extra["unenforced"] == ["configuration_update"]
        assert "effort" not in prompt(caller)


async def test_a_turn_that_another_provider_paused_is_refused_by_its_block():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        use = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
        paused = {"role": "assistant", "content": [{"type": "text", "text": "Let me."}, use]}
        body = {"max_tokens": 50, "messages": [user("go"), paused]}
        status, answer = await send(caller, "/v1/messages", body)
        assert status == 400
        assert "'server_tool_use'" in answer["error"]["message"]


async def test_a_file_of_the_provider_s_is_refused_by_its_block():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        image = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}
        body = {"max_tokens": 50, "messages": [user([image])]}
        status, answer = await send(caller, "/v1/messages", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert "file" in answer["error"]["message"]
        assert "'image'" in answer["error"]["message"]


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
        stats = rebuild(home.store.read(caller.session_id)).metadata["stats"]
        assert stats["unenforced"] == dict.fromkeys(sorted(SHAPED), 1)


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
        status, answer = await caller.post({"model": "m", "messages": [user("go")], **body})
        assert status == 400
        assert next(iter(body)) in answer["error"]["param"]


async def test_the_name_of_a_user_reaches_the_prompt():
    async with house({"content": "a"}) as home:
        caller = await home.session()
        await caller.ask([{"role": "user", "name": "ada", "content": "hello"}])
        assert "ada: hello" in prompt(caller)

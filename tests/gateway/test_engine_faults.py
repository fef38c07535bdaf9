"""Faults of an engine behind a whole gateway, on vLLM's routes and SGLang's, with bystanders.

One session's calls meet the fault. It gets the fault's kind in its dialect and has no sample;
the samples of the sessions beside it are those of an engine without faults.
"""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import orjson
import pytest
from aiohttp import web
from tests.engines.shapes import SHAPES
from tests.engines.spoilers import each_token, prompt_ids
from tests.engines.test_hostile import SAMPLING, Proxy
from tests.gateway.house import house, scripted, user
from tests.gateway.test_storms import two_workers

TURN = {"content": "Hello, world, and all who live in it. " * 4}
GOOD_BUDGET = 78
ROUTES = ["vllm chat", "vllm generate", "vllm completions", "sglang"]
SILENT_S = 5.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def raw(data, *, then):
    """Write bytes to the socket and `then` end it: `close`, `abort`, or `write_eof` (half)."""

    async def answer(request, _genuine):
        if data:
            request.transport.write(data)
        getattr(request.transport, then)()
        await asyncio.sleep(SILENT_S / 4)
        return web.Response()

    return answer


async def silence(_request, _genuine):
    await asyncio.sleep(30)


async def failing(_request, _genuine):
    return web.json_response({"error": {"message": "no"}}, status=500)


async def drip(request, genuine):
    """A whole reply in pieces of 16 bytes."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for at in range(0, len(genuine), 16):
        await response.write(genuine[at : at + 16])
        await asyncio.sleep(0)
    return response


def edited(edit):
    async def answer(_request, genuine):
        return web.Response(body=edit(genuine), content_type="application/json")

    return answer


FAULTS = {
    "cut": (raw(HEAD + b'Content-Length: 999\r\n\r\n{"choices": [', then="close"), "engine_cut"),
    "half-closed": (raw(HEAD + b"Content-Length: 9\r\n\r\n{", then="write_eof"), "engine_cut"),
    "reset": (raw(b"", then="abort"), "engine_reset"),
    "silence": (silence, "engine_silent"),
    "500": (failing, "engine_500"),
    "garbage": (edited(lambda _: b'{"\x00\xff garbage'), "engine_garbled"),
    "too many ids": (edited(each_token(times=9)), "engine_garbled"),
    "unknown id": (edited(each_token(token=lambda _: 10**6)), "engine_garbled"),
    "NaN": (edited(each_token(logprob=lambda _: float("nan"))), "engine_garbled"),
    "no prompt ids": (edited(prompt_ids(lambda _: None)), "engine_garbled"),
    "drips": (drip, None),
}


BUDGETS = {100 + number: name for number, name in enumerate(FAULTS)}
"""The max_tokens by which the calls that are to meet a fault are known, on every route."""


class Faulty(Proxy):
    """Answers a call by the fault of its budget of tokens, and counts the calls of bystanders."""

    others = 0

    async def answer(self, request):
        body = await request.read()
        if request.method == "POST" and request.path in SAMPLING:
            fields = orjson.loads(body)
            fields |= fields.get("sampling_params") or {}
            budget = fields.get("max_tokens") or fields.get("max_new_tokens")
            if budget in BUDGETS:
                fault, _ = FAULTS[BUDGETS[budget]]
                return await fault(request, (await super().answer(request)).body)
            self.others += budget == GOOD_BUDGET
        return await super().answer(request)


@asynccontextmanager
async def behind(shape):
    """A gateway on an engine of that shape, and the proxy between the two."""
    async with (
        shape.server(scripted(TURN), **shape.serving) as server,
        Faulty(server).open_with() as (proxy, url),
        house(engine=shape.adapter(url, timeout_s=SILENT_S, **shape.reading)) as home,
    ):
        yield home, proxy


def tokens(caller):
    return [(one.output_ids.tolist(), one.logprobs.tolist()) for one in caller.exchanges]


async def asked(caller, budget=GOOD_BUDGET):
    return await caller.post({"model": "m", "messages": [user("hi")], "max_tokens": budget})


@pytest.mark.timeout(180)
@pytest.mark.parametrize("route", ROUTES)
async def test_a_fault_costs_the_call_that_met_it_and_no_other(route):
    async with behind(SHAPES[route]) as (home, proxy):
        first = await home.session()
        assert (await asked(first))[0] == 200
        clean, proxy.others = tokens(first), 0
        faults = dict(FAULTS)
        if route != ROUTES[0]:
            del faults["silence"]  # it takes three times SILENT_S, and is no other there
        poisoned = {name: await home.session() for name in faults}
        beside = [await home.session() for _ in range(4)]
        async with asyncio.TaskGroup() as group:
            bad = {
                name: group.create_task(asked(poisoned[name], budget))
                for budget, name in BUDGETS.items()
                if name in faults
            }
            good = [group.create_task(asked(one)) for one in beside]
        assert [one.result()[0] for one in good] == [200] * len(beside)
        assert [tokens(one) for one in beside] == [clean] * len(beside)
        assert proxy.others == len(beside)
        for name, (_, kind) in faults.items():
            status, reply = bad[name].result()
            facts = poisoned[name].facts
            if kind is None:
                assert (name, status, tokens(poisoned[name])) == (name, 200, clean)
            else:
                assert (name, reply.get("error", {}).get("code")) == (name, kind)
                assert (status in {500, 503}, tokens(poisoned[name])) == (True, [])
                assert (facts.last_error_code, facts.failed_last) == (kind, True)


MESSAGE = {"role": "user", "content": "hi"}
DIALECTS = {
    "/v1/chat/completions": lambda most: {"model": "m", "messages": [MESSAGE], "max_tokens": most},
    "/v1/responses": lambda most: {"model": "m", "input": "hi", "max_output_tokens": most},
    "/v1/messages": lambda most: {"model": "m", "messages": [MESSAGE], "max_tokens": most},
    "/v1beta/models/m:generateContent": lambda most: {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
        "generationConfig": {"maxOutputTokens": most},
    },
}


async def shown(home, budget, path):
    """Status, error and session of a call in the dialect of `path`."""
    caller = await home.session()
    url = caller.handle.base_urls["anthropic"] + path
    key = caller.handle.key
    headers = {**caller.headers, "x-api-key": key, "x-goog-api-key": key}
    body = orjson.dumps(DIALECTS[path](budget))
    async with home.client.post(url, data=body, headers=headers) as response:
        return response.status, orjson.loads(await response.read())["error"], caller


async def test_every_dialect_tells_the_kind_of_an_engine_fault_and_session_facts_its_reason():
    async with behind(SHAPES["sglang"]) as (home, _):
        kinds = [
            (path, budget, FAULTS[name][1])
            for path in DIALECTS
            for budget, name in BUDGETS.items()
            if name in {"cut", "reset", "500", "garbage"}
        ]
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(shown(home, budget, path)) for path, budget, _ in kinds]
        for (path, _, kind), call in zip(kinds, calls, strict=True):
            status, error, caller = call.result()
            assert (path, status in {500, 503}) == (path, True)
            assert error["message"].startswith(f"{kind}: ")
            assert caller.facts.last_error.startswith(f"{error['message']} (")
            assert caller.facts.last_error_code == kind


DRAWN = ("cut", "500", "unknown id")


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("route", ["vllm chat", "sglang"])
async def test_faults_stay_with_their_calls_over_two_workers(route, tmp_path):
    shape = SHAPES[route]
    spec = "sglang:" if route == "sglang" else ""
    async with (
        shape.server(scripted(TURN), **shape.serving) as server,
        Faulty(server).open_with() as (proxy, url),
        two_workers(tmp_path / "data", spec + url) as (_, control),
        aiohttp.ClientSession() as client,
    ):

        async def one(budget):
            """Status and reply of a call of its own session, and what that session has recorded."""
            _, opened = await control("POST", "/sessions", {})
            body = {"model": "m", "messages": [MESSAGE], "max_tokens": budget}
            headers = {"Authorization": f"Bearer {opened['key']}"}
            where = opened["base_url"]["openai"] + "/chat/completions"
            async with client.post(where, json=body, headers=headers) as response:
                said = response.status, await response.json()
            path = f"/sessions/{opened['session_id']}/exchanges"
            return *said, (await control("GET", path))[1]["exchanges"]

        budgets = [budget for budget, name in BUDGETS.items() if name in DRAWN]
        async with asyncio.TaskGroup() as group:
            bad = [group.create_task(one(budget)) for budget in budgets]
            good = [group.create_task(one(GOOD_BUDGET)) for _ in range(4)]
        for budget, task in zip(budgets, bad, strict=True):
            _, reply, recorded = task.result()
            assert (reply["error"]["code"], recorded) == (FAULTS[BUDGETS[budget]][1], [])
        texts = {task.result()[1]["choices"][0]["message"]["content"].strip() for task in good}
        assert texts == {TURN["content"].strip()}
        assert [len(task.result()[2]) for task in good] == [1] * 4
        assert proxy.others == 4

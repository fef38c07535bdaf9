"""A whole gateway for tests: scripted engine, builtin tokenizer, a store, HTTP over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import aiohttp
import orjson
from tests.conformance.memory import MemoryStore

from bridle.capture.records import Store
from bridle.engines.base import EngineInfo
from bridle.gateway.app import GatewayServer
from bridle.gateway.models import OtherModel, Served, make_policy
from bridle.gateway.registry import GatewaySession, SessionHandle
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.renderer import PromptRenderer, load_renderer
from bridle.scripted.engine import ScriptedEngine
from bridle.scripted.script import make_script
from bridle.types import LogprobMode

TOKEN = "control-token-of-a-test"


@lru_cache
def renderer() -> PromptRenderer:
    return load_renderer("builtin")


def scripted(*turns: dict[str, Any], **script: Any) -> ScriptedEngine:
    """An engine that says these turns in every conversation."""
    conversations = script.pop("conversations", [{"turns": list(turns)}])
    return ScriptedEngine(make_script({"conversations": conversations, **script}, "test"))


@lru_cache
def served() -> Served:
    """A policy that answers, for calls that never reach it."""
    info = EngineInfo("m", 1000, LogprobMode.RAW, token_in=True, version=0)
    return make_policy(scripted({"content": "a"}), info, renderer(), lambda: 0)


class House:
    """A running gateway and an HTTP client."""

    def __init__(self, gateway: GatewayServer, store: Store, client: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.store = store
        self.client = client

    async def session(self, session_id: str | None = None, **options: Any) -> Caller:
        return Caller(self, await self.gateway.open_session(session_id, **options))

    def known(self, session_id: str) -> GatewaySession:
        """The gateway's own record of a session: what it holds in memory shows nowhere else."""
        session = self.gateway._registry.get(session_id)
        assert session is not None
        return session

    async def control(self, method: str, path: str, body: object = None, token: str = TOKEN):
        """Status and JSON of a control request."""
        url = f"{self.gateway.control_url}{path}"
        headers = {"Authorization": f"Bearer {token}"}
        data = None if body is None else orjson.dumps(body)
        async with self.client.request(method, url, data=data, headers=headers) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, orjson.loads(raw) if is_json else raw.decode()


class Caller:
    """A harness of one session, speaking OpenAI Chat by hand."""

    def __init__(self, house: House, handle: SessionHandle) -> None:
        self.house = house
        self.handle = handle
        self.session_id = handle.session_id
        self.url = handle.base_urls["openai"] + "/chat/completions"
        self.headers = {"Authorization": f"Bearer {handle.key}"}

    async def post(self, body: object, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON of one request."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.house.client.post(
            self.url, data=data, headers={**self.headers, **(headers or {})}
        ) as response:
            return response.status, orjson.loads(await response.read())

    async def ask(self, messages: object, headers: dict[str, str] | None = None, **more: Any):
        """The assistant message of a reply that must succeed."""
        status, reply = await self.post({"model": "m", "messages": messages, **more}, headers)
        assert status == 200, reply
        return reply["choices"][0]["message"]

    async def stream(self, messages: object, **more: Any) -> list[Any]:
        """The events of a streamed reply, decoded; `[DONE]` as it is."""
        body = orjson.dumps({"model": "m", "messages": messages, "stream": True, **more})
        async with self.house.client.post(self.url, data=body, headers=self.headers) as response:
            assert response.status == 200, await response.read()
            return events(await response.read())

    @property
    def facts(self):
        return self.house.gateway.facts(self.session_id)

    @property
    def exchanges(self):
        return self.house.store.exchanges(self.session_id)

    def delivery(self, index: int):
        """State of the delivery record of the exchange of that index; `None` = no record."""
        record = self.house.store.deliveries(self.session_id).get(self.exchanges[index].exchange_id)
        return None if record is None else record.state

    @property
    def calls(self):
        """Its calls that the gateway knows, in their order."""
        return list(self._session.calls.values())

    @property
    def _session(self):
        return self.house.known(self.session_id)

    async def unclaimed(self) -> None:
        """Wait until its calls have been made and no client waits for one."""
        await self.until(lambda: self.calls and not any(call.clients for call in self.calls))

    def end_grace(self) -> None:
        """Have the grace of all calls that no client waits for be over now."""
        for call in self.calls:
            if call.grace is not None:
                self.house.gateway._deliveries.expire(self._session, call)

    async def until(self, condition) -> None:
        """Wait until `condition()` holds."""
        async with asyncio.timeout(15):
            while not condition():  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.005)


def events(body: bytes) -> list[Any]:
    """Data of an event stream."""
    found = [block[6:] for block in body.decode().split("\n\n") if block.startswith("data: ")]
    return [data if data == "[DONE]" else orjson.loads(data) for data in found]


def user(text: Any) -> Any:
    return {"role": "user", "content": text}


def tool_result(call: Any, text: str) -> Any:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


SHELL_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


@asynccontextmanager
async def house(
    *turns: dict[str, Any],
    engine: Any = None,
    store: Store | None = None,
    models: Sequence[OtherModel] = (),
    **settings: Any,
) -> AsyncIterator[House]:
    """A gateway that says `turns`; leaving it leaves nothing behind."""
    kept = store or MemoryStore()
    gateway = GatewayServer(
        engine=engine or scripted(*turns),
        renderer=renderer(),
        store=kept,
        settings=GatewaySettings(control_token=TOKEN, **settings),
        models=models,
    )
    async with gateway, aiohttp.ClientSession() as client:
        yield House(gateway, kept, client)

"""One policy over many gateways: hold all, load, publish everywhere, go on.

A trainer wraps its own loading in `updating`; `update` has the engines load from a folder, each
once, whichever gateways stand before it. No gateway resumes before all of them know the version,
and a step that fails at one leaves none of them held: sessions then go on under the old version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Protocol, Self

import aiohttp

from bridle.aio import run_shielded
from bridle.engines.base import PauseMode
from bridle.errors import BridleError, EngineError
from bridle.gateway.weights import SetPolicy
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.gateway.app import GatewayServer

RELEASE_S = 60.0
"""Time limit for ending a hold; it also applies after a failure or a cancelled trainer."""

SLACK_S = 30.0
"""Time of an answer beyond the time that a hold may take."""


class Steered(Protocol):
    """A gateway, in this process or another."""

    @property
    def name(self) -> str: ...

    async def steer(self, wanted: SetPolicy) -> JSON:
        """Do it; what `GET /policy` then answers. `EngineError` if it did not do its part."""


class Here:
    """A gateway of this process."""

    def __init__(self, gateway: GatewayServer, name: str = "this gateway") -> None:
        self._gateway = gateway
        self.name = name

    async def steer(self, wanted: SetPolicy) -> JSON:
        await self._gateway.set_policy(wanted)
        return self._gateway.policy()


class There:
    """A gateway at a URL, steered over its control routes; an async context manager."""

    def __init__(self, url: str, token: str) -> None:
        self.name = url.rstrip("/")
        self._token = token

    async def __aenter__(self) -> Self:
        """Nothing is connected yet."""
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"})
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close its connections."""
        await self._http.close()

    async def steer(self, wanted: SetPolicy) -> JSON:
        body = wanted.model_dump(mode="json", exclude_unset=True)
        limit = aiohttp.ClientTimeout(total=None, sock_read=wanted.timeout_s + SLACK_S)
        url = f"{self.name}/policy"
        try:
            async with self._http.post(url, json=body, timeout=limit) as answer:
                status: JSON = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineError(f"no answer: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise EngineError(str((status.get("error") or {}).get("message", answer.status)))
        return status


@asynccontextmanager
async def updating(
    gateways: Sequence[Steered], version: int, *, mode: PauseMode = "abort", timeout_s: float = 60.0
) -> AsyncGenerator[list[JSON]]:
    """Nothing samples within; leaving it publishes `version` to all, and then all go on.

    It gives what each gateway says of its policy, `replicas` among it. `mode` is what a hold does
    to running calls. `EngineError` if a gateway could not be held within `timeout_s`, or did not
    take the version. When the body raises, nothing is published.
    """
    try:
        states = await _all(gateways, SetPolicy(hold=mode, timeout_s=timeout_s))
        yield states
        await _all(gateways, SetPolicy(version=version))
    except BaseException:
        with suppress(EngineError):  # the first error is the one to report
            await run_shielded(_all(gateways, SetPolicy(hold=False)), timeout_s=RELEASE_S)
        raise
    await run_shielded(_all(gateways, SetPolicy(hold=False)), timeout_s=RELEASE_S)


async def update(
    gateways: Sequence[Steered],
    weights: str,
    version: int,
    *,
    mode: PauseMode = "abort",
    timeout_s: float = 60.0,
    load_s: float = 600.0,
) -> None:
    """Have all engines of all gateways load the folder `weights` as `version`; sessions go on.

    A server that several gateways name alike loads once. `load_s` is how long a gateway's engines
    may take. `EngineError` names engines that did not take the weights; the version is then
    published nowhere.
    """
    async with updating(gateways, version, mode=mode, timeout_s=timeout_s) as states:
        shares = _shares([one["replicas"] for one in states])
        load = SetPolicy(weights=weights, version=version, timeout_s=load_s)
        async with asyncio.TaskGroup() as group:
            loads = [
                group.create_task(
                    _answer_or_error(one, load.model_copy(update={"replicas": tuple(share)}))
                )
                for one, share in zip(gateways, shares, strict=True)
                if share
            ]
        _require([error for load in loads if isinstance(error := load.result(), EngineError)])


def _shares(named: list[list[str]]) -> list[list[str]]:
    """Return the replicas that each gateway loads: a server's URL once, an embedded one always."""
    seen: set[str] = set()
    shares = []
    for names in named:
        share = [name for name in names if "://" not in name or name not in seen]
        seen.update(share)
        shares.append(share)
    return shares


async def _all(gateways: Collection[Steered], wanted: SetPolicy) -> list[JSON]:
    """Have all do the same at once; `EngineError` says which did not."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_answer_or_error(one, wanted)) for one in gateways]
    results = [task.result() for task in tasks]
    _require([one for one in results if isinstance(one, EngineError)])
    return [one for one in results if not isinstance(one, EngineError)]


async def _answer_or_error(one: Steered, wanted: SetPolicy) -> JSON | EngineError:
    try:
        return await one.steer(wanted)
    except BridleError as error:
        return EngineError(f"{one.name}: {error}")


def _require(failed: list[EngineError]) -> None:
    if failed:
        raise EngineError("; ".join(map(str, failed)))

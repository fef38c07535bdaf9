"""A runtime of your own: sessions in the sandboxes of a service that is spoken to over HTTP.

Four methods are all that differs between services. This one's API is that of `service.py` beside
this file; put the client of E2B, Daytona, Modal or your cluster in its place.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from bridle.errors import ConfigError
from bridle.runtimes.remote import Host, RemoteRuntime


class HostedRuntime(RemoteRuntime):
    """A runtime that a task names: `runtime.backend = "hosted:HostedRuntime"`."""

    def open_host(self, deployment: dict[str, Any]) -> Host:
        """Return the sandbox of one session; `deployment` is `runtime.kwargs.deployment`."""
        fields = {name: value for name, value in deployment.items() if name != "type"}
        if fields.keys() != {"url", "token"}:
            raise ConfigError(f"deployment: needs url and token, not {sorted(fields)}")
        return Sandbox(**fields)


class Sandbox:
    """One sandbox of the service, from `start` to `stop`."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._http: aiohttp.ClientSession | None = None
        self._at = ""

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(headers=self._headers, raise_for_status=True)
        made = await self._ask("POST", f"{self._url}/sandboxes")
        self._at = f"{self._url}/sandboxes/{made['id']}"

    async def stop(self) -> None:
        if self._http is None:
            return
        try:
            if self._at:
                await self._ask("DELETE", self._at)
        finally:
            await self._http.close()

    async def execute(self, argv: Sequence[str]) -> str:
        done = await self._ask("POST", f"{self._at}/exec", json={"argv": list(argv)})
        if done["exit_code"] != 0:
            raise OSError(f"{argv[0]}: exit code {done['exit_code']}: {done['stderr'][-500:]}")
        return str(done["stdout"])

    async def upload(self, source: Path, path: str) -> None:
        with source.open("rb") as content:
            await self._ask("PUT", f"{self._at}/files", params={"path": path}, data=content)

    async def _ask(self, method: str, url: str, **given: Any) -> Any:
        assert self._http is not None
        async with self._http.request(method, url, **given) as answer:
            return await answer.json()

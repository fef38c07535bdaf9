"""LoRA adapters on a vLLM server: each version of a policy is loaded under a name of its own.

A call names the newest adapter when it begins and keeps it to its end, because vLLM computes calls
of several adapters in one batch. So an update holds nothing, and several trainers can share one
server, each with its own adapters beside the model's weights. A name is never used twice: vLLM's
prefix cache knows an adapter by name and path. The calls of the last two versions can run; with
`--max-loras` below that the newer ones wait. Seen on vLLM 0.32.0.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from bridle.engines.http import EngineClient
from bridle.errors import EngineError

FLAGS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, --enable-lora and --max-loras"
CLOSE_S = 5.0
"""How long unloading at the end may take."""


class LoraAdapters:
    """The adapters that one client has loaded into a server."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._names: list[str] = []

    @property
    def newest(self) -> str | None:
        """Return the server's name of the adapter that calls begin with; `None` = none."""
        return self._names[-1] if self._names else None

    async def load(self, folder: str | Path, model: str, version: int) -> None:
        """Load the adapter in `folder`; those before the present newest are unloaded.

        Raises `EngineError` if the server does not take it; the newest stays then.
        """
        while len(self._names) > 1:
            await self._unload(self._names[0])
            del self._names[0]
        name = f"{model}@{version}-{uuid4().hex[:8]}"
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            known = await self._client.command("/v1/load_lora_adapter", body)
        except EngineError as error:
            fix = f". Is vLLM started with {FLAGS}, and --max-lora-rank of at least its rank?"
            raise EngineError(f"{error}{fix}", status=error.status) from error
        if not known:
            raise EngineError(
                f"{self._client.base_url} does not load the LoRA adapter {folder}: start vLLM with "
                f"{FLAGS}, where it sees this folder"
            )
        self._names.append(name)

    def forget(self) -> None:
        """Leave the adapters as they are on the server."""
        self._names.clear()

    async def unload_all(self) -> None:
        """Unload what was loaded, as far as the server answers."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._names:
                    await self._unload(self._names.pop())

    async def _unload(self, name: str) -> None:
        await self._client.command("/v1/unload_lora_adapter", {"lora_name": name})

"""Adapter for a vLLM server, or any server with its API.

`start` connects and probes (law 8); `generate` sends ids and reads ids, logprobs and versions. It
needs nothing beyond stock vLLM. The three routes differ in `vllm_routes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack
from uuid import uuid4

import msgspec

from bridle.engines import vllm_schemas
from bridle.engines.adapter import (
    ROUTER,
    ServerAdapter,
    ServerOptions,
    as_version,
    read_config,
    tokenizer_dir,
)
from bridle.engines.base import (
    CutError,
    EngineInfo,
    GarbledError,
    GenerateChunk,
    GenerateRequest,
    Immediate,
    PauseMode,
    Picture,
    Seen,
    TextDelta,
    WeightsLostError,
    spans_of,
)
from bridle.engines.connection import AbortedError, HttpCall
from bridle.engines.http import EngineClient
from bridle.engines.ids import ArrayIds
from bridle.engines.probe import Finding, ProbeReport, probe
from bridle.engines.vllm_routes import (
    SAMPLE,
    ImageRenderer,
    MessageText,
    Read,
    VllmRoute,
    call_parts,
    image_finding,
    read_answer,
    read_answers,
)
from bridle.errors import ContextOverflowError, EngineError
from bridle.experts import KEY, reply_extra
from bridle.types import JSON, FinishReason, Ids, Sampling, VersionSpan

ROUTES = (VllmRoute.CHAT, VllmRoute.GENERATE, VllmRoute.COMPLETIONS)
"""Order in which routes are tried if none is chosen."""

VERSIONED_ROUTES = (VllmRoute.GENERATE, VllmRoute.CHAT, VllmRoute.COMPLETIONS)
"""Order for a server with weight routes: its weights may change in mid-reply, and only this route
reports the version of each token (vLLM 0.32.0)."""


class VllmEngine(ServerAdapter, Immediate):
    """Adapter for one vLLM server; an `Engine`, `Versioned`, `Pausable`, `Updatable`,
    `Adaptable`.

    `route` None takes the first of `ROUTES` (`VERSIONED_ROUTES` of a server whose weights can be
    changed) that gives all that training needs.
    """

    def __init__(
        self, base_url: str, *, route: VllmRoute | None = None, **options: Unpack[ServerOptions]
    ) -> None:
        super().__init__(base_url, **options)
        self._images = ImageRenderer(self._client)
        self._adapters = LoraAdapters(self._client)
        self._served: Path | None = None
        """The folder of the server's model, if that is on this machine."""
        self._takes_weights = False
        self._wanted_route = route
        self._calls: dict[str, HttpCall] = {}
        self._route = route or VllmRoute.CHAT
        self._paired: bool | None = None
        self.tells_experts = False
        """True if a reply had routed experts (`--enable-return-routed-experts`)."""

    # ---- life

    async def _connect(self) -> EngineInfo:
        model = await self._choose_model()
        self._model = model["id"]
        length = model.get("max_model_len")
        if not isinstance(length, int):
            raise EngineError(
                f"{self._client.base_url}/v1/models reports no max_model_len: is this vLLM, or "
                f"{ROUTER}"
            )
        self._context_length = length
        self.server_version = (await self._client.get("/version", optional=True)).get("version")
        folder = self._served = tokenizer_dir(model.get("root"))
        weights = await self._client.get("/weight_info", optional=True)
        self._takes_weights = versioned = "weight_version" in weights
        if versioned:
            self.version = as_version(weights["weight_version"], unnamed=self.version)
        report = await self._probe_routes(VERSIONED_ROUTES if versioned else ROUTES)
        info = self._accept(report, folder)
        return replace(
            info,
            pictures=await self._probe_images(report),
            tells_versions=versioned and self._route is VllmRoute.GENERATE,
        )

    async def _choose_model(self) -> JSON:
        listed = (await self._client.get("/v1/models")).get("data") or []
        models = [one for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)]
        names = [one["id"] for one in models]
        if not models:
            raise EngineError(
                f"the vLLM server lists no model at {self._client.base_url}/v1/models"
            )
        if not self._model:
            return models[0]
        if self._model not in names:
            raise EngineError(f"the engine has no model {self._model!r}; it has: {names}")
        return models[names.index(self._model)]

    async def _probe_routes(self, routes: Sequence[VllmRoute]) -> ProbeReport:
        """Probe the chosen route, or each until one is usable; if none is, return the chat's
        report.
        """
        reports: dict[VllmRoute, ProbeReport] = {}
        for route in (self._wanted_route,) if self._wanted_route else routes:
            self._route, self._paired = route, None
            report = await probe(self, assume=self._assumed_mode)
            extra = (*self._server_findings(), *report.findings)
            reports[route] = replace(report, findings=extra)
            if report.usable:
                return reports[route]
        self._route = self._wanted_route or VllmRoute.CHAT
        return reports[self._route]

    def _server_findings(self) -> tuple[Finding, ...]:
        context = Finding("context length", ok=True, needed=True, found=str(self._context_length))
        paired = Finding.check(
            "pairing",
            ok=bool(self._paired),
            found="logprobs name their ids" if self._paired else "logprobs do not name their ids",
            means="A shift between ids and logprobs could not be seen.",
            fix="Use a vLLM that knows `return_tokens_as_token_ids`.",
        )
        weights = weights_finding(served=self._served, routes=self._takes_weights)
        return Finding.note("route", self._route.path), context, paired, weights

    async def pause(self, mode: PauseMode) -> bool:
        """Pause the server's sampling; `False` if it has no control routes. See
        `Pausable.pause`.
        """
        return await self._client.command(f"/pause?mode={mode}")

    async def resume(self) -> None:
        """Continue the server's sampling after a pause."""
        await self._client.command("/resume")

    async def update_weights(self, source: str | Path, version: int) -> None:
        """Load the weights of a folder on the server's machine; see `Updatable.update_weights`.

        Pause it first: vLLM gives tokens that are sampled during the update no version. A server
        that reports no version of its weights is refused before anything is changed.
        """
        if not self._takes_weights:
            raise EngineError(f"the vLLM server {self._client.base_url} takes no weights: {NEEDED}")
        await load_weights(self._client, source, version, served=self._served)
        await self._adapters.unload_all()
        self.version = version

    async def load_adapter(self, folder: str | Path, version: int) -> None:
        """Load a LoRA adapter under a new name into the server; see `Adaptable.load_adapter`."""
        await self._adapters.load(folder, self._model, version)
        self.version = version

    def adapted(self) -> bool:
        """Return whether calls that begin now use a LoRA adapter."""
        return self._adapters.newest is not None

    def forget_adapters(self) -> None:
        """Leave the loaded adapters on the server at the end, because its trainer now uses it."""
        self._adapters.forget()

    async def aclose(self) -> None:
        """End all calls, unload the adapters, and close all connections."""
        for call in list(self._calls.values()):
            call.abort()
        await self._adapters.unload_all()
        await self._client.aclose()

    async def abort(self, request_id: str) -> None:
        """End a call by closing its connection, at which vLLM stops sampling.

        The tokens of a streamed call that were sent are kept; a call without stream returns none.
        """
        if request_id in self._calls:
            self._calls[request_id].abort()

    # ---- images

    async def see(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Seen | None:
        """Return the rendered prompt of messages with images; `None` = the model takes none."""
        return await self._images.see(self._chat_body(messages, tools, arguments))

    def _chat_body(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> JSON:
        body: JSON = {"model": self._model, "messages": messages}
        body["chat_template_kwargs"] = arguments
        return body | ({"tools": tools} if tools else {})

    async def _probe_images(self, report: ProbeReport) -> bool:
        """Return whether the route takes images with token ids; adds a finding to the report."""
        if not report.token_in or self._route is not VllmRoute.GENERATE:
            return False
        message = {"content": [{"type": "image_url", "image_url": {"url": SAMPLE}}], "role": "user"}
        taken = False
        try:
            seen = await self.see([message], None, {})
            taken = seen is not None and await self._takes(seen)
            found = image_finding(seen=seen, ids_taken=taken)
        except EngineError as error:
            found = Finding.note("images", f"not found out: {error}")
        self.report = replace(report, findings=(*report.findings, found))
        return taken

    async def _takes(self, seen: Seen) -> bool:
        """Return whether the engine samples from exactly the ids given with an image."""
        if len(seen.places) != 1:
            return False
        place = Picture(SAMPLE, seen.places[0]["start"], seen.places[0]["length"])
        asked = GenerateRequest(
            f"probe-{uuid4().hex}",
            ArrayIds(seen.ids),
            Sampling(temperature=1.0, max_tokens=1),
            pictures=(place,),
        )
        prompts = [chunk.prompt_ids_json async for chunk in self.generate(asked)]
        return asked.prompt.json() in prompts

    async def template(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Ids:
        """Return the prompt ids that the server's chat route makes of messages."""
        return await self._images.render(self._chat_body(messages, tools, arguments))

    async def parsers(self) -> Finding:
        """Find out the server's parsers by a call of one token."""
        return await find_parsers(self._client, self._model)

    # ---- sampling

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Sample one reply; in one chunk unless asked to stream.

        Raises `EngineError` (retryable or not by the kind of failure), `CutError` for a reply that
        breaks off, `ContextOverflowError` for a prompt that leaves no room.
        """
        length = len(request.prompt)
        if 0 < self._context_length <= length:
            raise ContextOverflowError(length, self._context_length, request.sampling.max_tokens)
        adapter = self._adapters.newest
        call = self._calls.get(request.request_id)
        is_begun = call is not None and call.connection is not None
        if call is None or not is_begun:
            call = self._calls[request.request_id] = HttpCall()
            call.unnamed = self.version
            if adapter is not None and request.model is None:
                call.version = self.version
        state = _Progress(self, request, call.version)
        sent = request.prompt.json() if self._token_in else None
        route = VllmRoute.CHAT if request.by_messages else self._route
        room = self._context_length - length
        body = b""
        if not is_begun:
            parts = call_parts(
                route, request, adapter or self._model,
                room=room, token_in=self._token_in, experts=self.tells_experts,
            )  # fmt: skip
            body = b"".join(parts)
        try:
            if request.stream:
                stream = self._client.stream(route.path, body, call, prompt_tokens=length)
                async with aclosing(stream) as reads:
                    async for answers in reads:
                        for read in self._read(answers, sent, call.unnamed):
                            if (chunk := state.next(read)) is not None:
                                yield chunk
            else:
                answer = await self._client.post(route.path, body, call, prompt_tokens=length)
                state.next(read_answer(answer, unnamed=call.unnamed, sent=sent))
            yield state.last()
        except AbortedError:
            yield state.aborted()
        finally:
            del self._calls[request.request_id]

    # ---- outside of a task

    def begin(self, request: GenerateRequest) -> asyncio.Future[Any] | None:
        """Send a call at once; see `Immediate.begin`.

        `None` for messages and the server's own text, which `generate` handles.
        """
        if request.by_messages or not self._gives_ids:
            return None
        room = self._context_length - request.prompt.length
        if room <= 0:
            return None
        adapter = self._adapters.newest
        parts = call_parts(
            self._route, request, adapter or self._model,
            room=room, token_in=True, experts=self.tells_experts,
        )  # fmt: skip
        call = self._client.connections.begin(self._route.path, *parts, streams=request.stream)
        self._calls[request.request_id] = call
        call.unnamed = self.version
        if adapter is not None and request.model is None:
            call.version = self.version
        return call.waiting

    def arrived(self, request: GenerateRequest) -> GenerateChunk | None:
        """Return the reply to a call that `begin` sent, if it is whole and has a finish reason,
        else `None`.
        """
        call = self._calls[request.request_id]
        if call.connection is None or (answer := call.arrived()) is None:
            return None
        sent = request.prompt.json()
        if (chunk := vllm_schemas.usual_reply(answer, sent)) is not None:
            self._paired = True
        else:
            read = read_answer(bytes(answer), unnamed=call.unnamed, sent=sent)
            self.check(read)
            chunk = read.chunk
        if chunk is None or chunk.finish_reason is None:
            return None
        if call.version is not None or not chunk.versions:
            version = self.version if call.version is None else call.version
            spans = spans_of(version, chunk.output_ids.size)
            chunk = replace(chunk, versions=spans, numbered=False)
        if chunk.extra:
            chunk = replace(chunk, extra=self.placed(chunk, request, read.prompt_tokens))
        return chunk

    def end(self, request: GenerateRequest) -> None:
        """Forget a call that was sent by `begin`, because its reply was used."""
        if (connection := self._calls.pop(request.request_id).connection) is not None:
            self._client.connections.keep(connection)

    def drop(self, request: GenerateRequest) -> None:
        """Abort a call that `begin` sent and that `generate` will not take over."""
        self._client.connections.drop(self._calls.pop(request.request_id))

    def _read(self, answers: list[bytes], sent: bytes | None, unnamed: int) -> Iterator[Read]:
        if self.gives_text:  # each says a text of its own
            return (read_answer(one, unnamed=unnamed, sent=sent) for one in answers)
        if len(answers) == 1 and (chunk := vllm_schemas.usual_event(answers[0])) is not None:
            return iter((Read(chunk, 0, None, True, None, None, True),))  # noqa: FBT003
        return read_answers(answers, unnamed=unnamed, sent=sent)

    def placed(
        self,
        chunk: GenerateChunk,
        request: GenerateRequest,
        prompt_tokens: int | None,
        count: int | None = None,
    ) -> JSON:
        """Return the `extra` of a reply's last chunk: the routed experts, at the positions of their
        tokens.

        `count` is the number of tokens of the reply.
        """
        if KEY not in chunk.extra:
            return chunk.extra
        tokens = (prompt_tokens or len(request.prompt)) + (
            len(chunk.output_ids) if count is None else count
        )
        self.tells_experts = True
        others = {name: value for name, value in chunk.extra.items() if name != KEY}
        return others | reply_extra(chunk.extra[KEY], asked=request.experts_from, tokens=tokens)

    def check(self, read: Read) -> None:
        """Record whether ids and logprobs were paired; refuse a reply that lacks either."""
        if read.paired is not None:
            self._paired = read.paired
        chunk = read.chunk
        if not self._strict or chunk is None:
            return
        if chunk.logprobs.size != chunk.output_ids.size:
            raise GarbledError(
                f"the engine gave {len(chunk.output_ids)} token ids without a logprob of each"
            )
        if chunk.finish_reason is FinishReason.STOP and not read.has_ids:
            raise GarbledError("the engine's reply has no token ids")


_SAYS_NOTHING = (None, TextDelta())


class _Progress:
    """State of one reply; holds the last chunk until versions and usage have arrived."""

    def __init__(self, engine: VllmEngine, request: GenerateRequest, version: int | None) -> None:
        """`version` = that of the call's adapter, whatever the engine reports of its weights."""
        self._engine = engine
        self._request = request
        self._version = version
        self._prompt_tokens: int | None = None
        self._count = 0
        self._cached = 0
        self._spans: tuple[VersionSpan, ...] | None = None
        self._numbered = False
        self._held: GenerateChunk | None = None
        self._parsed = MessageText() if engine.gives_text else None

    def next(self, read: Read) -> GenerateChunk | None:
        """Add a piece; return the chunk to yield, or `None`."""
        self._cached = max(self._cached, read.cached_tokens)
        self._spans = read.spans or self._spans
        self._numbered |= read.chunk is not None and read.chunk.numbered
        self._prompt_tokens = read.prompt_tokens or self._prompt_tokens
        if read.chunk is None:
            return None
        self._engine.check(read)
        chunk = read.chunk
        if self._parsed is not None:
            chunk = replace(chunk, delta=self._parsed.add(read))
        count = chunk.output_ids.size
        self._count += count
        if self._held is not None and count:
            raise GarbledError("the engine sent tokens behind the end of its reply")
        if chunk.finish_reason is not None:
            self._held = self._held or chunk
            return None
        says = count or chunk.prompt_ids_json is not None or chunk.delta not in _SAYS_NOTHING
        return chunk if says else None

    def last(self) -> GenerateChunk:
        """Make the last chunk. Raises `CutError` if the reply broke off before it."""
        held = self._held
        if held is None or held.finish_reason is None:
            raise CutError("the engine closed the stream without a finish reason")
        reply = None if self._parsed is None else self._parsed.reply(held.finish_reason)
        return GenerateChunk(
            held.output_ids,
            held.logprobs,
            held.finish_reason,
            held.stop_text,
            self._versions(),
            prompt_ids_json=held.prompt_ids_json,
            cached_tokens=self._cached,
            reply=reply,
            delta=held.delta,
            extra=self._engine.placed(held, self._request, self._prompt_tokens, self._count),
            numbered=self._numbered and self._version is None,
        )

    def aborted(self) -> GenerateChunk:
        return GenerateChunk.aborted(self._versions(), self._cached)

    def _versions(self) -> tuple[VersionSpan, ...]:
        if self._version is not None:
            return spans_of(self._version, self._count)
        if self._spans is not None:
            return self._spans
        return spans_of(self._engine.version, self._count)


_TOOL: JSON = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
_REFUSAL = "--tool-call-parser"


async def find_parsers(client: EngineClient, model: str) -> Finding:
    """Find out which parsers a vLLM server has for tool calls and reasoning. Never raises.

    The server reports them nowhere, so one token is sampled: a server without `--tool-call-parser`
    refuses a call with a tool, and a `--reasoning-parser` returns the first word as reasoning.
    Bridle parses the sampled ids itself, so both matter only to users of the server's text. Seen on
    vLLM 0.32.0.
    """
    tools = True
    for fields in ({"tools": [_TOOL], "tool_choice": "auto"}, {}):
        body: JSON = {
            "model": model,
            "request_id": f"probe-{uuid4().hex}",
            "messages": [{"role": "user", "content": "."}],
            "max_tokens": 1,
            "temperature": 0.0,
            **fields,
        }
        try:
            text = await client.post(
                vllm_schemas.CHAT, msgspec.json.encode(body), HttpCall(), prompt_tokens=1
            )
            choices = msgspec.json.decode(text, type=vllm_schemas.VllmReply).choices
        except (EngineError, msgspec.MsgspecError) as error:
            if _REFUSAL not in str(error):
                break
            tools = False
            continue
        message = choices[0].message if choices else None
        seen = "seen" if message is not None and message.reasoning else "not seen"
        return Finding.note("parsers", f"reasoning {seen}, tools {'yes' if tools else 'no'}")
    return Finding.note("parsers", "unknown: a chat call of one token fails")


SHAPE = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
"""Fields of a model's configuration that decide the shapes of its weights."""

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
NEEDED = f"use vLLM 0.32 or later, with {DEV_MODE} in its environment"


async def load_weights(
    client: EngineClient, source: str | Path, version: int, *, served: Path | None = None
) -> None:
    """Load the weights in `source`, a folder on the server's machine, as `version` into a vLLM
    server.

    Uses the stock routes that `VLLM_SERVER_DEV_MODE=1` adds: `/collective_rpc` with
    `reload_weights`, `/reset_prefix_cache` and `/update_weight_version`. (vLLM's own weight
    transfer needs NCCL, CUDA IPC or RDMA, and a process group with the trainer.) vLLM drops its
    weights before it opens the folder: a folder that it cannot read, or tensors of other shapes,
    leave it without any, and its next call ends it. So the folder is checked here first. With tied
    embeddings a CPU's head silently keeps the old weights. Seen on vLLM 0.32.0; source:
    `model_executor/model_loader/reload`, `model_executor/layers/utils.py`.

    `served` is the folder of its first weights, if that is on this machine. `EngineError` names a
    folder that cannot be meant, before anything is changed; `WeightsLostError` if the server failed
    in the middle.
    """
    check_folder(Path(source), served)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(source)}}
    try:
        known = await client.command("/collective_rpc", body)
    except EngineError as error:
        if error.status is None:
            raise
        raise WeightsLostError(
            f"{error}. The engine's weights are lost: start it anew, and look whether {source} is "
            "there on its machine with weights of its model's shapes",
            status=error.status,
        ) from error
    if not known:
        raise EngineError(f"the vLLM server {client.base_url} takes no weights: {NEEDED}")
    await client.command("/reset_prefix_cache")
    await client.command("/update_weight_version", {"new_version": str(version)})


def check_folder(source: Path, served: Path | None) -> None:
    """Raise `EngineError` for a weights folder that is empty or of another model than in `served`.

    A path that does not exist here may exist on the server's machine, unless the server's own model
    is here as well.
    """
    if not source.is_dir():
        if served is not None:
            raise EngineError(f"the folder of weights does not exist: {source}")
        return
    if not any(source.glob("*.safetensors")) and not any(source.glob("*.bin")):
        raise EngineError(f"folder {source} has no weights (*.safetensors)")
    if served is None:
        return
    new, old = read_config(source), read_config(served)
    other = [name for name in SHAPE if name in new and name in old and new[name] != old[name]]
    if other:
        differences = ", ".join(f"{name} {new[name]} instead of {old[name]}" for name in other)
        raise EngineError(f"folder {source} has another model than the server's: {differences}")


def weights_finding(*, served: Path | None, routes: bool) -> Finding:
    """Return the probe's finding about weight updates while the server runs."""
    if not routes:
        return Finding(
            "weights",
            ok=False,
            needed=False,
            found="taken at the start only",
            means="A trainer cannot put new ones in.",
            fix=f"U{NEEDED[1:]}, for trainers only: its routes are open to whoever reaches it.",
        )
    tied = served is not None and read_config(served).get("tie_word_embeddings") is True
    return Finding.check(
        "weights",
        ok=not tied,
        found="taken from a folder while it runs" + (", embeddings are tied" if tied else ""),
        means="On a CPU vLLM's head would continue with the old ones.",
        fix="On a CPU serve an untied copy of the model.",
    )


FLAGS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, --enable-lora and --max-loras"
CLOSE_S = 5.0
"""Time that unloading at the end may take."""


class LoraAdapters:
    """LoRA adapters that one client has loaded into a server, one for each version of a policy.

    A call names the newest adapter when it begins and keeps it to its end, because vLLM computes
    calls of several adapters in one batch. So an update holds nothing, and several trainers can
    share one server, each with its own adapters beside the model's weights. A name is never used
    twice: vLLM's prefix cache knows an adapter by name and path. The calls of the last two versions
    can run; with `--max-loras` below that the newer ones wait. Seen on vLLM 0.32.0.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._names: list[str] = []
        self.newest: str | None = None
        """The server's name of the adapter that calls begin with; `None` = none."""

    async def load(self, folder: str | Path, model: str, version: int) -> None:
        """Load the adapter in `folder` into the server, and unload those before the present newest.

        Raises `EngineError` if the server does not take it; the newest one then stays.
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
                f"the vLLM server {self._client.base_url} does not load the LoRA adapter "
                f"{folder}: start vLLM with {FLAGS}, where it sees this folder"
            )
        self._names.append(name)
        self.newest = name

    def forget(self) -> None:
        """Leave the loaded adapters on the server."""
        self._names.clear()
        self.newest = None

    async def unload_all(self) -> None:
        """Unload the adapters that this object loaded, as far as the server answers."""
        self.newest = None
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self._names:
                    await self._unload(self._names.pop())

    async def _unload(self, name: str) -> None:
        await self._client.command("/v1/unload_lora_adapter", {"lora_name": name})

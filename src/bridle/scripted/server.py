"""Any engine as an HTTP server in vLLM's form: chat, tokens in and out, control.

It lets one process sample for others, replaces a vLLM server in tests, and serves the instant
engine of the benchmarks; so prompt ids that come as text are never parsed here, and are returned as
the same bytes. Differences from vLLM, on purpose: it takes any model name, samples one choice
(`n` = 1), always parses reasoning and tool calls of the ChatML family, and reports the sampled
token's logprob only.

It is for trusted callers: it has no key, and listens on loopback by default.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import Self, TypeAlias, TypeVar, cast
from uuid import uuid4

import msgspec
from aiohttp import web

import bridle
from bridle.engines import vllm_schemas
from bridle.engines.adapter import as_version
from bridle.engines.base import (
    CutError,
    Engine,
    EngineInfo,
    GenerateChunk,
    GenerateRequest,
    Updatable,
    Versioned,
)
from bridle.engines.ids import ArrayIds, IdsError, TextIds, cut_ids
from bridle.errors import ContextOverflowError, EngineError, RenderError, cannot_listen
from bridle.scripted.replies import ChatReplyWriter, ReplyWriter, TokenReplyWriter, Wants, event
from bridle.scripted.script import THINK, THINK_END
from bridle.scripted.tokenizer import load_tokenizer
from bridle.types import JSON

T = TypeVar("T")

BODY_LIMIT = 1 << 30
"""Bytes of a request body."""


class BadCallError(ValueError):
    """A call that this server refuses with 400, for the reason in its text."""


class EngineServer:
    """HTTP server of `engine` at `url`, an async context manager.

    Entering starts the engine, leaving ends all calls and closes it. `tokenizer` is a folder or
    `builtin`; `None` = the engine's own. `port` 0 takes a free one. Raises `ConfigError` if the
    port is in use or the tokenizer cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokenizer: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._engine = engine
        self._tokenizer_source = tokenizer
        self._host, self._port = host, port
        self.control = Control(engine)

    info: EngineInfo
    url: str

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.info = await self._engine.start()
            stack.push_async_callback(self._engine.aclose)
            source = self._tokenizer_source or self.info.tokenizer_dir
            self._tokenizer = load_tokenizer(source)
            # A client that goes away cancels its handler, which closes the engine's iterator.
            self._runner = web.AppRunner(
                self._app(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0
            )
            await self._runner.setup()
            stack.push_async_callback(self._runner.cleanup)
            try:
                site = web.TCPSite(self._runner, self._host, self._port, backlog=4096)
                await site.start()
            except OSError as error:
                raise cannot_listen(self._host, self._port, error) from error
            stack.pop_all()
        port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.control.abort(None)
        await self._engine.aclose()
        await self._runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT)
        app.router.add_get("/health", self._health)
        for path, handler in self._posts().items():
            app.router.add_post(path, self._answered(handler))
        for path, handler in self._gets().items():
            app.router.add_get(path, self._answered(handler))
        return app

    def _posts(self) -> dict[str, Handler]:
        return {
            vllm_schemas.CHAT: self._chat,
            vllm_schemas.GENERATE: self._tokens,
            "/tokenize": self._tokenize,
            **self.control.posts,
        }

    def _gets(self) -> dict[str, Handler]:
        return {"/v1/models": self._models, "/version": self._version, **self.control.gets}

    # ---- shared by all routes

    def _answered(self, handler: Handler) -> Handler:
        """Wrap a handler: answer failures with vLLM's error body."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except (BadCallError, IdsError, RenderError, msgspec.MsgspecError) as error:
                return _failed(400, str(error))
            except CutError:
                return await _cut(request)
            except EngineError as error:
                return _failed(*_status_and_message(error))
            except (web.HTTPException, ConnectionError):
                raise
            except Exception as error:  # noqa: BLE001 - the top of a served request
                return _failed(500, f"{type(error).__name__}: {error}")

        return answer

    async def _health(self, request: web.Request) -> web.Response:  # noqa: ARG002
        try:
            await self._engine.health()
        except EngineError as error:
            return _failed(503, str(error))
        return web.Response()

    # ---- sampling

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        text, cut = cut_ids(await request.read(), b"prompt_token_ids")
        body = _decoded(_CHAT, text)
        prompt, messages, tools = self._chat_prompt(body, cut)
        wants = Wants(
            ids=bool(body.return_token_ids),
            prompt_ids=bool(body.return_token_ids),
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            versions=bool(body.return_weight_versions),
            usage=body.usage_wanted,
            tools=body.tools not in vllm_schemas.ABSENT and body.tool_choice != "none",
            named_tool=isinstance(body.tool_choice, dict),
            reasoning=body.include_reasoning,
            thinking=self._leaves_thinking_open(prompt),
        )
        call = GenerateRequest(
            request_id=body.request_id or uuid4().hex,
            prompt=prompt,
            sampling=body.sampling(body.max_completion_tokens or body.max_tokens),
            session_id=body.session_id,
            model=body.model,
            messages=messages,
            tools=tools,
            grammar=grammar(body.response_format, body.structured_outputs),
            stream=bool(body.stream),
        )
        return await self._reply(request, call, body.n, ChatReplyWriter, wants)

    def _chat_prompt(
        self, body: vllm_schemas.ChatRequest, cut: bytes | None
    ) -> tuple[TextIds | ArrayIds, list[JSON] | None, list[JSON] | None]:
        """Return the prompt of a chat call, and its messages and tools if they made it.

        `cut` = ids that were removed from the body before it was decoded. Ids in
        `kv_transfer_params` replace templating, unless `echo` is set, as in vLLM.
        """
        transfer = body.kv_transfer_params
        if transfer is not None and not body.echo:
            ids = _put_back(transfer.prompt_token_ids, cut)
            if ids not in (b"", b"null"):
                return TextIds(ids), None, None
        messages = _decoded(_OBJECTS, body.messages, "messages")
        tools = (
            _decoded(_OBJECTS, body.tools, "tools")
            if body.tools not in vllm_schemas.ABSENT
            else None
        )
        text = self._tokenizer.render(
            messages,
            tools,
            add_generation_prompt=body.add_generation_prompt,
            arguments=body.chat_template_kwargs,
        )
        return ArrayIds(self._tokenizer.encode(text)), messages, tools

    def _leaves_thinking_open(self, prompt: TextIds | ArrayIds) -> bool:
        tail = self._tokenizer.decode(prompt.tail(4))
        return tail.rfind(THINK) > tail.rfind(THINK_END)

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        text, cut = cut_ids(await request.read(), b"token_ids")
        body = _decoded(_TOKENS, text)
        params = body.sampling_params
        wants = Wants(
            ids=True,
            prompt_ids=bool(body.return_token_ids),
            logprobs=params.logprobs is not None,
            top_logprobs=params.logprobs or 0,
            versions=True,
            usage=body.stream_options is not None and body.stream_options.include_usage,
        )
        call = GenerateRequest(
            request_id=body.request_id or uuid4().hex,
            prompt=TextIds(_put_back(body.token_ids, cut)),
            sampling=params.sampling(params.max_tokens),
            model=body.model,
            grammar=grammar(None, params.structured_outputs),
            stream=bool(body.stream),
        )
        return await self._reply(request, call, params.n, TokenReplyWriter, wants)

    async def _reply(
        self,
        request: web.Request,
        call: GenerateRequest,
        n: int | None,
        kind: type[ReplyWriter],
        wants: Wants,
    ) -> web.StreamResponse:
        """Sample `call` and write the reply in the route's form."""
        length, asked = len(call.prompt), call.sampling.max_tokens
        if n not in {None, 1}:
            raise BadCallError(
                f"n = {n}: this server samples only one choice; leave n out or give 1"
            )
        if length == 0:
            raise BadCallError("the prompt is empty; it needs at least one token id")
        if length + (asked or 1) > self.info.context_length:
            raise ContextOverflowError(length, self.info.context_length, asked)
        answer = kind(call, call.model or self.info.model, wants, self._tokenizer)
        async with aclosing(self.control.chunks(call)) as chunks:
            if call.stream:
                return await _stream(request, answer, chunks)
            whole = answer.whole([chunk async for chunk in chunks])
        return web.Response(body=whole, content_type="application/json")

    # ---- information

    async def _models(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        model = {
            "id": self.info.model,
            "object": "model",
            "created": 0,
            "owned_by": "bridle",
            "root": str(self._tokenizer.folder),
            "parent": None,
            "max_model_len": self.info.context_length,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _version(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        return web.json_response({"version": f"bridle-{bridle.__version__}"})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = _decoded(_TOKENIZE, await request.read())
        if (body.prompt is None) == (body.messages is None):
            raise BadCallError("give either prompt or messages, and not both")
        text = body.prompt
        if text is None:
            text = self._tokenizer.render(
                body.messages or [],
                body.tools,
                add_generation_prompt=body.add_generation_prompt,
                arguments=body.chat_template_kwargs,
            )
        ids = self._tokenizer.encode(text).tolist()
        found = {"count": len(ids), "max_model_len": self.info.context_length, "tokens": ids}
        return web.json_response(found)


_CHAT = msgspec.json.Decoder(vllm_schemas.ChatRequest)
_TOKENS = msgspec.json.Decoder(vllm_schemas.TokenRequest)
_TOKENIZE = msgspec.json.Decoder(vllm_schemas.TokenizeRequest)
_OBJECTS = msgspec.json.Decoder(list[JSON])


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes, where: str = "") -> T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise BadCallError(f"{where}: {error}" if where else str(error)) from None


def _put_back(raw: msgspec.Raw, cut: bytes | None) -> bytes:
    """Return the text of a field, from `cut` if it was removed before decoding."""
    text = bytes(raw)
    return cut if cut is not None and text == b"null" else text


def grammar(response_format: JSON | None, structured: JSON | None) -> JSON | None:
    """Return the grammar that the fields of a request ask for, as an engine takes it; `None` =
    none.
    """
    if structured and structured.get("json") is not None:
        return {"json_schema": structured["json"]}
    kind = (response_format or {}).get("type")
    if kind == "json_object":
        return {"json_schema": {}}
    if kind == "json_schema":
        schema = (response_format or {}).get("json_schema")
        return {"json_schema": schema.get("schema", {}) if isinstance(schema, dict) else {}}
    return None


async def _stream(
    request: web.Request, answer: ReplyWriter, chunks: AsyncGenerator[GenerateChunk, None]
) -> web.StreamResponse:
    """Write a reply as events. A failure before the first token has its own HTTP status."""
    first = await anext(chunks)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    await response.write(b"".join([*answer.opening(), answer.piece(first)]))
    try:
        async for chunk in chunks:
            await response.write(answer.piece(chunk))
    except CutError:
        _drop(request)
        return response
    except EngineError as error:
        status, message = _status_and_message(error)
        await response.write(event(_error_body(status, message)) + b"data: [DONE]\n\n")
    else:
        await response.write(b"".join(answer.closing()))
    await response.write_eof()
    return response


async def _cut(request: web.Request) -> web.StreamResponse:
    """Send half of a JSON reply, then close the connection."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = 1 << 16
    await response.prepare(request)
    await response.write(b'{"id":"chatcmpl-cut","object":')
    _drop(request)
    return response


def _drop(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()


def _status_and_message(error: EngineError) -> tuple[int, str]:
    """Return status and message of an engine's failure, in vLLM's words where clients parse it."""
    if isinstance(error, ContextOverflowError):
        asked = f"{error.requested} output tokens and " if error.requested else ""
        return 400, (
            f"This model's maximum context length is {error.context_length} tokens. However, you "
            f"requested {asked}your prompt contains {error.prompt_tokens} input tokens. "
            "Please reduce the length of the input or the number of requested output tokens."
        )
    return error.status or (503 if error.retryable else 500), str(error)


def _error_body(status: int, message: str) -> JSON:
    try:
        kind = HTTPStatus(status).phrase.replace(" ", "")
    except ValueError:
        kind = "Error"
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _failed(status: int, message: str) -> web.Response:
    return web.json_response(_error_body(status, message), status=status)


PREFIXES = ("chatcmpl-", "cmpl-", "generate-tokens-")
"""Prefixes of request ids in replies; also accepted in `/abort_requests`."""

MODES = ("abort", "wait", "keep")

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control:
    """Runner of one engine's calls, with the routes that pause, abort and update it.

    `posts` and `gets` are its routes. All run on one event loop, so there are no locks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = asyncio.Event()
        """Set: new calls may begin."""
        self._open.set()
        self._flowing = asyncio.Event()
        """Set: running calls continue."""
        self._flowing.set()
        self._refuses = False
        """True if new calls are refused, and do not wait for the end of the pause."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: dict[str, str] = {}
        """Engine's request id -> the id the caller gave."""
        self._served = 0
        self.posts: dict[str, Handler] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/abort_requests": self._abort_requests,
            "/update_weight_version": self._update_version,
            "/collective_rpc": self._reload_weights,
            "/reset_prefix_cache": self._nothing_to_reset,
        }
        self.gets: dict[str, Handler] = {
            "/is_paused": self._is_paused,
            "/weight_info": self._weight_info,
        }

    async def chunks(self, call: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the engine's chunks of a call; a pause may hold them. Closing it aborts the call.

        The engine gets a unique id for the call, because two callers may use the same one.
        """
        if self._refuses:  # as vLLM does from 0.33 on
            raise EngineError("Generation is paused; try again later", status=503, retryable=True)
        await self._open.wait()
        self._served += 1
        request = replace(call, request_id=f"{call.request_id}-{self._served}")
        self._calls[request.request_id] = call.request_id
        self._idle.clear()
        try:
            # By contract the engine's iterator can be closed early.
            chunks = cast("AsyncGenerator[GenerateChunk, None]", self._engine.generate(request))
            async with aclosing(chunks):
                async for chunk in chunks:
                    await self._flowing.wait()
                    yield chunk
        finally:
            del self._calls[request.request_id]
            if not self._calls:
                self._idle.set()

    async def abort(self, caller_ids: list[str] | None) -> None:
        """End the calls with these ids; `None` = all."""
        wanted = None if caller_ids is None else {_bare(one) for one in caller_ids}
        for engine_id, caller_id in list(self._calls.items()):
            if wanted is None or caller_id in wanted:
                await self._engine.abort(engine_id)

    async def pause(self, mode: str) -> None:
        """Hold new calls, and end, await or hold the running ones as `mode` says."""
        self._open.clear()
        if mode == "keep":
            self._flowing.clear()
        elif mode == "abort":
            await self.abort(None)
        if mode != "keep":
            await self._idle.wait()

    def resume(self) -> None:
        """End a pause: all held calls continue."""
        self._refuses = False
        self._flowing.set()
        self._open.set()

    async def version(self, version: int) -> int:
        """Set the version of the engine's weights, and return it.

        Raises `EngineError` if the engine counts its own.
        """
        if not isinstance(self._engine, Versioned):
            raise EngineError(
                "this engine counts its weight versions itself; none can be set", status=501
            )
        await self._engine.set_version(version)
        return version

    # ---- routes

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in MODES:
            raise EngineError(f"unknown pause mode {mode!r}; known: {', '.join(MODES)}", status=400)
        self._refuses = mode != "keep"
        await self.pause(mode)
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        self.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        return web.json_response({"is_paused": not self._open.is_set()})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        body = await request.read() or b"{}"
        await self.abort(msgspec.json.decode(body, type=vllm_schemas.AbortRequest).request_ids)
        return web.json_response({"status": "aborted"})

    async def _update_version(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=vllm_schemas.VersionRequest)
        version = await self.version(as_version(body.new_version))
        return web.json_response({"status": "ok", "weight_version": str(version)})

    async def _reload_weights(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=vllm_schemas.RpcRequest)
        folder = body.kwargs.get("weights_path")
        if body.method != "reload_weights" or not isinstance(folder, str):
            raise EngineError(
                "this server knows only the method `reload_weights`, with `weights_path` in its "
                "kwargs",
                status=400,
            )
        if not isinstance(self._engine, Updatable):
            raise EngineError("this server's engine cannot load weights", status=501)
        info = await self._engine.start()
        await self._engine.update_weights(folder, info.version)
        return web.json_response({"results": [None]})

    async def _nothing_to_reset(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        return web.Response()

    async def _weight_info(self, request: web.Request) -> web.Response:  # noqa: ARG002 - a handler
        info = await self._engine.start()
        return web.json_response({"weight_version": str(info.version)})


def _bare(request_id: str) -> str:
    for prefix in PREFIXES:
        request_id = request_id.removeprefix(prefix)
    return request_id

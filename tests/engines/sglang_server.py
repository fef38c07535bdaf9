"""Any engine over HTTP, in SGLang's shape: `/generate`, chat with `input_ids`, control.

It stands in for an SGLang server in tests, so that what is proved of an adapter is proved of both
shapes. Source: SGLang 0.5.23, `srt/entrypoints/http_server.py`, `srt/managers/tokenizer_manager.py`
and `srt/entrypoints/openai/serving_chat.py`, and the answers of a running server. As there, a
stream's chunks repeat what was said before unless `incremental`, failures of a stream are sent in
an event, and an abort by `/abort_request` is answered with the tokens so far. Differences, on
purpose: those of `bridle.scripted.server`, and chat is answered whole only.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Raw

from bridle.engines import vllm_schemas
from bridle.engines.adapter import as_version
from bridle.engines.base import CutError, Engine, GenerateChunk, GenerateRequest, Updatable
from bridle.engines.ids import ArrayIds, TextIds, cut_ids
from bridle.errors import ContextOverflowError, EngineError
from bridle.scripted.replies import ReplyReader, event
from bridle.scripted.server import BadCallError, EngineServer, Handler
from bridle.types import JSON, FinishReason, Sampling

PAUSES = {"abort": "abort", "retract": "keep", "in_place": "keep"}
"""SGLang's pause modes -> `bridle.scripted.server`'s."""

UNNAMED = "default"
"""What SGLang calls weights that nobody gave a version."""


class SglangSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params`; an unknown one is refused, as there."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    json_schema: str | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    def sampling(self) -> Sampling:
        """Return them under Bridle's names."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            seed=self.sampling_seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


class Generate(msgspec.Struct, kw_only=True):
    """Body of `POST /generate`."""

    input_ids: Raw = vllm_schemas.EMPTY
    text: str | None = None
    sampling_params: SglangSampling = msgspec.field(default_factory=SglangSampling)
    rid: str | None = None
    session_id: str | None = None
    stream: bool = False
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    return_prompt_token_ids: bool = False


class Chat(vllm_schemas.SamplingFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[JSON]
    tools: list[JSON] | None = None
    tool_choice: str | JSON | None = None
    input_ids: Raw = vllm_schemas.EMPTY
    model: str | None = None
    rid: str | None = None
    session_id: str | None = None
    max_completion_tokens: int | None = None
    response_format: JSON | None = None
    chat_template_kwargs: JSON | None = None
    logprobs: bool = False
    stream: bool = False
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False


class Abort(msgspec.Struct, kw_only=True):
    """Body of `POST /abort_request`."""

    rid: str = ""
    abort_all: bool = False


class Weights(msgspec.Struct, kw_only=True):
    """Body of `POST /update_weights_from_disk`."""

    model_path: str
    weight_version: str | None = None


class Pause(msgspec.Struct, kw_only=True):
    """Body of `POST /pause_generation`."""

    mode: str = "abort"


@dataclass(slots=True)
class _Progress:
    """All that was sampled of one call so far, and the part of it that was sent."""

    wants: Generate
    rid: str
    prompt: TextIds | ArrayIds
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    sent: int = 0

    def add(self, chunk: GenerateChunk) -> None:
        self.ids += chunk.output_ids.tolist()
        self.logprobs += chunk.logprobs.tolist()
        self.cached = max(self.cached, chunk.cached_tokens)


class SglangServer(EngineServer):
    """Serves `engine` in SGLang's shape while its `async with` lasts; see `EngineServer`.

    `incremental` is SGLang's `--incremental-streaming-output`.
    """

    def __init__(self, engine: Engine, *, incremental: bool = False, **options: Any) -> None:
        super().__init__(engine, **options)
        self._incremental = incremental
        self._named: str | None = None
        """The version that the weights were given here; `None` = none."""

    def _posts(self) -> dict[str, Handler]:
        return {
            "/generate": self._generate,
            vllm_schemas.CHAT: self._sglang_chat,
            "/tokenize": self._tokenize,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/update_weights_from_disk": self._update_weights,
            "/update_weight_version": self._update_weight_version,
        }

    def _gets(self) -> dict[str, Handler]:
        return {
            "/v1/models": self._models,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
        }

    # ---- sampling

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        text, cut = cut_ids(await request.read(), b"input_ids")
        body = _decode(text, Generate)
        self._refuse(body.sampling_params)
        prompt = self._prompt(body.input_ids, cut, body.text)
        caller_id = body.rid or uuid4().hex
        call = GenerateRequest(
            request_id=caller_id,
            prompt=prompt,
            sampling=body.sampling_params.sampling(),
            session_id=body.session_id,
            grammar=_grammar(body.sampling_params.json_schema),
            stream=body.stream,
        )
        reply = _Progress(body, caller_id, prompt)
        if body.stream:
            return await self._stream(request, call, reply)
        return web.Response(
            body=_ENCODER.encode(await self._whole(call, reply)), content_type="application/json"
        )

    def _refuse(self, sampling: SglangSampling) -> None:
        """Return what SGLang's `SamplingParams.verify` refuses and an adapter asks."""
        size = self._tokenizer.vocab_size
        for token_id in sampling.logit_bias or ():
            if not 0 <= int(token_id) < size:
                raise BadCallError(f"logit_bias must has keys in [0, {size - 1}], got {token_id}.")
        if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
            raise BadCallError(f"top_p must be in (0, 1], got {sampling.top_p}.")

    def _prompt(self, raw: Raw, cut: bytes | None, text: str | None) -> TextIds | ArrayIds:
        if cut is not None:
            return TextIds(cut)
        if raw not in vllm_schemas.ABSENT:
            return TextIds(bytes(raw))
        if text is None:
            raise BadCallError("Either text, input_ids or input_embeds should be provided.")
        return ArrayIds(self._tokenizer.encode(text))

    def _check_room(self, call: GenerateRequest) -> None:
        length, most = len(call.prompt), call.sampling.max_tokens or 0
        if length == 0:
            raise BadCallError("input_ids cannot be empty.")
        if length + most > self.info.context_length or length >= self.info.context_length:
            raise ContextOverflowError(length, self.info.context_length, most)

    async def _whole(self, call: GenerateRequest, reply: _Progress) -> JSON:
        self._check_room(call)
        last: GenerateChunk | None = None
        async with aclosing(self.control.chunks(call)) as chunks:
            async for last in chunks:
                reply.add(last)
        assert last is not None
        return self._body(reply, last)

    async def _stream(
        self, request: web.Request, call: GenerateRequest, reply: _Progress
    ) -> web.StreamResponse:
        """Events; a failure is sent as one, because the answer has begun."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            async with aclosing(self._events(call, reply)) as events:
                async for body in events:
                    await response.write(event(body))
        except CutError:
            if request.transport is not None:
                request.transport.close()
            return response
        except (EngineError, BadCallError) as error:
            await response.write(event({"error": _failure_json(error)}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _events(self, call: GenerateRequest, reply: _Progress) -> AsyncGenerator[JSON, None]:
        self._check_room(call)
        every = reply.wants.sampling_params.stream_interval or 1
        async with aclosing(self.control.chunks(call)) as chunks:
            async for chunk in chunks:
                reply.add(chunk)
                unsent = len(reply.ids) - reply.sent
                if chunk.finish_reason is None and reply.sent and unsent < every:
                    continue
                yield self._body(reply, chunk)
                reply.sent = len(reply.ids)

    def _body(self, reply: _Progress, last: GenerateChunk) -> JSON:
        """A reply, or a stream's chunk, after all that was sampled so far."""
        wants = reply.wants
        since = reply.sent if wants.stream and self._incremental else 0
        ids = reply.ids[since:]
        meta: JSON = {
            "id": reply.rid,
            "finish_reason": self._finish(reply, last),
            "prompt_tokens": len(reply.prompt),
            "weight_version": self._version_name(),
            "num_retractions": 0,
        }
        if wants.return_logprob:
            pairs = zip(reply.logprobs[since:], ids, strict=True)
            meta["input_token_logprobs"] = self._prompt_logprobs(reply)
            meta["output_token_logprobs"] = [[value, id_, None] for value, id_ in pairs]
            meta["output_token_logprobs_length"] = len(reply.ids)
        meta |= {"reasoning_tokens": 0, "completion_tokens": len(reply.ids)}
        meta["cached_tokens"] = reply.cached
        if last.finish_reason is not None:
            meta["weight_versions"] = [
                {"version": self._version_name(one.version), "start": one.start, "end": one.end}
                for one in last.versions
            ]
        text = self._tokenizer.visible(np.array(ids, np.int32))
        if last.stop_text is not None and not wants.sampling_params.no_stop_trim:
            text = text.partition(last.stop_text)[0]
        body: JSON = {"text": text, "output_ids": ids, "meta_info": meta}
        if wants.return_prompt_token_ids:
            body["prompt_token_ids"] = Raw(reply.prompt.json())
        return body

    def _prompt_logprobs(self, reply: _Progress) -> list[Any]:
        if reply.wants.logprob_start_len != 0 or reply.sent:
            return []
        return [[None, one, None] for one in reply.prompt.array().tolist()]

    def _finish(self, reply: _Progress, last: GenerateChunk) -> JSON | None:
        match last.finish_reason:
            case None:
                return None
            case FinishReason.LENGTH:
                return {"type": "length", "length": len(reply.ids)}
            case FinishReason.ABORT:
                return {"type": "abort", "message": "Aborted", "status_code": None}
            case FinishReason.STOP:
                final = reply.ids[-1] if reply.ids else None
                return {"type": "stop", "matched": last.stop_text or final}

    def _version_name(self, version: int | None = None) -> str:
        if version is not None and version != 0:
            return str(version)
        return UNNAMED if self._named is None else self._named

    # ---- chat

    async def _sglang_chat(self, request: web.Request) -> web.StreamResponse:
        text, cut = cut_ids(await request.read(), b"input_ids")
        body = _decode(text, Chat)
        if body.stream:
            raise BadCallError(
                "return_token_ids is not supported with streaming on /v1/chat/completions. "
                "Please set stream=false when using return_token_ids=true."
            )
        given = cut is not None or body.input_ids not in vllm_schemas.ABSENT
        prompt = self._prompt(body.input_ids, cut, None if given else self._rendered(body))
        caller_id = body.rid or uuid4().hex
        call = GenerateRequest(
            request_id=caller_id,
            prompt=prompt,
            sampling=body.sampling(body.max_completion_tokens or body.max_tokens),
            session_id=body.session_id,
            messages=None if given else body.messages,
            tools=None if given else body.tools,
            grammar=_format_grammar(body.response_format),
        )
        wants = Generate(return_logprob=body.logprobs, return_prompt_token_ids=True)
        reply = _Progress(wants, caller_id, prompt)
        whole = await self._whole(call, reply)
        choice = self._choice(body, reply, whole)
        answer = {"id": caller_id, "object": "chat.completion", "model": body.model or "default"}
        return web.Response(
            body=_ENCODER.encode({**answer, "choices": [choice]}), content_type="application/json"
        )

    def _rendered(self, body: Chat) -> str:
        return self._tokenizer.render(
            body.messages,
            body.tools,
            add_generation_prompt=True,
            arguments=body.chat_template_kwargs,
        )

    def _choice(self, body: Chat, reply: _Progress, whole: JSON) -> JSON:
        thinking = self._leaves_thinking_open(reply.prompt)
        reader = ReplyReader(tools=bool(body.tools), thinking=thinking)
        said = reader.feed(whole["text"], last=True)
        calls = [
            {"id": f"call_{uuid4().hex[:24]}", "index": index, "type": "function",
             "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(said.calls)
        ]  # fmt: skip
        reason = whole["meta_info"]["finish_reason"]
        kind = "tool_calls" if calls and reason["type"] == "stop" else reason["type"]
        message: JSON = {"role": "assistant", "content": said.content}
        message["reasoning_content"] = said.reasoning or None
        choice: JSON = {"index": 0, "message": message, "finish_reason": kind}
        choice["matched_stop"] = reason.get("matched")
        if calls:
            message["tool_calls"] = calls
        if body.return_token_ids:
            choice["response_token_ids"] = whole["output_ids"]
        if body.return_token_ids or body.return_prompt_token_ids:
            choice["prompt_token_ids"] = whole["prompt_token_ids"]
        if body.return_meta_info:
            choice["meta_info"] = whole["meta_info"]
        return choice

    # ---- control, and looking things up

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = _decode(await request.read(), Abort)
        if body.abort_all or body.rid:
            await self.control.abort(None if body.abort_all else [body.rid])
        return web.Response()

    async def _pause_generation(self, request: web.Request) -> web.Response:
        body = _decode(await request.read() or b"{}", Pause)
        if body.mode not in PAUSES:
            raise BadCallError(f"mode: {body.mode!r}")
        await self.control.pause(PAUSES[body.mode])
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        self.control.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = _decode(await request.read(), Weights)
        if not isinstance(self._engine, Updatable) or not _is_folder(body.model_path):
            failed = {"success": False, "message": "Failed to update weights: no such model"}
            return web.json_response(failed, status=400)
        version = (await self._engine.start()).version
        if body.weight_version is not None:
            version, self._named = as_version(body.weight_version), body.weight_version
        await self._engine.update_weights(body.model_path, version)
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = _decode(await request.read(), vllm_schemas.VersionRequest)
        answer = await self.control.version(as_version(body.new_version))
        self._named = str(body.new_version)
        return web.json_response({"success": True, "new_version": str(answer)})

    async def _model_info(self, request: web.Request) -> web.Response:
        folder = str(self._tokenizer.folder)
        version = (await self._engine.start()).version
        about = {
            "model_path": folder,
            "served_model_name": self.info.model,
            "tokenizer_path": folder,
            "is_generation": True,
            "weight_version": self._version_name(version),
            "reasoning_parser": "qwen3",
            "tool_call_parser": "qwen",
        }
        return web.json_response(about)

    async def _server_info(self, request: web.Request) -> web.Response:
        served = {"version": "bridle", "incremental_streaming_output": self._incremental}
        return web.json_response({**served, "context_length": self.info.context_length})


_ENCODER = msgspec.json.Encoder()


def _is_folder(path: str) -> bool:
    return Path(path).is_dir()


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise BadCallError(str(error)) from None


def _grammar(schema: str | None) -> JSON | None:
    if schema is None:
        return None
    decoded = msgspec.json.decode(schema)
    return {"json_schema": decoded}


def _format_grammar(response_format: JSON | None) -> JSON | None:
    kind = (response_format or {}).get("type")
    if kind != "json_schema":
        return {"json_schema": {"type": "object"}} if kind == "json_object" else None
    schema = (response_format or {}).get("json_schema")
    return {"json_schema": schema.get("schema", {}) if isinstance(schema, dict) else {}}


def _failure_json(error: Exception) -> JSON:
    status = 400
    if isinstance(error, EngineError) and not isinstance(error, ContextOverflowError):
        status = error.status or (503 if error.retryable else 500)
    return {"message": str(error), "type": "invalid_request_error", "code": status}

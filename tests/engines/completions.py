"""The test server in the shape of a vLLM whose only route that takes ids is `/v1/completions`."""

from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Raw

from bridle.engines import vllm_schemas
from bridle.engines.base import GenerateRequest
from bridle.engines.ids import ArrayIds, TextIds
from bridle.scripted.replies import LEAST, ReplyWriter, Wants
from bridle.scripted.server import BadCallError, EngineServer, grammar
from bridle.types import JSON


class CompletionRequest(vllm_schemas.CommonFields, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: Raw
    logprobs: int | None = None


class CompletionAnswer(ReplyWriter):
    """Replies of `/v1/completions`: the text as it is; prompt ids are in the choice."""

    prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    _opened = False
    _offset = 0

    def whole_body(self, text: str, choice: JSON) -> JSON:
        body = self.piece_body(text, choice, last=True)
        return {**body, "usage": self.usage(), "kv_transfer_params": None}

    def piece_body(self, text: str, choice: JSON, *, last: bool) -> JSON:
        choice["text"] = text
        if not self._opened:
            choice["prompt_token_ids"] = self._prompt_ids()
            self._opened = True
        return {**self._head(self.chunk_object), "choices": [choice]}

    def logprobs(self, ids: Any, logprobs: Any) -> Any:
        plain, values = ids.tolist(), np.maximum(logprobs, LEAST).tolist()
        texts = [self._tokenizer.decode([one]) for one in plain]
        offsets = np.cumsum([self._offset, *(len(text) for text in texts)]).tolist()
        self._offset = offsets.pop()
        names = [f"token_id:{one}" for one in plain] if self._wants.tokens_as_ids else texts
        tops = [{name: value} for name, value in zip(names, values, strict=True)]
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": names,
            "top_logprobs": tops if self._wants.top_logprobs else None,
        }


class CompletionServer(EngineServer):
    """Serves `/v1/completions` beside the routes of `EngineServer`."""

    def _posts(self):
        return {**super()._posts(), vllm_schemas.COMPLETIONS: self._completion}

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read(), type=CompletionRequest)
        wants = Wants(
            ids=bool(body.return_token_ids),
            prompt_ids=bool(body.return_token_ids),
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            versions=bool(body.return_weight_versions),
            usage=body.usage_wanted,
        )
        call = GenerateRequest(
            request_id=body.request_id or uuid4().hex,
            prompt=self._prompt(bytes(body.prompt)),
            sampling=body.sampling(body.max_tokens or 16),
            session_id=body.session_id,
            model=body.model,
            grammar=grammar(body.response_format, body.structured_outputs),
            stream=bool(body.stream),
        )
        return await self._reply(request, call, body.n, CompletionAnswer, wants)

    def _prompt(self, text: bytes) -> TextIds | ArrayIds:
        if text[:1] == b'"':
            return ArrayIds(self._tokenizer.encode(msgspec.json.decode(text, type=str)))
        if text[:1] != b"[" or text[1:].lstrip()[:1] in {b"[", b'"'}:
            raise BadCallError("prompt: a string or one array of token ids is expected")
        return TextIds(text)

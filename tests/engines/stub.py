"""A vLLM-shaped server that answers what a test tells it to, also wrong things."""

import asyncio
import json

from aiohttp import web

MODELS = {"object": "list", "data": [{"id": "stub", "max_model_len": 1000, "root": "stub"}]}


class Stub:
    """Answers `replies[path]`: JSON, bytes, a status, a (status, body) pair, or a function."""

    def __init__(self, **replies):
        self.replies = {"/v1/models": MODELS, **{f"/{k}": v for k, v in replies.items()}}
        self.bodies = []
        self.headers = []

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _answer(self, request):
        reply = self.replies.get(request.path, 404)
        body = await request.read()
        self.headers.append(dict(request.headers))
        if request.method == "POST":
            self.bodies.append(json.loads(body or b"null"))
        if callable(reply):
            reply = await reply(request) if asyncio.iscoroutinefunction(reply) else reply(body)
        if isinstance(reply, web.StreamResponse):
            return reply
        status, result = reply if isinstance(reply, tuple) else (200, reply)
        if isinstance(result, int):
            status, result = result, {"error": {"message": f"status {result}", "code": result}}
        if isinstance(result, bytes):
            return web.Response(body=result, status=status)
        return web.json_response(result, status=status)


def sampled(prompt, ids=(7, 8), values=(-0.5, -1.5), **changes):
    """A chat reply with ids; `changes` replace fields of its choice, `None` drops them."""
    entries = [
        {"token": f"token_id:{i}", "logprob": value, "top_logprobs": []}
        for i, value in zip(ids, values, strict=False)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x"},
        "token_ids": list(ids),
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "stop_reason": None,
        **changes,
    }
    choice = {key: value for key, value in choice.items() if value is not None}
    return {"prompt_token_ids": prompt, "choices": [choice], "usage": {"prompt_tokens": 3}}


def honest(**changes):
    """Answers chat calls as vLLM does: the prompt it was given, two tokens."""

    def answer(body):
        read = json.loads(body)
        transfer = read.get("kv_transfer_params") or {}
        return sampled(transfer.get("prompt_token_ids", [1]), **changes)

    return answer


def events(*parts, done=True):
    """A stream of these parts, each JSON or bytes as they are."""

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            data = part if isinstance(part, bytes) else f"data: {json.dumps(part)}\n\n".encode()
            await response.write(data)
        if done:
            await response.write(b"data: [DONE]\n\n")
        return response

    return answer

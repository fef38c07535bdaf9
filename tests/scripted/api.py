"""A served engine with a plain HTTP client, and what tests send to it."""

import io
import itertools
import json

from bridle.scripted.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(None)
USER = [{"role": "user", "content": "hi"}]
BASH = {
    "type": "function",
    "function": {"name": "bash", "description": "d",
                 "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}  # fmt: skip
PROMPT = TOKENIZER.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").tolist()
IDS = {
    "return_token_ids": True,
    "logprobs": True,
    "return_tokens_as_token_ids": True,
}


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


class Api:
    """One server with a plain HTTP client."""

    def __init__(self, server, session):
        self.server, self.session, self.url = server, session, server.url

    async def post(self, path, body, **options):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=io.BytesIO(data), **options) as response:
            return response.status, await response.read()

    async def json(self, path, body=None):
        if body is None:
            async with self.session.get(self.url + path) as response:
                return json.loads(await response.read())
        status, read = await self.post(path, body)
        assert status == 200, read
        return json.loads(read)

    async def error(self, path, body):
        status, read = await self.post(path, body)
        error = json.loads(read)["error"]
        assert error["code"] == status
        return status, error["message"]

    async def events(self, path, body):
        status, read = await self.post(path, {**body, "stream": True})
        assert status == 200, read
        lines = [line.removeprefix(b"data: ") for line in read.split(b"\n\n") if line]
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]

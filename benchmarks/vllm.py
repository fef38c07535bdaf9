"""Token-in against messages-in on a real vLLM: time to the first token at a long context.

A conversation of about 30,000 tokens is in vLLM's prefix cache; then one more message comes. It is
sent in both ways to the same chat route, in turn: as ids (`kv_transfer_params.prompt_token_ids`,
what Bridle does) and as messages, which vLLM renders and tokenises whole each time.

- `same ids`: both ways mean the same ids, so both find the cache. What is left is rendering.
- `after a tool loop`: the assistant reasoned between its tool calls. When the user says something
  new, the template drops that reasoning, so from there on nothing of the cache fits the messages;
  the ids go on where they were.

Also: how fast the server starts and samples. The model has 1M random weights, so on a CPU reading a
prompt is cheap beside a real model's: the second ratio grows with the model.

    make test-vllm      # once: it installs vLLM
    .venv/bin/python -m benchmarks.vllm [--tokens 30000] [--runs 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from tests.vllm.serving import VllmServer, make_model

from bridle.scripted.tokenizer import load_tokenizer

Messages = list[dict[str, Any]]

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
        },
    }
]
PAGES = 20


class Client:
    """Calls of one server, timed."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def ids(self, messages: Messages, *, prompt: bool = True) -> list[int]:
        """The ids that vLLM renders messages to; without `prompt`, no header of a reply."""
        body = {"messages": messages, "tools": TOOLS, "add_generation_prompt": prompt}
        async with self._session.post(f"{self._url}/tokenize", json=body) as answer:
            found: list[int] = (await answer.json())["tokens"]
            return found

    async def first_token_s(self, messages: Messages, ids: list[int] | None = None) -> float:
        """Seconds to the first sampled token, with the request's encoding."""
        began = time.perf_counter()
        body = {
            "model": "tiny",
            "messages": messages,
            "tools": TOOLS,
            "tool_choice": "none",
            "max_tokens": 2,
            "stream": True,
            "return_token_ids": True,
        }
        if ids is not None:
            body["kv_transfer_params"] = {"prompt_token_ids": ids}
        first = 0.0
        async with self._session.post(f"{self._url}{CHAT}", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not first and b'"token_ids":[' in line.replace(b"prompt_token_ids", b""):
                    first = time.perf_counter() - began
        return first

    async def sample(self, ids: list[int], tokens: int) -> None:
        """One reply of exactly so many tokens."""
        sampling = {"max_tokens": tokens, "min_tokens": tokens, "logprobs": 0}
        body = {"model": "tiny", "token_ids": ids, "sampling_params": sampling}
        async with self._session.post(f"{self._url}/inference/v1/generate", json=body) as answer:
            answer.raise_for_status()
            await answer.read()


def loop(words: int) -> Messages:
    """A user's wish and a tool loop with reasoning, about `words` words long."""
    text = " word" * (words // PAGES)
    messages: Messages = [{"role": "user", "content": "Read the book."}]
    for page in range(PAGES):
        call = {"name": "read", "arguments": json.dumps({"page": page})}
        messages += [
            {
                "role": "assistant",
                "content": "",
                "reasoning": f"Page {page} is next, I think.",
                "tool_calls": [{"id": f"call_{page}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{page}", "content": f"Page {page}:{text}"},
        ]
    return [*messages, {"role": "assistant", "content": "It is read."}]


def last_message(ids: list[int]) -> list[int]:
    """The ids of the last message and the header of the reply."""
    start = load_tokenizer(None).id_of("<|im_start|>")
    places = [place for place, one in enumerate(ids) if one == start]
    return ids[places[-2] :]


async def same_ids(client: Client, tokens: int, runs: int) -> dict[str, Any]:
    """One more tool result, which leaves all before it as it was."""
    history = loop(tokens)[:-1]
    await client.first_token_s(history, await client.ids(history))
    return await both(client, history, runs, role="tool", base=None)


async def after_a_tool_loop(client: Client, tokens: int, runs: int) -> dict[str, Any]:
    """The user's next message, after which the template shows no earlier reasoning."""
    history = loop(tokens)
    base = await client.ids(history, prompt=False)
    await client.first_token_s(history, base)
    return await both(client, history, runs, role="user", base=base)


async def both(
    client: Client, history: Messages, runs: int, *, role: str, base: list[int] | None
) -> dict[str, Any]:
    """Median times of both ways; `base` = the ids so far, where messages mean others."""
    ids_s, messages_s, length = [], [], 0
    for run in range(runs):
        new = {"role": role, "content": f"And number {run}?", "tool_call_id": "call_0"}
        whole = await client.ids([*history, new])
        if base is not None:
            whole = base + last_message(await client.ids([new]))
        length = len(whole)
        ids_s.append(await client.first_token_s([*history, new], whole))
        new["content"] = f"Or number {run}?"
        messages_s.append(await client.first_token_s([*history, new]))
        if base is not None:
            # As the next turn of another session: its re-rendered beginning is not known yet.
            history = [{"role": "user", "content": f"Session {run}."}, *history[1:]]
            base = await client.ids(history, prompt=False)
            await client.first_token_s(history, base)
    ids_median, messages_median = statistics.median(ids_s), statistics.median(messages_s)
    return {
        "tokens": length,
        "ids_ms": round(1000 * ids_median, 1),
        "messages_ms": round(1000 * messages_median, 1),
        "ratio": round(messages_median / ids_median, 2),
    }


async def speed(client: Client, concurrency: int, tokens: int = 128) -> float:
    """Sampled tokens per second of calls at once."""
    prompts = [[100 + number] * 64 for number in range(concurrency)]
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            group.create_task(client.sample(prompt, tokens))
    return round(concurrency * tokens / (time.perf_counter() - began), 1)


async def measure(server: VllmServer, tokens: int, runs: int) -> dict[str, Any]:
    """Everything, on a server that runs."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        client = Client(session, server.url)
        await speed(client, 1)
        return {
            "start_s": round(server.start_s, 1),
            "tokens_s": {str(n): await speed(client, n) for n in (1, 8, 32)},
            "same ids": await same_ids(client, tokens, runs),
            "after a tool loop": await after_a_tool_loop(client, tokens, runs),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with VllmServer(folder, make_model(folder / "model", layers=3, heads=4)) as server:
            server.start()
            found = asyncio.run(measure(server, options.tokens, options.runs))
    if options.json:
        print(json.dumps(found))
        return
    print(f"start {found['start_s']} s; tokens/s at 1, 8, 32 calls: {found['tokens_s']}")
    print("time to first token    tokens   ids in, ms   messages in, ms   ratio")
    for case in ("same ids", "after a tool loop"):
        row = found[case]
        print(
            f"{case:21}  {row['tokens']:7}  {row['ids_ms']:10}  {row['messages_ms']:15}"
            f"  {row['ratio']:6}"
        )


if __name__ == "__main__":
    main()

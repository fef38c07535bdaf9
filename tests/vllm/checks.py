"""Comparisons between the engine's replies, the capture and a plain forward pass."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from tests.conformance.memory import MemoryStore

from bridle.capture.records import Exchange, Store
from bridle.capture.sqlite import SqliteReader
from bridle.config import SamplingPolicy
from bridle.embedded.model import PlainModel
from bridle.engines.base import Engine, GenerateRequest
from bridle.engines.connection import HttpCall
from bridle.engines.http import EngineClient
from bridle.engines.ids import ArrayIds
from bridle.engines.teachers import served_teacher
from bridle.engines.vllm import LoraAdapters, VllmEngine
from bridle.engines.vllm_routes import ImageRenderer
from bridle.gateway.app import GatewayServer
from bridle.gateway.settings import GatewaySettings
from bridle.prompting.renderer import load_renderer
from bridle.scripted.tokenizer import load_tokenizer
from bridle.trajectory import rebuild
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Sampling

from .serving import VllmServer

if TYPE_CHECKING:
    from bridle.types import Ids, Logprobs

TOKENIZER = load_tokenizer(None)
CLOSE = 1e-3
"""Nats by which a logprob may differ from a plain forward pass of the same weights."""


def prompt_of(text: str) -> Ids:
    """Ids of a conversation of one user message, ready for a reply."""
    return TOKENIZER.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def request(prompt: Sequence[int] | Ids, name: str = "r", **fields) -> GenerateRequest:
    """A call that samples freely, with `fields` of `Sampling`, and `stream`."""
    stream = fields.pop("stream", False)
    sampling = Sampling(**{"temperature": 1.0, "max_tokens": 32, **fields})
    return GenerateRequest(name, ArrayIds(np.asarray(prompt)), sampling, stream=stream)


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """One reply as an engine gave it."""

    prompt: list[int]
    ids: list[int]
    logprobs: Logprobs


class Recorder(EngineClient):
    """A client that keeps the server's raw answers, by the request id that each call's body has."""

    def __init__(self, base_url: str, answers: dict[str, list[bytes]]) -> None:
        super().__init__(base_url, api_key=None, timeout_s=1800)
        self._answers = answers
        self.begun: dict[HttpCall, str] = {}
        """The request ids of calls that were sent outside of a task."""

    async def post(self, path: str, body: bytes, call: HttpCall, *, prompt_tokens: int) -> bytes:
        answer = await super().post(path, body, call, prompt_tokens=prompt_tokens)
        name = self.begun.pop(call, None)
        kept = self._kept(body) if name is None else self._answers.setdefault(name, [])
        kept.append(answer)
        return answer

    async def stream(
        self, path: str, body: bytes, call: HttpCall, *, prompt_tokens: int
    ) -> AsyncGenerator[list[bytes], None]:
        kept = self._kept(body)
        stream = super().stream(path, body, call, prompt_tokens=prompt_tokens)
        async with aclosing(stream) as events:
            async for several in events:
                kept += several
                yield several

    def _kept(self, body: bytes) -> list[bytes]:
        return self._answers.setdefault(json.loads(body).get("request_id", ""), [])


class RecordingVllm(VllmEngine):
    """An adapter that keeps the server's raw answers, by request id."""

    answers: ClassVar[dict[str, list[bytes]]] = {}

    def __init__(self, base_url: str, **options: Any) -> None:
        super().__init__(base_url, **options)
        self._client = self._recorder = Recorder(base_url, self.answers)
        self._images = ImageRenderer(self._client)
        self._adapters = LoraAdapters(self._client)

    def begin(self, request: GenerateRequest) -> asyncio.Future[Any] | None:
        waiting = super().begin(request)
        if waiting is not None:
            self._recorder.begun[self._calls[request.request_id]] = request.request_id
        return waiting

    def end(self, request: GenerateRequest) -> None:
        answer = self._calls[request.request_id].arrived()
        assert answer is not None
        self.answers.setdefault(request.request_id, []).append(bytes(answer))
        super().end(request)

    @classmethod
    def said(cls, request_id: str) -> Said:
        """The engine's own record of a call, read without any code of ours."""
        answers = [json.loads(answer) for answer in cls.answers[request_id]]
        choices = [choice for answer in answers for choice in answer["choices"]]
        logprobs = [value for choice in choices for value in _logprobs(choice)]
        result = [one.get("prompt_token_ids") for one in (*answers, *choices)]
        prompt = next(filter(None, result))
        ids = [one for choice in choices for one in choice.get("token_ids") or ()]
        return Said(prompt, ids, np.array(logprobs, np.float32))


def _logprobs(choice: JSON) -> list[float]:
    response = choice.get("logprobs") or {}
    content = [entry["logprob"] for entry in response.get("content") or ()]
    return content or response.get("token_logprobs") or []


async def reply(engine: Engine, asked: GenerateRequest):
    """Ids and logprobs of one call, and all its chunks."""
    chunks = [chunk async for chunk in engine.generate(asked)]
    ids = np.concatenate([chunk.output_ids for chunk in chunks])
    return ids, np.concatenate([chunk.logprobs for chunk in chunks]), chunks


@asynccontextmanager
async def opened_gateway(server: VllmServer, *, engine: Engine | None = None, **settings: Any):
    """A gateway on the server, and its store. `settings` are the gateway's."""
    store = MemoryStore()
    gateway = GatewayServer(
        engine=engine or RecordingVllm(server.url),
        renderer=load_renderer(str(server.model)),
        store=store,
        settings=GatewaySettings(**settings),
    )
    async with gateway:
        yield gateway, store


def sampling_of(tokens: int) -> SamplingPolicy:
    """The default policy with an output budget of `tokens`."""
    return SamplingPolicy(max_output_tokens=tokens)


async def until(server: VllmServer, metric: str, least: float) -> None:
    """Wait until a metric of the server is at least `least`."""
    async with asyncio.timeout(60):
        while await asyncio.to_thread(server.metric, metric) < least:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)


def prompts(exchanges: Sequence[Exchange]) -> dict[str, Ids]:
    """The whole prompt of each exchange, from the deltas that capture keeps."""
    found: dict[str, Ids] = {}
    outputs = {exchange.exchange_id: exchange.output_ids for exchange in exchanges}
    for exchange in exchanges:
        before = np.empty(0, np.int32)
        if exchange.parent_id is not None:
            before = np.concatenate([found[exchange.parent_id], outputs[exchange.parent_id]])
        found[exchange.exchange_id] = np.concatenate([before[: exchange.kept], exchange.suffix_ids])
    return found


@functools.lru_cache
def plain_model(folder: Path):
    """The same weights in plain transformers, on two threads: the server has nothing to do then."""
    import torch
    import transformers

    torch.set_num_threads(2)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def plain_logprobs(
    folder: Path, prompt: Sequence[int] | Ids, sampled: Sequence[int] | Ids, temperature: float = 1
) -> Logprobs:
    """Logprobs of `sampled` after `prompt` by one forward pass, shape (T,)."""
    import torch

    rows = torch.tensor([[*map(int, prompt), *map(int, sampled)]])
    with torch.inference_mode():
        logits = plain_model(folder)(input_ids=rows).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        taken = logprobs.gather(1, rows[0, len(prompt) :, None])[:, 0]
    array: Logprobs = taken.numpy()
    return array


def check_session(
    store: Store | SqliteReader, session_id: str, model: Path, *, breaks: Sequence[str] = ()
) -> Trajectory:
    """Hold a session's capture and its traces against the engine's own record and the weights.

    Every exchange has the ids and logprobs that the engine reported; every trace's trained ids are
    those of its exchanges in their place, and their logprobs are a plain forward pass's. `breaks`
    are the reasons of those that the harness makes itself.
    """
    exchanges = store.exchanges(session_id)
    whole = prompts(exchanges)
    assert exchanges
    for exchange in exchanges:
        said = RecordingVllm.said(exchange.exchange_id)
        assert whole[exchange.exchange_id].tolist() == said.prompt
        assert exchange.output_ids.tolist() == said.ids
        assert np.array_equal(exchange.logprobs, said.logprobs)
    trajectory = rebuild(store.read(session_id))
    by_id = {exchange.exchange_id: exchange for exchange in exchanges}
    for trace in trajectory.traces:
        ids = np.concatenate([trace.prompt_ids, trace.response_ids])
        for name, end in zip(trace.exchange_ids, trace.turn_ends, strict=True):
            stop = len(trace.prompt_ids) + end
            said = RecordingVllm.said(name)
            assert ids[:stop].tolist() == said.prompt + said.ids
            assert stop == len(said.prompt) + len(by_id[name].output_ids)
        expected = plain_logprobs(model, trace.prompt_ids, trace.response_ids)
        trained = trace.loss_mask == 1
        assert trained.any()
        assert np.abs(expected - trace.response_logprobs)[trained].max() < CLOSE
    stats = trajectory.metadata["stats"]
    assert stats["tokens_captured"] == sum(len(one.output_ids) for one in exchanges)
    assert stats["tokens_captured"] == stats["tokens_trained"] + sum(
        stats["tokens_excluded"].values()
    )
    assert [one["reason"] for one in stats["breaks"]] == list(breaks)
    return trajectory


async def check_teacher(spec: str, model: Path) -> None:
    """Compare a served teacher's scores with a plain forward pass of the same weights."""
    plain, teacher = PlainModel(model), served_teacher(spec)
    try:
        assert await teacher.folder() == model
        for text in ("Say anything.", "x" * 300):
            ids = np.concatenate([prompt_of(text), np.arange(7, 40, dtype=np.int32)])
            for top in (0, 5):
                found, expected = await teacher.score(ids, top), plain.scores(ids, top)
                assert np.abs(found.logprobs - expected.logprobs).max() < CLOSE
                assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=CLOSE)
                assert found.top_ids.shape == (len(ids), top)
                apart = np.diff(expected.top_logprobs, axis=1, prepend=1) < -2 * CLOSE
                apart[:, :-1] &= apart[:, 1:]
                apart[:, -1:] = False  # its next neighbour is not listed
                assert (found.top_ids[apart] == expected.top_ids[apart]).all()
        assert await teacher.tokenize("Say anything.") is not None
    finally:
        await teacher.aclose()

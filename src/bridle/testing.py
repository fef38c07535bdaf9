"""Shipped fakes: small real implementations for tests and benchmarks, ours and yours.

Nothing in Bridle imports this file.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bridle.bridges.base import SessionGroup
from bridle.engines.base import Engine, EngineInfo, GenerateChunk, GenerateRequest
from bridle.scripted.engine import ScriptedEngine, scripted_logprobs
from bridle.scripted.script import make_script
from bridle.scripted.tokenizer import load_tokenizer
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.types import JSON, FinishReason, LogprobMode, VersionSpan

if TYPE_CHECKING:
    from bridle.types import Ids

T = TypeVar("T")


def scripted_engine(
    turns: Sequence[JSON] = (),
    *,
    conversations: Sequence[JSON] = (),
    tokenizer: str | None = None,
    **fields: object,
) -> ScriptedEngine:
    """A scripted engine from Python values in place of a file.

    `turns` play for every request that none of `conversations` fits; `fields` are the script's
    other fields (`model`, `context_length`). Raises `ConfigError` as a file would.
    """
    rest = [{"turns": list(turns)}] if turns else []
    script = make_script({"conversations": [*conversations, *rest], **fields}, "script")
    return ScriptedEngine(script, tokenizer=load_tokenizer(tokenizer))


class InstantEngine:
    """Answers every prompt at once with the same ids, and looks at nothing: a benchmark's engine.

    Implements `bridle.engines.base.Engine`. Its reply is `tokens` ids long, end token included,
    and its text is what a real tokenizer makes of it.
    """

    def __init__(
        self, tokens: int = 128, *, tokenizer: str | None = None, context_length: int = 1_000_000
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer)
        self._context_length = context_length
        word = self._tokenizer.encode(" word")
        body = np.resize(word, tokens - 1)
        self.output_ids: Ids = np.append(body, np.int32(self._tokenizer.end_id)).astype(np.int32)
        self._logprobs = scripted_logprobs(self.output_ids)

    async def start(self) -> EngineInfo:
        return EngineInfo(
            model="instant",
            context_length=self._context_length,
            logprob_mode=LogprobMode.RAW,
            token_in=True,
            version=0,
            eos_token_ids=(self._tokenizer.end_id,),
            tokenizer_dir=str(self._tokenizer.folder),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """One chunk, whole, at once."""
        yield GenerateChunk(
            output_ids=self.output_ids,
            logprobs=self._logprobs,
            finish_reason=FinishReason.STOP,
            versions=(VersionSpan(0, 0, len(self.output_ids)),),
            prompt_ids_json=request.prompt.json(),
        )

    async def abort(self, request_id: str) -> None:
        """Too late: every call has ended."""

    async def health(self) -> None:
        """Always well."""

    async def aclose(self) -> None:
        """Nothing is held."""


def instant_engine(tokens: int = 128, *, tokenizer: str | None = None) -> InstantEngine:
    """An engine that answers at once with `tokens` ids; see `InstantEngine`."""
    return InstantEngine(tokens, tokenizer=tokenizer)


class RecordingEngine:
    """Passes every call on to another engine and keeps the requests, oldest first."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.closed_early: list[str] = []
        """Request ids whose iterator was closed before its last chunk."""

    async def start(self) -> EngineInfo:
        return await self.engine.start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """The other engine's chunks."""
        self.requests.append(request)
        ended = False
        try:
            async for chunk in self.engine.generate(request):
                ended = chunk.finish_reason is not None
                yield chunk
        except Exception:
            ended = True
            raise
        finally:
            if not ended:
                self.closed_early.append(request.request_id)

    async def abort(self, request_id: str) -> None:
        """Noted and passed on."""
        self.aborted.append(request_id)
        await self.engine.abort(request_id)

    async def health(self) -> None:
        """The other engine's."""
        await self.engine.health()

    async def aclose(self) -> None:
        """Closes the other engine."""
        await self.engine.aclose()


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can jump to the next timer in place of waiting for it.

    Within `jumping` hours of waiting take as long as the work between them, and every run sees the
    same times. What would run in a thread runs at once, on the loop. Only for code that waits for
    timers alone: time would jump past the answer of another process or machine.

        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(simulation())
    """

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        """Seconds; stands still while code runs within `jumping`."""
        return self._jumps.now if self._jumps.on else super().time() + self._jumps.ahead

    @contextmanager
    def jumping(self) -> Iterator[None]:
        """Jump from timer to timer inside."""
        jumps, began = self._jumps, self.time()
        self.set_default_executor(_AtOnce())
        jumps.now, jumps.on = began, True
        try:
            yield
        finally:
            jumps.ahead += jumps.now - self._real()
            jumps.on = False

    def _real(self) -> float:
        return super().time() + self._jumps.ahead


class _Jumps(selectors.DefaultSelector):
    """Takes note of how long it would have waited, and does not wait."""

    on = False
    now = 0.0
    ahead = 0.0
    """How far the loop's clock is before the machine's, seconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.on or timeout is None:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.now += max(timeout, 0)
        return ready


class _AtOnce(ThreadPoolExecutor):
    """Does what it is given before `submit` returns; starts no thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:  # noqa: ANN401 - as the base
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            done.set_exception(error)
        return done


# ---- conformance of trainers' bridges

Part = tuple[str, Sequence[int], MaskReason, int | Sequence[int]]
"""Call, ids, reason, and the policy version of all or of each; no call for ids that were given."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRow:
    """One training sequence, read out of a trainer's own tensors. All sequences are aligned."""

    session_id: str
    input_ids: Sequence[int]
    mask: Sequence[int | bool]
    """1 = the loss is computed on it."""
    logprobs: Sequence[float]
    versions: Sequence[int] | None = None
    """`None` = this trainer has none per token."""
    weight: float | None = None
    """`None` = this trainer has none per row."""


@dataclass(frozen=True, slots=True)
class Conformance:
    """Differences between the tokens that a trainer trains and those that it should."""

    captured: int
    """Sampled tokens of all sessions, each counted once."""
    excluded: dict[str, int]
    """Tokens that must not train, by reason; `unknown` = the session has no reward."""
    trained: int
    """Tokens that the trainer trains."""
    missing: dict[str, int]
    """Session -> tokens that should train and do not."""
    extra: dict[str, int]
    """Session -> tokens that train and should not, or under another context."""
    wrong: list[str]
    """Sessions with a wrong logprob, version or sum of weights, and which."""

    def check(self, missing: dict[str, int] | None = None) -> None:
        """Raise `AssertionError` unless exactly `missing` is left out, and all else is right."""
        if (self.missing, self.extra, self.wrong) != (missing or {}, {}, []):
            raise AssertionError(self)
        left = sum(self.excluded.values()) + sum(self.missing.values())
        if self.trained != self.captured - left:
            raise AssertionError(self)


def trainer_conformance(groups: Sequence[SessionGroup], rows: Iterable[TrainedRow]) -> Conformance:
    """Compare a trainer's rows with the sessions that they were made from, token by token.

    A token is the same where all ids before it are; so its context is compared as well.
    """
    sampled: dict[tuple[str, bytes], tuple[float, int]] = {}
    excluded: dict[tuple[str, bytes], str] = {}
    for session in (one for group in groups for one in group.sessions):
        for trace in session.traces:
            ids = np.concatenate([trace.prompt_ids, trace.response_ids]).astype(np.int64)
            for at in np.flatnonzero(trace.reasons != MaskReason.PROMPT).tolist():
                key = session.session_id, ids[: len(trace.prompt_ids) + at + 1].tobytes()
                if trace.loss_mask[at] and session.reward is not None:
                    sampled[key] = float(trace.response_logprobs[at]), int(trace.versions[at])
                else:
                    unknown = session.reward is None
                    excluded[key] = "unknown" if unknown else MaskReason(trace.reasons[at]).key
    excluded = {key: reason for key, reason in excluded.items() if key not in sampled}
    trained: Counter[tuple[str, bytes]] = Counter()
    wrong: list[str] = []
    weights: dict[str, float] = {}
    for row in rows:
        ids = np.asarray(row.input_ids, np.int64)
        mask = np.asarray(row.mask, bool)
        if row.weight is not None and mask.any():
            weights[row.session_id] = weights.get(row.session_id, 0.0) + row.weight
        for at in np.flatnonzero(mask).tolist():
            key = row.session_id, ids[: at + 1].tobytes()
            trained[key] += 1
            logprob, version = sampled.get(key, (row.logprobs[at], -1))
            if not abs(logprob - row.logprobs[at]) <= 1e-6:  # NaN is wrong too
                wrong.append(f"{row.session_id}: logprob {row.logprobs[at]}, not {logprob}")
            if key in sampled and row.versions is not None and row.versions[at] != version:
                wrong.append(f"{row.session_id}: version {row.versions[at]}, not {version}")
    wrong += [f"{one}: weights sum to {w}" for one, w in weights.items() if not abs(w - 1) <= 1e-6]
    should = Counter(sampled.keys())
    return Conformance(
        captured=len(sampled) + len(excluded),
        excluded=dict(Counter(excluded.values())),
        trained=trained.total(),
        missing=dict(Counter(key[0] for key in (should - trained).elements())),
        extra=dict(Counter(key[0] for key in (trained - should).elements())),
        wrong=wrong,
    )


def trainer_sessions() -> list[SessionGroup]:
    """Three groups of four sessions, one of each shape that a trainer's bridge meets."""
    yes, given, context = MaskReason.TRAINED, MaskReason.PROMPT, MaskReason.CONTEXT
    first: Part = ("first", [10, 11, 12], yes, 3)
    tool: Part = ("", [20, 21], given, -1)
    last: Part = ("last", [30, 31, 32, 33], yes, 3)
    whole = _trace("main", [1, 2, 3], first, tool, last)
    fork = _trace("fork", [1, 2, 3], ("first", [10, 11, 12], context, 3), ("", [22], given, -1),
                  ("other", [34, 35], yes, 3))  # fmt: skip
    helpers = [
        _trace(f"helper{n}", [5, 6 + n], (f"sub{n}", [40, 41 + n], yes, 3),
               metadata={"kind": "subagent", "agent": "helper"})
        for n in range(2)
    ]  # fmt: skip
    cut = _trace("main", [1, 2, 3], first, tool, ("last", [30, 31], MaskReason.CUT, 3))
    image: JSON = {"digest": "0" * 64, "media_type": "image/png", "start": 1, "length": 1}
    drift = _trace("main", [1, 2, 3], ("first", [10, 11, 12], MaskReason.BROKEN, 3), tool, last)
    mixed = _trace("main", [1, 2, 3], first, tool, ("last", [30, 31, 32, 33], yes, [3, 3, 4, 4]))
    refused = _trace("again", [1, 2, 3], ("refused", [13, 14], MaskReason.REJECTED, 3))
    compacted = _trace("compacted", [1, 7, 8], ("third", [36, 37, 38], yes, 4))
    groups = {
        "a": (_session("plain", 1.0, whole), _session("branches", 0.0, whole, fork),
              _session("compaction", 1.0, whole, compacted),
              _session("subagents", 0.5, whole, *helpers)),
        "b": (_session("partial", 1.0, cut, status="TIMEOUT"),
              _session("truncated", 0.0, _trace("main", [1, 2, 3], first, finish="length")),
              _session("images", 1.0, _trace("main", [1, 2, 3], first, media=(image,))),
              _session("drift", 0.0, drift)),
        "c": (_session("versions", 1.0, mixed), _session("rejected", 0.0, whole, refused),
              _session("unscored", None, whole), _session("failed", None, status="ERROR")),
    }  # fmt: skip
    return [SessionGroup(task_id, sessions) for task_id, sessions in groups.items()]


def _session(
    name: str, reward: float | None, *traces: Trace, status: str = "COMPLETED"
) -> Trajectory:
    error = None if status == "COMPLETED" else "it ended early"
    return Trajectory(name, status, traces, reward, error, {"task_id": "t", "train": ["agent"]})


def _trace(
    name: str,
    prompt: Sequence[int],
    *parts: Part,
    finish: str = "stop",
    metadata: JSON | None = None,
    media: Sequence[JSON] = (),
) -> Trace:
    ids = np.array([one for _, of, _, _ in parts for one in of], np.int32)
    reasons = np.repeat([part[2] for part in parts], [len(part[1]) for part in parts])
    mask = (reasons == MaskReason.TRAINED).astype(np.uint8)
    versions = [np.broadcast_to(version, len(of)) for _, of, _, version in parts]
    ends = np.cumsum([len(part[1]) for part in parts]).tolist()
    said = [{"role": "assistant", "content": "hm"} if part[0] else
            {"role": "tool", "tool_call_id": "c", "content": "ok"} for part in parts]  # fmt: skip
    return Trace(
        trace_id=name,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=ids,
        loss_mask=mask,
        response_logprobs=np.where(mask, -(ids % 16) / 16 - 0.125, 0).astype(np.float32),
        versions=np.concatenate(versions).astype(np.int32),
        reasons=reasons.astype(np.uint8),
        exchange_ids=tuple(part[0] for part in parts if part[0]),
        turn_ends=tuple(end for part, end in zip(parts, ends, strict=True) if part[0]),
        finish_reason=finish,
        logprob_mode="processed",
        prompt_messages=[{"role": "user", "content": "go"}],
        response_messages=said,
        metadata=metadata or {},
        media=media,
    )

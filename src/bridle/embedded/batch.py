"""The scheduler thread: it admits calls, computes steps, and samples a token for each ready call.

A step computes one token of every decoding call and, up to a budget, pieces of prompts, oldest
first, so a long prompt delays the others by a bounded time. New calls, aborts and new weights are
handled between two steps, in the order of their requests. Sampled tokens go to the callers' event
loops in batches: at the first token, at the end, and every `FLUSH_S` between, because waking an
event loop for every token costs more than sampling it.

When memory runs out, the prefix cache is dropped first, then the newest calls wait and are
recomputed later; a call fails only if it does not fit alone.

A token is drawn from the softmax of its logits after, in this order: `logit_bias`, penalties,
suppressed ids (`min_tokens`), temperature, min-p, top-k, top-p over what top-k left. This is vLLM's
order, and the logprobs are what vLLM calls processed. The draw inverts the cumulative distribution
in float64 at one uniform number of the call's own, so it does not depend on the neighbours in the
batch beyond rounding of the logits. At temperature 0 the distribution is a single point: the most
likely token, with logprob 0.0.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from bridle.embedded.call import BatchedCall, Mailbox, common_prefix
from bridle.embedded.model import LoadedModel
from bridle.engines.base import GenerateChunk
from bridle.errors import EngineError
from bridle.types import FinishReason

FLUSH_S = 0.02

SHARE_TOKENS = 32
"""A call waits for another call's prompt if that saves it at least this many tokens."""


@dataclass(slots=True)
class Counters:
    """Counters of the batch since its start."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    sampled_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through the model."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache or from another call."""
    put_back: int = 0
    """Calls preempted because memory ran out."""


class BatchScheduler:
    """State of the sampling thread. Other threads may call `post` and `ask` only."""

    def __init__(
        self, loaded: LoadedModel, *, max_batch: int, step_tokens: int, version: int
    ) -> None:
        self._loaded = loaded
        self._decoder = loaded.decoder
        self._max_batch = max_batch
        self._step_tokens = step_tokens
        self.version = version
        self.counters = Counters()
        self._lock = threading.Lock()
        self._ended = False
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[BatchedCall] = deque()
        self._running: list[BatchedCall] = []
        """Oldest first."""
        self._unanswered: set[BatchedCall] = set()
        """Calls that have sent no last chunk and no error yet."""
        self._flushed_at = 0.0

    # ---- from other threads

    def post(self, work: Callable[[], None] | None) -> bool:
        """Queue `work`, which the engine's thread runs between two steps; `None` ends the thread.

        `False` = the thread has ended.
        """
        with self._lock:
            if not self._ended:
                self._inbox.put(work)
            return not self._ended

    def ask(self, work: Callable[[], None]) -> Future[None]:
        """Queue `work`, which the engine's thread runs between two steps.

        The future gets its completion or its error.
        """
        answer: Future[None] = Future()

        def do() -> None:
            try:
                work()
            except Exception as error:
                answer.set_exception(error)
                raise
            answer.set_result(None)

        if not self.post(do):
            answer.set_exception(EngineError("the embedded engine is closed"))
        return answer

    # ---- the thread

    def run(self) -> None:
        """Run the sampling loop until it is ended; errors that belong to no single call escape."""
        with torch.inference_mode():
            while self._run_posted():
                if self._running or self._waiting:
                    self._step()

    def _run_posted(self) -> bool:
        """Run posted work, waiting for some if there are no calls. `False` = end the thread."""
        idle = not self._running and not self._waiting
        while True:
            try:
                work = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if work is None:
                return False
            work()
            idle = False

    def submit(self, call: BatchedCall) -> None:
        """Queue a call to be sampled; to be run in the engine's thread."""
        self._unanswered.add(call)
        self._waiting.append(call)

    def abort(self, call: BatchedCall, *, silently: bool) -> None:
        """End a call; unless `silently`, its caller gets a last chunk. To be run in the engine's
        thread.
        """
        if call not in self._unanswered:
            return
        call.finish = FinishReason.ABORT
        call.gone = silently
        if call in self._running:
            self._leave(call)
        else:
            self._waiting.remove(call)
        self._send([call])

    def end(self, error: EngineError) -> None:
        """Refuse new work and send `error` to every caller, including those of queued calls."""
        with self._lock:
            self._ended = True
        while not self._inbox.empty():
            work = self._inbox.get()
            with suppress(Exception):  # what broke the thread may break this too
                if work is not None:
                    work()
        self._fail(list(self._unanswered), error)
        self._running.clear()
        self._waiting.clear()

    def update(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy new weights in; running calls continue under them. To be run in the engine's thread.

        The running calls' caches then hold keys of both weights and serve no other call; the prefix
        cache is cleared.
        """
        own = self._loaded.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self.version = version
        self._decoder.prefixes.clear()
        for call in self._running:
            call.cache_version = -1

    # ---- one step

    def _step(self) -> None:
        self._admit()
        ready, logits = self._compute()
        if ready:
            self._take(ready, logits)
        self.counters.steps += 1
        self.counters.running = len(self._running)
        self.counters.waiting = len(self._waiting)

    def _admit(self) -> None:
        """Admit waiting calls, oldest first, while there is room."""
        passed: deque[BatchedCall] = deque()
        while self._waiting and len(self._running) < self._max_batch:
            call = self._waiting.popleft()
            if self._worth_waiting(call):
                passed.append(call)
                continue
            if not self._decoder.admit(call, self.version):
                passed.append(call)
                break
            if not call.joined:
                call.joined = True
                call.cached_tokens = call.computed
                self.counters.cached_tokens += call.computed
            self._running.append(call)
        self._waiting.extendleft(reversed(passed))

    def _worth_waiting(self, call: BatchedCall) -> bool:
        """Return whether a running call is about to compute a prefix that this call can copy."""
        if not self._decoder.copies:
            return False
        for other in self._running:
            if other.pending > 1 and other.cache_version == self.version:
                shared = common_prefix(other.ids[: other.length], call.ids[: call.length - 1])
                if shared - other.computed >= SHARE_TOKENS:
                    return True
        return False

    def _plan(self) -> list[tuple[BatchedCall, int]]:
        """Return the next step's work: pairs of a call and how many of its ids to compute."""
        work = [(call, 1) for call in self._running if call.pending == 1]
        left = self._step_tokens
        for call in self._running:
            if call.pending > 1 and left > 0:
                count = min(call.pending, left) if self._decoder.pieces else call.pending
                left -= count
                work.append((call, count))
        return work

    def _compute(self) -> tuple[list[BatchedCall], torch.Tensor]:
        """Run the model once; return the calls that can sample now, and their logits."""
        while True:
            work = self._plan()
            if not work:
                return [], torch.empty(0)
            try:
                if self._decoder.reserve(work):
                    logits = self._decoder.forward(work)
                    self.counters.computed_tokens += sum(count for _, count in work)
                    return [call for call, _ in work if call.pending == 0], logits
                self._put_back()
            except (RuntimeError, MemoryError) as error:
                if not _out_of_memory(error):
                    raise
                self._relieve(error)

    def _put_back(self) -> None:
        """Preempt the newest call: it waits and is recomputed later."""
        call = self._running.pop()
        self._decoder.release(call, keep=False)
        self._waiting.appendleft(call)
        self.counters.put_back += 1

    def _relieve(self, error: BaseException) -> None:
        """Free memory: clear the prefix cache, else preempt a call, else fail the only one."""
        if len(self._decoder.prefixes):
            self._decoder.prefixes.clear()
        elif len(self._running) > 1:
            self._put_back()
        else:
            call = self._running.pop()
            self._decoder.release(call, keep=False)
            text = f"out of memory at {call.length} tokens of context: {error}"
            self._fail([call], EngineError(text, status=507))

    def _take(self, ready: list[BatchedCall], logits: torch.Tensor) -> None:
        """Sample one token for each call, remove finished calls, and send chunks."""
        tokens, logprobs = sample(logits, ready)
        version = self.version
        ended = []
        first = False
        for call, token, logprob in zip(ready, tokens, logprobs, strict=True):
            if math.isnan(logprob):
                self._fail_on_nan(call)
                continue
            first = first or not call.sampled
            call.append(token, logprob, version)
            if call.finish is not None:
                ended.append(call)
        self.counters.sampled_tokens += len(ready)
        for call in ended:
            self._leave(call)
        now = time.monotonic()
        if first or now - self._flushed_at >= FLUSH_S:
            self._flushed_at = now
            ended.extend(call for call in self._running if call.has_unsent())
        if ended:
            self._send(ended)

    def _fail_on_nan(self, call: BatchedCall) -> None:
        self._running.remove(call)
        self._decoder.release(call, keep=False)
        self._decoder.wipe()
        text = f"after {call.length} tokens under policy version {self.version}"
        self._fail([call], EngineError(f"the model's logits are not numbers {text}", status=500))

    def _leave(self, call: BatchedCall) -> None:
        self._running.remove(call)
        self._decoder.release(call, keep=call.cache_version == self.version)

    def _fail(self, calls: list[BatchedCall], error: EngineError) -> None:
        self._unanswered.difference_update(calls)
        _deliver([(call, error) for call in calls])

    def _send(self, calls: list[BatchedCall]) -> None:
        self._unanswered.difference_update(call for call in calls if call.finish is not None)
        _deliver([(call, call.chunk()) for call in calls])


def _deliver(messages: list[tuple[BatchedCall, GenerateChunk | EngineError]]) -> None:
    """Send chunks and errors to the callers' event loops, one wake-up per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, GenerateChunk | EngineError]]] = {}
    for call, message in messages:
        if call.mailbox is not None and not call.gone:
            by_loop.setdefault(call.mailbox.loop, []).append((call.mailbox, message))
    for loop, posts in by_loop.items():
        with suppress(RuntimeError):  # a closed loop: its callers have gone
            loop.call_soon_threadsafe(_put_all, posts)


def _put_all(posts: list[tuple[Mailbox, GenerateChunk | EngineError]]) -> None:
    for mailbox, message in posts:
        mailbox.messages.put_nowait(message)


def _out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; torch on a CPU raises a plain RuntimeError."""
    known = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, known) or "can't allocate memory" in str(error)


def sample(logits: torch.Tensor, calls: Sequence[BatchedCall]) -> tuple[list[int], list[float]]:
    """Sample one token for each row of `logits`, shape (B, V); row b belongs to `calls[b]`.

    Returns token ids and logprobs (nats). A row that holds NaN gives a NaN logprob. May change
    `logits` in place.
    """
    logits = logits.float()
    for row, call in enumerate(calls):
        if call.counts is not None or call.bias or call.min_tokens:
            _adjust(logits[row], call)
    if any(call.temperature != 1.0 for call in calls):
        logits = logits / logits.new_tensor([[call.temperature] for call in calls])
    if any(call.min_p for call in calls):
        shares = logits.new_tensor([[call.min_p] for call in calls])
        best = logits.max(dim=-1, keepdim=True).values
        logits = logits.masked_fill(logits < best + shares.log(), float("-inf"))
    narrow = [b for b, call in enumerate(calls) if call.top_k or call.top_p < 1.0]
    if narrow:
        rows = logits[narrow]
        logits[narrow] = _narrowed(rows, [calls[b] for b in narrow])
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _draw(logprobs, calls)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    if any(call.greedy for call in calls):
        greedy = torch.tensor([call.greedy for call in calls], device=logits.device)
        best, at = logprobs.max(dim=-1)
        tokens = torch.where(greedy, at, tokens)
        chosen = torch.where(greedy, torch.where(best.isnan(), best, 0.0), chosen)
    return tokens.tolist(), chosen.tolist()


def _draw(logprobs: torch.Tensor, calls: Sequence[BatchedCall]) -> torch.Tensor:
    """Draw one id per row, shape (B,), int64; an id of probability 0 is never drawn."""
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    uniforms = [[0.0 if call.greedy else call.uniforms.next()] for call in calls]
    points = cumulative.new_tensor(uniforms) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, points, right=True)[:, 0]
    return found.clamp_(max=logprobs.shape[-1] - 1)


def _adjust(logits: torch.Tensor, call: BatchedCall) -> None:
    """Apply the bias, penalties and suppressed ids to one row in place."""
    for token, bias in call.bias.items():
        if 0 <= token < len(logits):
            logits[token] += bias
    if call.repetition != 1.0:
        seen = torch.tensor(np.unique(call.ids[: call.length]), device=logits.device).long()
        of_seen = logits[seen]
        logits[seen] = torch.where(
            of_seen > 0, of_seen / call.repetition, of_seen * call.repetition
        )
    if call.counts:
        ids = torch.tensor(list(call.counts), device=logits.device)
        counts = logits.new_tensor(list(call.counts.values()))
        logits[ids] -= call.presence + call.frequency * counts
    if suppressed := [i for i in call.suppressed if 0 <= i < len(logits)]:
        logits[suppressed] = float("-inf")


def _narrowed(logits: torch.Tensor, calls: Sequence[BatchedCall]) -> torch.Tensor:
    """Set everything outside top-k, then top-p, to minus infinity.

    Ties with the last token kept stay in, as in vLLM.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    size = logits.shape[-1]
    ranks = torch.tensor([[min(call.top_k or size, size) - 1] for call in calls]).to(logits.device)
    least = ordered.gather(1, ranks)
    if any(call.top_p < 1.0 for call in calls):
        kept = ordered.masked_fill(ordered < least, float("-inf"))
        probs = kept.double().softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        top_p = before.new_tensor([[call.top_p] for call in calls])
        inside = (before < top_p).sum(dim=-1, keepdim=True).clamp_(min=1)
        least = torch.maximum(least, ordered.gather(1, inside - 1))
    return logits.masked_fill(logits < least, float("-inf"))

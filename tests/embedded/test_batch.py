"""The thread's rules, on a small decoder that counts what it is asked to compute."""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridle.embedded.batch import BatchScheduler
from bridle.embedded.call import BatchedCall, Mailbox
from bridle.embedded.decoders import PrefixStore
from bridle.errors import EngineError
from bridle.types import FinishReason, Sampling

VOCAB = 50


class CountingDecoder:
    """The next token is always the last one plus one; keeps nothing but what it was asked."""

    pieces = True
    copies = True

    def __init__(self, room: int = 10**9) -> None:
        self.room = room
        """Tokens of all calls together that it has memory for."""
        self.prefixes = PrefixStore(1000)
        self.work: list[list[tuple[str, int]]] = []
        self.calls: list[BatchedCall] = []
        self.faults: list[BaseException] = []
        self.gate: threading.Event | None = None
        self.admitted = threading.Event()

    def admit(self, call, version):
        if self.calls and sum(c.length for c in self.calls) + call.length > self.room:
            return False
        self.calls.append(call)
        self.admitted.set()
        call.computed, call.cache_version = 0, version
        return True

    def reserve(self, work):
        return sum(c.computed for c in self.calls) + sum(n for _, n in work) <= self.room

    def forward(self, work):
        if self.gate is not None:
            self.gate.wait(5)
        if self.faults:
            raise self.faults.pop(0)
        self.work.append([(call.request_id, n) for call, n in work])
        rows = []
        for call, n in work:
            call.computed += n
            if call.pending == 0:
                rows.append(torch.eye(VOCAB)[(call.ids[call.length - 1] + 1) % VOCAB])
        return torch.stack(rows) if rows else torch.empty(0)

    def release(self, call, *, keep):
        self.calls.remove(call)
        call.computed, call.cache_version = 0, -1

    def wipe(self):
        pass


class Running:
    """A batch in its thread."""

    def __init__(self, decoder: CountingDecoder, **options: Any) -> None:
        self.decoder = decoder
        self.weights = {"w": torch.zeros(2)}
        model = SimpleNamespace(state_dict=lambda: self.weights)
        loaded: Any = SimpleNamespace(decoder=decoder, model=model)
        defaults: dict[str, Any] = {"max_batch": 4, "step_tokens": 8, "version": 0}
        self.batch = BatchScheduler(loaded, **{**defaults, **options})
        self.ended: Future[None] = Future()
        self.thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        error = EngineError("closed")
        try:
            self.batch.run()
        except Exception as fault:  # noqa: BLE001 - as the engine does
            error = EngineError(str(fault))
        self.batch.end(error)
        self.ended.set_result(None)

    async def __aenter__(self):
        self.thread.start()
        return self

    async def __aexit__(self, *_):
        self.batch.post(None)
        await asyncio.wrap_future(self.ended)
        self.thread.join()

    def hold(self) -> threading.Event:
        """Nothing is stepped until the event is set; what is posted until then comes at once."""
        event = threading.Event()

        def wait() -> None:
            event.wait(5)

        self.batch.post(wait)
        return event

    def submit(self, name: str, length: int = 3, *, limit: int = 4, first: int = 1) -> Any:
        prompt = (np.arange(length) + first).astype(np.int32)
        sampling = Sampling(temperature=0.0)
        call = BatchedCall(
            name,
            prompt,
            sampling,
            limit=limit,
            stop_ids=frozenset(),
            decode=lambda _: "",
            mailbox=Mailbox(),
        )
        assert self.batch.post(lambda: self.batch.submit(call))
        return call


async def reply_of(call: Any) -> tuple[list[int], FinishReason]:
    """All tokens that a caller was sent, and the end."""
    tokens: list[int] = []
    while True:
        message = await call.mailbox.messages.get()
        if isinstance(message, EngineError):
            raise message
        tokens += message.output_ids.tolist()
        if message.finish_reason is not None:
            return tokens, message.finish_reason


async def test_each_call_of_a_batch_gets_its_own_tokens():
    async with Running(CountingDecoder()) as running:
        calls = [running.submit(f"c{i}", 2 + i, first=3 * i) for i in range(7)]
        for i, call in enumerate(calls):
            tokens, finish = await reply_of(call)
            last = 3 * i + 1 + i
            assert tokens == [last + 1, last + 2, last + 3, last + 4]
            assert finish is FinishReason.LENGTH


async def test_prefill_of_a_long_prompt_is_chunked_while_other_calls_decode():
    decoder = CountingDecoder()
    async with Running(decoder) as running:
        go = running.hold()
        quick = running.submit("quick", 2, limit=6)
        long = running.submit("long", 20, limit=1)
        go.set()
        await reply_of(long)
        await reply_of(quick)
    pieces = [dict(step) for step in decoder.work]
    assert pieces[:4] == [
        {"quick": 2, "long": 6},
        {"quick": 1, "long": 8},
        {"quick": 1, "long": 6},
        {"quick": 1},
    ]


async def test_prefill_is_not_chunked_for_a_decoder_without_support():
    decoder = CountingDecoder()
    decoder.pieces = False
    async with Running(decoder) as running:
        await reply_of(running.submit("long", 20, limit=1))
    assert decoder.work == [[("long", 20)]]


async def test_a_batch_runs_at_most_max_batch_calls():
    decoder = CountingDecoder()
    async with Running(decoder, max_batch=2) as running:
        go = running.hold()
        calls = [running.submit(f"c{i}", first=i * 5) for i in range(5)]
        go.set()
        for call in calls:
            await reply_of(call)
    assert max(len(step) for step in decoder.work) == 2


async def test_calls_with_equal_prompts_wait_for_the_first_s_prefill():
    decoder = CountingDecoder()
    async with Running(decoder, step_tokens=64) as running:
        go = running.hold()
        group = [running.submit(f"g{i}", 40, limit=2, first=0) for i in range(3)]
        go.set()
        for call in group:
            await reply_of(call)
    assert decoder.work[0] == [("g0", 40)]


async def test_the_newest_call_is_preempted_when_memory_runs_out_and_no_token_is_lost():
    decoder = CountingDecoder(room=14)
    async with Running(decoder) as running:
        go = running.hold()
        calls = [running.submit(f"c{i}", 4, limit=8, first=i * 9) for i in range(3)]
        go.set()
        for i, call in enumerate(calls):
            tokens, _ = await reply_of(call)
            assert tokens == [(i * 9 + 4 + k) % VOCAB for k in range(8)]
    assert running.batch.counters.put_back > 0


async def test_out_of_memory_drops_the_prefix_cache_then_preempts_then_fails_the_last_call():
    decoder = CountingDecoder()
    decoder.prefixes.add(np.zeros(16, dtype=np.int32), None, 1)
    oom = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"
    decoder.faults = [RuntimeError(oom), torch.OutOfMemoryError(oom), MemoryError(oom)]
    async with Running(decoder) as running:
        go = running.hold()
        first = running.submit("first")
        second = running.submit("second", first=20)
        go.set()
        with pytest.raises(EngineError, match="out of memory at 3 tokens"):
            await reply_of(first)
        assert (await reply_of(second))[0] == [23, 24, 25, 26]
    assert len(decoder.prefixes) == 0
    assert running.batch.counters.put_back == 1


async def test_a_model_error_fails_every_running_and_waiting_call():
    decoder = CountingDecoder()
    decoder.gate = threading.Event()
    async with Running(decoder, max_batch=1) as running:
        calls = [running.submit("runs"), running.submit("waits")]
        decoder.faults = [RuntimeError("shape mismatch")]
        decoder.gate.set()
        for call in calls:
            with pytest.raises(EngineError, match="shape mismatch"):
                await reply_of(call)
        assert not running.batch.post(lambda: None)
        late = running.batch.ask(lambda: None)
        with pytest.raises(EngineError, match="is closed"):
            late.result(1)


async def test_a_call_submitted_while_the_thread_fails_gets_the_error():
    decoder = CountingDecoder()
    decoder.gate = threading.Event()
    decoder.faults = [RuntimeError("broken")]
    async with Running(decoder) as running:
        first = running.submit("first")
        await asyncio.to_thread(decoder.admitted.wait, 5)
        second = running.submit("second")

        def break_too() -> None:
            raise RuntimeError("also broken")

        asked = running.batch.ask(break_too)
        decoder.gate.set()
        for call in (first, second):
            with pytest.raises(EngineError, match="broken"):
                await reply_of(call)
        assert "also" in str(asked.exception(1))


async def test_an_aborted_call_gets_a_last_chunk_unless_aborted_silently():
    decoder = CountingDecoder()
    decoder.gate = threading.Event()
    async with Running(decoder, max_batch=2) as running:
        spoken, silent, waiting = (running.submit(f"c{i}", first=i * 9) for i in range(3))
        batch = running.batch
        await asyncio.to_thread(decoder.admitted.wait, 5)
        batch.post(lambda: batch.abort(spoken, silently=False))
        batch.post(lambda: batch.abort(silent, silently=True))
        batch.post(lambda: batch.abort(waiting, silently=False))
        batch.post(lambda: batch.abort(waiting, silently=False))
        decoder.gate.set()
        assert (await reply_of(spoken))[1] is FinishReason.ABORT
        assert await reply_of(waiting) == ([], FinishReason.ABORT)
        assert decoder.calls == []
    assert silent.finish is FinishReason.ABORT
    assert waiting.mailbox.messages.empty()


async def test_a_weight_update_takes_effect_between_steps_and_clears_the_prefix_cache():
    decoder = CountingDecoder()
    decoder.gate = threading.Event()
    decoder.prefixes.add(np.zeros(16, dtype=np.int32), None, 1)
    async with Running(decoder) as running:
        call = running.submit("c", limit=4)
        await asyncio.to_thread(decoder.admitted.wait, 5)
        done = running.batch.ask(lambda: running.batch.update({"w": torch.ones(2)}, 5))
        decoder.gate.set()
        await asyncio.wrap_future(done)
        last = None
        while last is None or last.finish_reason is None:
            last = await call.mailbox.messages.get()
    assert [(span.version, span.start, span.end) for span in last.versions] == [
        (0, 0, 1),
        (5, 1, 4),
    ]
    assert running.weights["w"].tolist() == [1.0, 1.0]
    assert len(decoder.prefixes) == 0


def test_a_caller_with_a_closed_event_loop_does_not_block_the_thread():
    async def leave() -> tuple[Running, Any]:
        running = Running(CountingDecoder())
        running.thread.start()
        return running, running.submit("gone", limit=30)

    running, call = asyncio.run(leave())
    running.batch.post(None)
    running.thread.join(5)
    assert not running.thread.is_alive()
    assert call.mailbox.messages.qsize() <= 3

"""Conformance suite of stores: subclass it with `open_store`."""

import asyncio
import dataclasses
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest
from tests.capture.made import MadeSession

from bridle.capture.records import Delivery, Score, SessionRecord, Store
from bridle.errors import StoreError
from bridle.types import DeliveryState, FinishReason, Kind, LogprobMode, VersionSpan


def comparable(exchange):
    """Fields of an exchange with arrays as (dtype, values), for `==`."""
    values = {field.name: getattr(exchange, field.name) for field in dataclasses.fields(exchange)}
    for name in ("suffix_ids", "output_ids", "logprobs"):
        values[name] = (str(values[name].dtype), values[name].tobytes())
    return values


def assert_same(read, written):
    assert [comparable(e) for e in read] == [comparable(e) for e in written]


class StoreConformance:
    """Subclass it with an `open_store`."""

    def open_store(self) -> AbstractAsyncContextManager[Store]:
        """An empty store."""
        raise NotImplementedError

    async def test_what_was_written_is_read_back(self):
        made = MadeSession(metadata={"harness": "pi", "train": ["agent"]})
        made.call(tools=[{"type": "function", "function": {"name": "bash"}}])
        made.call(
            "x0", new=2000, output=700, versions=(VersionSpan(1, 0, 9), VersionSpan(2, 9, 700))
        )
        made.call(
            "x1", kind=Kind.COMPACTION, state=DeliveryState.CUT, extra={"drift": "whitespace"}
        )
        made.call(None, continues="x2", root_reason="tools_changed", state=None, first_token_s=None)
        made.end(0.5, trace_rewards=(0.5, 0.25), metadata={"exit_code": 0})
        async with self.open_store() as store:
            await made.write(store)
            assert list(store.sessions()) == [made.record]
            assert_same(store.exchanges("s1"), made.exchanges)
            assert store.deliveries("s1") == made.deliveries
            assert store.bodies("s1") == made.bodies
            assert store.outcome("s1") == made.outcome

    async def test_one_reading_gives_all_of_a_session(self):
        made = MadeSession()
        made.call()
        async with self.open_store() as store:
            await made.write(store)
            capture = store.read("s1")
            assert capture.session == made.record
            assert_same(capture.exchanges, made.exchanges)
            assert (capture.deliveries, capture.bodies) == (made.deliveries, made.bodies)
            assert capture.outcome is None

    async def test_the_last_of_a_sessions_scores_is_its_reward(self):
        made = MadeSession()
        made.call()
        given = [
            Score("s1", 2000.0, 0.5, (0.5, 1.0), "ann", "first look", {"tests": 3}),
            Score("s1", 3000.0, 0.25, by="\udcff", why="a second look"),
        ]
        async with self.open_store() as store:
            await made.write(store)
            await store.score(given[0])
            assert store.outcome("s1") is None
            made.end(1.0, metadata={"exit_code": 0, "token_rewards": [[1.0]]})
            assert made.outcome is not None
            await store.close_session(made.outcome)
            first = store.outcome("s1")
            assert first is not None
            assert (first.reward, first.trace_rewards) == (0.5, (0.5, 1.0))
            assert first.metadata["evaluation"] == {"tests": 3}
            assert "token_rewards" not in first.metadata
            await store.score(given[1])
            last = store.read("s1").outcome
            assert last is not None
            assert (last.reward, last.trace_rewards, last.status) == (0.25, None, "COMPLETED")
            assert [each["why"] for each in last.metadata["scores"]] == [
                "first look", "a second look",
            ]  # fmt: skip
            with pytest.raises(StoreError, match="never opened"):
                await store.score(Score("nobody", 1.0, 1.0))

    async def test_a_score_completes_a_session_whose_evaluator_failed(self):
        made = MadeSession()
        made.call()
        made.end(None, status="ERROR", cause="evaluator", error="NameError: scroe")
        async with self.open_store() as store:
            await made.write(store)
            await store.score(Score("s1", 2000.0, None, why="still not known"))
            kept = store.outcome("s1")
            assert kept is not None
            assert (kept.status, kept.cause) == ("ERROR", "evaluator")
            await store.score(Score("s1", 3000.0, 1.0))
            now = store.outcome("s1")
            assert now is not None
            assert (now.status, now.cause, now.error, now.reward) == ("COMPLETED", None, None, 1.0)

    async def test_an_exchange_without_tokens_is_kept(self):
        made = MadeSession()
        made.call(
            new=0, output=0, logprobs=np.empty(0, np.float32), logprob_mode=LogprobMode.NONE,
            versions=(), finish_reason=FinishReason.ABORT, reply=b"", kept=0,
        )  # fmt: skip
        async with self.open_store() as store:
            await made.write(store)
            assert_same(store.exchanges("s1"), made.exchanges)

    async def test_sessions_do_not_see_each_other(self):
        one, two = MadeSession("one", seed=1), MadeSession("two", seed=2)
        async with self.open_store() as store:
            for made in (one, two):
                await store.open_session(made.record)
            for turn in range(5):
                for made in (one, two):
                    exchange = made.call(f"x{turn - 1}" if turn else None)
                    await store.commit(exchange, made.new_bodies[exchange.exchange_id])
                    await store.deliver(made.deliveries[exchange.exchange_id])
            for made in (one, two):
                assert_same(store.exchanges(made.session_id), made.exchanges)
                assert store.deliveries(made.session_id) == made.deliveries
                assert store.bodies(made.session_id) == made.bodies
            assert [s.session_id for s in store.sessions()] == ["one", "two"]

    async def test_a_session_that_is_forgotten_was_never_there_and_costs_the_others_nothing(self):
        one, two = MadeSession("one", seed=1), MadeSession("two", seed=2)
        for made in (one, two):
            made.call(new=4000)
            made.call("x0", new=4000)
            made.end(0.5)
        async with self.open_store() as store:
            await store.forget("one")
            for made in (one, two):
                await made.write(store)
            whole = store.size()
            assert store.read("one").outcome is not None
            await store.forget("one")
            await store.forget("one")
            assert [s.session_id for s in store.sessions()] == ["two"]
            assert (store.exchanges("one"), store.outcome("one")) == ([], None)
            with pytest.raises(StoreError):
                store.read("one")
            assert_same(store.exchanges("two"), two.exchanges)
            assert store.size() <= whole
            again = MadeSession("one", seed=3)
            again.call()
            await again.write(store)
            assert_same(store.exchanges("one"), again.exchanges)

    async def test_the_last_delivery_record_of_an_exchange_counts(self):
        made = MadeSession()
        made.call()
        async with self.open_store() as store:
            await made.write(store)
            last = Delivery("x0", "s1", DeliveryState.SUPERSEDED, 2000.0, "asked again")
            await store.deliver(last)
            assert store.deliveries("s1") == {"x0": last}

    async def test_a_body_that_is_known_already_is_ignored(self):
        made = MadeSession()
        made.call()
        made.call("x0")
        async with self.open_store() as store:
            await store.open_session(made.record)
            for exchange in made.exchanges:
                await store.commit(exchange, made.bodies)
            assert store.bodies("s1") == made.bodies

    async def test_reading_sees_what_was_given_before_it_is_awaited(self):
        made = MadeSession()
        for _ in range(20):
            made.call()
        async with self.open_store() as store:
            await store.open_session(made.record)
            async with asyncio.TaskGroup() as group:
                for exchange in made.exchanges:
                    group.create_task(store.commit(exchange, {}))
                await asyncio.sleep(0)
                assert len(store.exchanges("s1")) == 20

    async def test_a_delivery_given_without_a_coroutine_is_read_at_once_or_has_its_error(self):
        made = MadeSession()
        made.call()
        async with self.open_store() as store:
            await store.open_session(made.record)
            errors: asyncio.Queue[StoreError] = asyncio.Queue()
            store.deliver_soon(made.deliveries["x0"], errors.put_nowait)
            assert store.deliveries("s1") == made.deliveries
            await store.written()
            assert errors.empty()
            strange = dataclasses.replace(made.deliveries["x0"], session_id="s2")
            store.deliver_soon(strange, errors.put_nowait)
            store.deliver_soon(made.deliveries["x0"], errors.put_nowait)
            await store.written()
            await asyncio.sleep(0)
            assert "never opened" in str(errors.get_nowait())
            assert errors.empty()
            assert store.deliveries("s1") == made.deliveries
        store.deliver_soon(made.deliveries["x0"], errors.put_nowait)
        assert "the store is closed" in str(await errors.get())
        await store.written()

    async def test_it_can_be_read_from_another_thread(self):
        made = MadeSession()
        made.call()
        async with self.open_store() as store:
            await made.write(store)
            assert len(await asyncio.to_thread(store.exchanges, "s1")) == 1

    async def test_an_unknown_session_is_empty_to_read_and_an_error_to_write(self):
        made = MadeSession()
        exchange, outcome = made.call(), made.end()
        async with self.open_store() as store:
            assert list(store.exchanges("s1")) == []
            assert dict(store.deliveries("s1")) == {}
            assert dict(store.bodies("s1")) == {}
            assert store.outcome("s1") is None
            for attempt in (
                store.commit(exchange, {}),
                store.deliver(made.deliveries["x0"]),
                store.close_session(outcome),
            ):
                with pytest.raises(StoreError, match="'s1' was never opened"):
                    await attempt
            with pytest.raises(StoreError, match="'s1' was never opened"):
                store.read("s1")

    async def test_nothing_is_recorded_twice(self):
        made = MadeSession()
        made.call()
        outcome = made.end()
        async with self.open_store() as store:
            await made.write(store)
            with pytest.raises(StoreError, match="'s1' is recorded already"):
                await store.open_session(SessionRecord("s1", 5.0))
            with pytest.raises(StoreError, match="'x0' is recorded already"):
                await store.commit(made.exchanges[0], {})
            with pytest.raises(StoreError, match="'s1' has an outcome already"):
                await store.close_session(outcome)
            assert_same(store.exchanges("s1"), made.exchanges)
            assert list(store.sessions()) == [made.record]

    async def test_one_bad_record_costs_the_others_nothing(self):
        made = MadeSession()
        for _ in range(8):
            made.call()
        async with self.open_store() as store:
            await store.open_session(made.record)
            await store.commit(made.exchanges[0], {})
            results = []

            async def give(exchange):
                try:
                    await store.commit(exchange, made.new_bodies[exchange.exchange_id])
                    results.append("ok")
                except StoreError:
                    results.append("error")

            async with asyncio.TaskGroup() as group:
                for exchange in made.exchanges:
                    group.create_task(give(exchange))
            assert sorted(results) == ["error"] + ["ok"] * 7
            assert_same(store.exchanges("s1"), made.exchanges)

    async def test_late_records_of_an_ended_session_are_kept(self):
        made = MadeSession()
        made.call()
        made.end()
        async with self.open_store() as store:
            await made.write(store)
            late = made.call("x0")
            await store.commit(late, made.new_bodies["x1"])
            await store.deliver(made.deliveries["x1"])
            assert_same(store.exchanges("s1"), made.exchanges)
            assert store.deliveries("s1") == made.deliveries

    async def test_flush_returns_and_closing_twice_is_no_error(self):
        made = MadeSession()
        made.call()
        async with self.open_store() as store:
            await store.flush()
            await made.write(store)
            await store.flush()
            assert len(store.exchanges("s1")) == 1
            await store.aclose()
            await store.aclose()

    async def test_a_closed_store_says_so(self):
        async with self.open_store() as store:
            await store.aclose()
            with pytest.raises(StoreError, match="closed"):
                await store.open_session(SessionRecord("s1", 0.0))
            with pytest.raises(StoreError, match="closed"):
                store.sessions()
            with pytest.raises(StoreError, match="closed"):
                await store.flush()

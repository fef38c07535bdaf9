"""Several replicas as one engine: every failure of one is a reply of another, or a clear error."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.engines.fakes import INFO, QUICK, Fake, call, lost, pooled, said, state, until
from tests.loops import JumpingLoop

from bridle.engines.base import CutError, Seeing, Seen, Templating
from bridle.engines.ids import ArrayIds
from bridle.engines.pool import EnginePool
from bridle.engines.pool_replica import Replica, ReplicaState, RoutingSettings
from bridle.engines.pool_routing import RoutingReason
from bridle.errors import ConfigError, ContextOverflowError, EngineError
from bridle.types import FinishReason, LogprobMode, VersionSpan

STOP, ABORT = FinishReason.STOP, FinishReason.ABORT
ALL = [0, 1, 2, 3]


async def test_a_session_stays_on_one_replica_and_sessions_are_spread():
    a, b = Fake(), Fake()
    async with pooled(a, b) as pool:
        for turn in range(3):
            for session in "pqrs":
                await said(pool, call(f"{session}{turn}", session))
        assert [len({request.session_id for request in fake.asked}) for fake in (a, b)] == [2, 2]
        assert [len(fake.asked) for fake in (a, b)] == [6, 6]
        assert pool.routed == {
            RoutingReason.FIRST: 4,
            RoutingReason.STUCK: 8,
            RoutingReason.SPILLED: 0,
            RoutingReason.MOVED: 0,
        }
        pool.forget("p")
        assert sum(one["sessions"] for one in pool.replicas()) == 3


async def test_a_call_that_fails_before_its_first_token_moves_to_another_replica():
    a, b = Fake(), Fake()
    async with pooled(a, b) as pool:
        home = a if await said(pool) and a.asked else b
        home.fail(lost())
        tokens, last = await said(pool, call("again"))
        assert (tokens, last.finish_reason) == (ALL, STOP)
        assert len(a.asked) + len(b.asked) == 3
        assert pool.routed[RoutingReason.MOVED] == 1


@pytest.mark.parametrize("error", [lost(), CutError("cut"), EngineError("reset", retryable=True)])
async def test_a_call_that_fails_later_ends_with_the_tokens_so_far_and_their_versions(error):
    a = Fake(info=replace(INFO, version=7))
    async with pooled(a) as pool:
        a.fail(error, after=2)
        tokens, last = await said(pool)
        assert (tokens, last.finish_reason) == ([0, 1], ABORT)
        assert last.versions == (VersionSpan(7, 0, 2),)
        assert (await said(pool, call("again")))[0] == ALL


async def test_tokens_across_a_version_change_have_spans_of_both_versions():
    a = Fake(tokens=6)
    async with pooled(a) as pool, aclosing(pool.generate(call())) as chunks:
        await anext(chunks)
        await anext(chunks)
        await pool.set_version(4)
        last = [one async for one in chunks][-1]
        # The third token was under way when the weights changed.
        assert last.versions == (VersionSpan(0, 0, 3), VersionSpan(4, 3, 6))
        assert last.mixed_versions
        assert (await pool.start()).version == 4


@pytest.mark.parametrize(
    ("knows", "recorded"),
    [(False, (VersionSpan(0, 0, 3), VersionSpan(4, 3, 6))), (True, (VersionSpan(4, 0, 6),))],
)
async def test_only_an_engine_that_knows_each_token_s_version_overwrites_the_pool_s_spans(
    knows, recorded
):
    a = Fake(tokens=6, versions=(VersionSpan(4, 0, 6),), numbered=knows)
    async with pooled(a) as pool, aclosing(pool.generate(call())) as chunks:
        await anext(chunks)
        await anext(chunks)
        await pool.set_version(4)
        last = [one async for one in chunks][-1]
        assert last.versions == recorded
        assert last.mixed_versions is not knows


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_client_errors_are_not_retried_on_another_replica(status):
    a, b = Fake(), Fake()
    async with pooled(a, b) as pool:
        for fake in (a, b):
            fake.fail(EngineError("bad", status=status))
        with pytest.raises(EngineError, match="bad"):
            await said(pool)
        assert len(a.asked) + len(b.asked) == 1
        assert {one["state"] for one in pool.replicas()} == {"live"}


async def test_a_context_overflow_is_passed_on_unchanged():
    a = Fake()
    async with pooled(a) as pool:
        a.fail(ContextOverflowError(9, 8, None))
        with pytest.raises(ContextOverflowError):
            await said(pool)


@pytest.mark.parametrize("status", [429, 503, 500])
async def test_a_busy_replica_is_skipped_for_one_call_and_stays_live(status):
    a, b = Fake(), Fake()
    async with pooled(a, b) as pool:
        busy = EngineError("busy", status=status, retryable=True)
        a.fail(busy)
        b.fail(busy)
        with pytest.raises(EngineError, match="busy") as raised:
            await said(pool)
        assert raised.value.status == status
        assert {one["state"] for one in pool.replicas()} == {"live"}
        a.fail(busy)
        for number in range(2):
            assert (await said(pool, call(str(number), None)))[0] == ALL


async def test_an_error_of_a_healthy_replica_fails_the_call():
    a = Fake()
    async with pooled(a) as pool:
        a.fail(EngineError("unreadable"))
        with pytest.raises(EngineError, match="unreadable"):
            await said(pool)
        assert state(pool, "a") == ReplicaState.LIVE


async def test_an_error_of_an_unhealthy_replica_moves_the_call_and_marks_it_down():
    a, b = Fake(), Fake()
    async with pooled(a, b) as pool:
        for fake in (a, b):
            fake.fail(EngineError("the embedded engine has failed"))
        a.sick = b.sick = EngineError("failed")
        b.faults.clear()
        # Whichever gets it first: only `a` fails.
        for number in range(2):
            assert (await said(pool, call(str(number), None)))[0] == ALL
        assert state(pool, "a") == ReplicaState.DOWN


async def test_a_call_waits_for_a_replica_that_comes_back():
    a = Fake()
    async with pooled(a) as pool:
        a.sick = lost()
        a.fail(lost())
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(said(pool))
            await until(lambda: a.looked > 3)
            assert not waiting.done()
            a.sick = None
        assert waiting.result()[0] == ALL
        assert pool.replicas()[0]["losses"] == 1


@pytest.mark.parametrize("gone_s", [0.3, 1.7, 60, 3600])
def test_by_default_an_engine_that_is_back_is_used_within_2_s(gone_s):
    async def outage():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        a = Fake()
        pool = EnginePool([Replica("a", a)], settings=RoutingSettings(patience_s=7200))
        try:
            await pool.start()
            with loop.jumping():
                a.sick = lost()
                a.fail(lost())
                async with asyncio.TaskGroup() as group:
                    waiting = group.create_task(said(pool))
                    await asyncio.sleep(gone_s)
                    assert not waiting.done()
                    a.sick, back = None, loop.time()
                assert waiting.result()[0] == ALL
                return loop.time() - back
        finally:
            await pool.aclose()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        assert runner.run(outage()) < 2


async def test_a_call_without_live_replicas_fails_after_patience_and_names_them():
    a, b = Fake(), Fake()
    async with pooled(a, b, patience_s=0.05) as pool:
        a.sick = b.sick = lost("nobody listens at that port")
        a.fail(lost())
        b.fail(lost())
        with pytest.raises(EngineError, match="no engine was available within") as raised:
            await said(pool)
        assert raised.value.retryable
        assert "a is down: nobody listens" in str(raised.value)
        with pytest.raises(EngineError, match="b is down"):
            await pool.health()


async def test_a_prompt_that_kills_engines_is_not_given_to_all_of_them():
    fakes = [Fake() for _ in range(5)]
    async with pooled(*fakes, attempts=3) as pool:
        for fake in fakes:
            fake.faults.extend([(0, lost("it died"))] * 9)
        with pytest.raises(EngineError, match="it died"):
            await said(pool)
        assert sum(len(fake.asked) for fake in fakes) == 3


async def test_a_hung_replica_is_found_and_its_calls_are_ended():
    a, b = Fake(), Fake()
    async with pooled(a, b, health_failures=2) as pool:
        for fake in (a, b):
            fake.gate.clear()
        async with asyncio.TaskGroup() as group:
            hanging = group.create_task(said(pool))
            await until(lambda: a.asked or b.asked)
            hung, other = (a, b) if a.asked else (b, a)
            other.gate.set()
            hung.sick = TimeoutError()
        assert hanging.result()[1].finish_reason is ABORT
        assert (await said(pool, call("again")))[0] == ALL
        assert other.asked[-1].request_id == "again"


async def test_one_failed_health_check_does_not_mark_a_replica_down():
    a = Fake()
    async with pooled(a, health_failures=3) as pool:
        a.sick = lost()
        await until(lambda: a.looked >= 1)
        a.sick = None
        await until(lambda: a.looked >= 4)
        assert pool.replicas()[0]["losses"] == 0


async def test_a_server_that_was_gone_is_probed_anew():
    a = Fake()
    fresh = Fake(info=replace(INFO, version=3))
    async with pooled(a, reopen=lambda _: fresh) as pool:
        a.sick = lost()
        a.fail(lost())
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(said(pool))
            await until(lambda: a.looked > 1)
            a.sick = None
        assert waiting.result()[1].versions == (VersionSpan(3, 0, 4),)
        assert (a.closed, fresh.started, len(fresh.asked)) == (1, 1, 1)


async def test_a_server_that_returns_with_another_model_gets_no_calls():
    a = Fake()
    other = Fake(info=replace(INFO, model="another"))
    async with pooled(a, reopen=lambda _: other, patience_s=0.1) as pool:
        a.sick = lost()
        await until(lambda: pool.each()[0].gone)
        a.sick = None
        await until(lambda: "has model another" in pool.replicas()[0]["error"])
        assert "has model another, the others m" in await refused(pool)
        assert other.closed >= 1
        assert not other.asked


async def refused(pool):
    with pytest.raises(EngineError) as raised:
        await said(pool)
    return str(raised.value)


async def test_a_short_outage_does_not_reopen_the_engine_client():
    class SickOnce(Fake):
        async def health(self):
            self.looked += 1
            if self.looked == 1:
                raise lost()

    a = SickOnce()
    async with pooled(a, reopen=lambda _: Fake(), health_every_s=60) as pool:
        a.fail(lost())
        assert (await said(pool))[0] == ALL
        assert (a.closed, len(a.asked), pool.replicas()[0]["losses"]) == (0, 2, 1)


FAULTS = st.lists(
    st.tuples(st.sampled_from(["abort", "cut", "lost"]), st.integers(0, 7), st.integers(0, 1)),
    max_size=8,
)


@given(FAULTS, st.integers(1, 2))
async def test_failover_at_any_point_gives_the_whole_reply(faults, apart):
    """Two replicas that count, of different versions; a caller that goes on from the tokens."""
    fakes = [Fake(tokens=8, info=replace(INFO, version=apart * number)) for number in (0, 1)]
    for kind, after, number in faults:
        fakes[number].fail(lost() if kind == "lost" else CutError(kind), after=after)
    tokens, versions = list[int](), list[int]()
    async with pooled(*fakes, attempts=9, backoff_s=1e-4, max_backoff_s=1e-4) as pool:
        for number in range(12):
            prompt = ArrayIds(np.array([0, 0, 0, *tokens], dtype=np.int32))
            try:
                new, last = await said(pool, replace(call(str(number)), prompt=prompt))
            except EngineError as error:  # both cut it before its first token
                assert error.retryable  # noqa: PT017 - it may also not be raised
                continue
            tokens += new
            versions += [
                span.version for span in last.versions for _ in range(span.start, span.end)
            ]
            if last.finish_reason is STOP:
                break
    assert tokens == list(range(8))
    assert len(versions) == 8
    asked = [(request.request_id, fake.info.version) for fake in fakes for request in fake.asked]
    assert set(versions) <= {version for _, version in asked}


# ---- ending calls


async def test_an_aborted_call_ends_with_finish_reason_abort():
    a = Fake()
    async with pooled(a) as pool:
        a.gate.clear()
        async with asyncio.TaskGroup() as group:
            ending = group.create_task(said(pool))
            await until(lambda: a.asked)
            await pool.abort("another")
            await pool.abort("r")
        assert ending.result()[1].finish_reason is ABORT


async def test_a_call_that_waits_for_a_replica_can_be_aborted():
    a = Fake()
    async with pooled(a) as pool:
        await pool.hold("wait")
        async with asyncio.TaskGroup() as group:
            ending = group.create_task(said(pool))
            await asyncio.sleep(0.01)
            await pool.abort("r")
        assert ending.result() == ([], ending.result()[1])
        assert ending.result()[1].finish_reason is ABORT


async def test_closing_a_stream_early_frees_its_slot_at_the_replica():
    a = Fake()
    async with pooled(a) as pool:
        async with aclosing(pool.generate(call())) as chunks:
            await anext(chunks)
            assert pool.replicas()[0]["calls_in_flight"] == 1
        assert pool.replicas()[0]["calls_in_flight"] == 0


@pytest.mark.parametrize(("keep", "grammar", "stream"), [(True, None, True), (False, None, False)])
async def test_keep_tokens_streams_every_call_without_a_grammar(keep, grammar, stream):
    a = Fake()
    async with pooled(a, keep_tokens=keep) as pool:
        await said(pool, call(grammar=grammar))
        await said(pool, call("c", grammar={"json_schema": {}}))
        assert [request.stream for request in a.asked] == [stream, False]


# ---- starting


async def test_a_replica_that_is_down_at_the_start_goes_live_later():
    a, b = Fake(), Fake()
    b.sick = lost()
    async with pooled(a, b) as pool:
        assert [state(pool, name) for name in "ab"] == ["live", "down"]
        b.sick = None
        await until(lambda: state(pool, "b") == "live")
        assert (await pool.start()).model == "m"


@pytest.mark.parametrize("error", [lost(), EngineError("it gives no logprobs")])
async def test_a_pool_whose_only_replica_fails_does_not_start(error):
    a = Fake()
    a.sick = error
    with pytest.raises(EngineError, match=str(error)):
        async with pooled(a):
            pass
    assert a.closed


async def test_the_error_of_a_replica_that_takes_too_long_to_start_says_so():
    class Silent(Fake):
        async def start(self):
            await asyncio.Event().wait()

    with (
        capture_logs() as logs,
        pytest.raises(EngineError, match=r"a was not ready within 0\.1 s \(routing\.start_tim"),
    ):
        async with pooled(Silent(), start_timeout_s=0.1):
            pass
    late = [(one["replica"], one["after_s"]) for one in logs if one["log_level"] == "warning"]
    assert late == [("a", 0.005)]


async def test_a_replica_that_cannot_serve_is_an_error_at_the_start():
    a, b = Fake(), Fake()
    b.sick = EngineError("it gives no logprobs")
    with pytest.raises(EngineError, match="no logprobs"):
        async with pooled(a, b):
            pass


@pytest.mark.parametrize(
    "change", [{"model": "n"}, {"logprob_mode": LogprobMode.PROCESSED}, {"token_in": False}]
)
async def test_replicas_that_differ_are_refused_by_name(change):
    with pytest.raises(EngineError, match=f"replica b has {next(iter(change))}"):
        async with pooled(Fake(), Fake(info=replace(INFO, **change))):
            pass


async def test_a_pool_reports_the_context_version_and_grammar_that_all_replicas_share():
    less = replace(INFO, context_length=500, version=2, grammar=False)
    async with pooled(Fake(info=replace(INFO, grammar=True)), Fake(info=less)) as pool:
        info = await pool.start()
        assert (info.context_length, info.version, info.grammar) == (500, 2, False)


def test_a_pool_without_replicas_or_with_equal_names_is_refused():
    with pytest.raises(ConfigError, match="at least one"):
        EnginePool([])
    with pytest.raises(ConfigError, match="'a'"):
        EnginePool([Replica("a", Fake()), Replica("a", Fake())])


# ---- joining and leaving


async def test_a_replica_joins_and_gets_calls():
    a, b = Fake(), Fake()
    async with pooled(a) as pool:
        await pool.add(Replica("b", b))
        for number in range(2):
            await said(pool, call(str(number), None))
        assert (len(a.asked), len(b.asked)) == (1, 1)
        with pytest.raises(ConfigError):
            await pool.add(Replica("b", Fake()))


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (replace(INFO, context_length=10, pictures=True), "context of 10"),
        (INFO, "takes no images beside token ids"),
    ],
)
async def test_an_added_replica_with_other_capabilities_is_refused_and_closed(info, why):
    other = Fake(info=info)
    async with pooled(Fake(info=replace(INFO, pictures=True))) as pool:
        with pytest.raises(EngineError, match=why):
            await pool.add(Replica("b", other))
        assert other.closed
        assert len(pool.replicas()) == 1


async def test_each_replica_passes_the_vouch_hook_before_it_serves_at_start_and_later():
    a, late, joining, fresh = Fake(), Fake(), Fake(), Fake()
    strangers = [late, joining, fresh]

    async def vouch(engine, info):
        assert info.model == "m"
        if engine in strangers:
            raise EngineError("another tokenizer")

    late.sick = lost()
    replicas = [Replica("a", a, lambda: fresh), Replica("late", late)]
    pool = EnginePool(replicas, settings=RoutingSettings.model_validate(QUICK))
    pool.vouch = vouch
    try:
        await pool.start()
        late.sick = None
        await until(lambda: pool.replicas()[1]["error"] == "another tokenizer")
        with pytest.raises(EngineError, match="another tokenizer"):
            await pool.add(Replica("joining", joining))
        assert [state(pool, name) for name in ("a", "late")] == ["live", "down"]
        strangers.remove(late)
        await until(lambda: state(pool, "late") == "live")
        a.sick = lost()
        await until(lambda: pool.each()[0].gone)
        a.sick = None
        await until(lambda: pool.replicas()[0]["error"] == "another tokenizer")
        assert (await said(pool))[0] == [0, 1, 2, 3]
        assert (len(a.asked), len(late.asked), fresh.asked) == (0, 1, [])
    finally:
        await pool.aclose()


async def test_removing_a_replica_aborts_its_calls_and_the_others_serve_on():
    a, b = Fake(), Fake()
    async with pooled(a, b) as pool:
        a.gate.clear()
        b.gate.clear()
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(said(pool))
            await until(lambda: a.asked or b.asked)
            name, gone, other = ("a", a, b) if a.asked else ("b", b, a)
            await pool.remove(name)
        assert leaving.result()[1].finish_reason is ABORT
        assert gone.closed
        other.gate.set()
        assert (await said(pool, call("again")))[0] == ALL
        with pytest.raises(KeyError):
            await pool.remove(name)
        with pytest.raises(ConfigError, match="replica 'a' is the only one"):
            await pool.remove(pool.replicas()[0]["name"])


async def test_a_drained_replica_finishes_its_calls_and_gets_no_new_ones():
    a, b = Fake(), Fake()
    async with pooled(a, b) as pool:
        async with asyncio.TaskGroup() as group:
            for fake in (a, b):
                fake.gate.clear()
            ending = group.create_task(said(pool))
            await until(lambda: a.asked or b.asked)
            name, mine, other = ("a", a, b) if a.asked else ("b", b, a)
            draining = group.create_task(pool.drain(name))
            await asyncio.sleep(0.01)
            other.gate.set()
            await said(pool, call("other"))
            assert not draining.done()
            mine.gate.set()
        assert ending.result()[0] == ALL
        assert [request.request_id for request in other.asked] == ["other"]
        assert state(pool, name) == "draining"
        pool.readmit(name)
        pool.readmit(name)
        assert state(pool, name) == "live"


# ---- age of weights


async def test_a_replica_with_weights_too_old_waits_for_new_ones():
    a, b = Fake(info=replace(INFO, version=5)), Fake(info=replace(INFO, version=3))
    async with pooled(a, b, max_version_lag=1) as pool:
        for number in range(4):
            await said(pool, call(str(number), None))
        assert not b.asked
        await pool.set_version(6)
        for number in range(4):
            await said(pool, call(str(number), None))
        assert len(b.asked) == 2
        assert b.info.version == 6


SEEN = Seen(np.array([1, 2], np.int32), ())


class Sighted(Fake):
    """It takes images."""

    async def see(self, messages, tools, arguments):
        return SEEN


async def test_image_prompts_are_rendered_by_any_live_replica():
    async with pooled(Sighted(), Sighted()) as pool:
        pool.each()[0].enter(ReplicaState.DOWN)
        assert isinstance(pool, Seeing)
        assert await pool.see([], None, {}) is SEEN


async def test_a_pool_of_text_only_replicas_renders_no_image_prompt():
    async with pooled(Fake()) as pool:
        assert await pool.see([], None, {}) is None


async def test_rendering_an_image_prompt_without_a_live_replica_is_a_retryable_error():
    async with pooled(Sighted()) as pool:
        pool.each()[0].enter(ReplicaState.DOWN)
        with pytest.raises(EngineError, match="no replica") as failed:
            await pool.see([], None, {})
        assert failed.value.retryable


class Lettered(Fake):
    """It has a template."""

    failure: EngineError | None = None

    async def template(self, messages, tools, arguments):
        if self.failure is not None:
            raise self.failure
        return SEEN.ids


async def test_a_prompt_is_rendered_by_a_live_replica_with_a_template():
    first, second = Lettered(), Lettered()
    first.failure = EngineError("busy", retryable=True)
    async with pooled(Fake(), first, second) as pool:
        assert isinstance(first, Templating)
        assert await pool.template([], None, {}) is SEEN.ids
        second.failure = EngineError("no such role", status=400)
        with pytest.raises(EngineError, match="no such role"):
            await pool.template([], None, {})
        pool.each()[2].enter(ReplicaState.DOWN)
        with pytest.raises(EngineError, match="busy"):
            await pool.template([], None, {})
        pool.each()[1].enter(ReplicaState.DOWN)
        with pytest.raises(EngineError, match="no replica"):
            await pool.template([], None, {})

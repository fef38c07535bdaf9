"""Sticky, with bounded load: the laws of choosing a replica."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines.fakes import Fake, call, chunk, lost, pooled, said, state, until

from bridle.engines.base import CutError
from bridle.engines.pool_replica import ReplicaState, RoutedCall
from bridle.engines.pool_routing import BREAKS, STRIKES, SUSPECTED, ReplicaRouter, RoutingReason
from bridle.errors import EngineError
from bridle.types import FinishReason


@dataclass(eq=False)
class Place:
    name: str
    load: int = 0


def places(*loads):
    return [Place(str(number), load) for number, load in enumerate(loads)]


@dataclass
class Running:
    """A call that has not ended."""

    place: Place


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 99)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("join"), st.integers(0, 3)),
    ),
    max_size=80,
)


@given(STEPS, st.floats(1, 3), st.integers(0, 6))
def test_no_replica_exceeds_its_bound_and_no_session_moves_without_need(steps, factor, slack):
    choice: ReplicaRouter[Place] = ReplicaRouter(load_factor=factor, slack=slack)
    all_places, running = places(0, 0, 0, 0), []
    here = list(all_places)
    home: dict[str, Place] = {}
    for step, number in steps:
        if step == "end" and running:
            running.pop(number % len(running)).place.load -= 1
        elif step == "leave" and len(here) > 1 and all_places[number] in here:
            here.remove(all_places[number])
        elif step == "join" and all_places[number] not in here:
            here.append(all_places[number])
        elif step == "call":
            session = str(number)
            bound = choice.bound(here)
            place, how = choice.pick(session, here)
            before = home.get(session)
            # Bounded: nobody is given more than the bound, whoever else may be had.
            assert place in here
            assert place.load + 1 <= bound
            # Sticky: a session leaves its replica only for one of two reasons.
            if how is RoutingReason.STUCK:
                assert place is before
            elif how is RoutingReason.SPILLED:
                assert before is not None
                assert before.load + 1 > bound
            elif how is RoutingReason.MOVED:
                assert before not in here
            else:
                assert before is None
            home[session] = place
            place.load += 1
            running.append(Running(place))
    counted = Counter(place.name for place in home.values())
    assert all(choice.sessions(place) == counted[place.name] for place in all_places)


@given(st.integers(1, 5), st.integers(1, 60))
def test_idle_replicas_get_equal_numbers_of_new_sessions(count, sessions):
    choice: ReplicaRouter[Place] = ReplicaRouter()
    here = places(*([0] * count))
    for number in range(sessions):
        choice.pick(str(number), here)
    living = [choice.sessions(place) for place in here]
    assert sum(living) == sessions
    assert max(living) - min(living) <= 1


def test_when_a_replica_leaves_only_its_own_sessions_move():
    choice: ReplicaRouter[Place] = ReplicaRouter()
    here = places(0, 0, 0)
    before = {str(n): choice.pick(str(n), here)[0] for n in range(30)}
    left = here.pop(1)
    after = {session: choice.pick(session, here) for session in before}
    for session, (place, how) in after.items():
        assert (how is RoutingReason.MOVED) == (before[session] is left)
        assert place is before[session] or before[session] is left
    # It comes back: nobody runs after it.
    here.append(left)
    assert all(choice.pick(session, here)[1] is RoutingReason.STUCK for session in before)


def test_a_session_that_spilled_stays_where_it_went():
    choice: ReplicaRouter[Place] = ReplicaRouter(slack=2)
    here = places(0, 0)
    home, _ = choice.pick("a", here)
    home.load = 9
    other, how = choice.pick("a", here)
    assert (other is home, how) == (False, RoutingReason.SPILLED)
    home.load = 0
    assert choice.pick("a", here) == (other, RoutingReason.STUCK)


def test_without_stickiness_every_call_goes_where_the_fewest_run():
    choice: ReplicaRouter[Place] = ReplicaRouter(sticky=False)
    here = places(3, 1, 2)
    for _ in range(3):
        assert choice.pick("a", here) == (here[1], RoutingReason.FIRST)
        here[1].load -= 1
    here = places(0, 0)
    assert len({choice.pick("a", here)[0].name for _ in range(2)}) == 2


def test_a_call_of_no_session_is_remembered_nowhere():
    choice: ReplicaRouter[Place] = ReplicaRouter()
    (here,) = places(0)
    assert choice.pick(None, [here]) == (here, RoutingReason.FIRST)
    assert choice.sessions(here) == 0


def test_sessions_that_ended_or_called_long_ago_are_forgotten():
    choice: ReplicaRouter[Place] = ReplicaRouter(remembered=2)
    here = places(0, 0)
    for session in "abc":
        choice.pick(session, here)
    assert sum(map(choice.sessions, here)) == 2
    assert choice.pick("a", here)[1] is RoutingReason.FIRST
    choice.forget("a")
    choice.forget("never seen")
    assert choice.pick("a", here)[1] is RoutingReason.FIRST
    for place in here:
        choice.drop(place)
    assert sum(map(choice.sessions, here)) == 0
    assert choice.pick("a", here)[1] is RoutingReason.FIRST


@pytest.mark.parametrize(("loads", "bound"), [((0, 0), 8), ((15, 15), 20), ((40, 0, 0, 0), 13)])
def test_the_bound_is_a_share_of_all_calls_but_at_least_the_slack(loads, bound):
    assert ReplicaRouter[Place]().bound(places(*loads)) == bound


STOP, ABORT = FinishReason.STOP, FinishReason.ABORT
ALL = [0, 1, 2, 3]
BYSTANDERS = 24
GROUPS = [BYSTANDERS + 1, BYSTANDERS + 1, 9, 3, 1]
"""Calls that run at each death."""


class Poisonable(Fake):
    """Ends calls of the session `poison` by `error`; if `dies`, its server dies of them too."""

    def __init__(self, error, *, dies):
        super().__init__()
        self.error = error
        self.dies = dies
        self.deaths = 0
        self.down = asyncio.Event()
        self.poisoned = 0
        self.running = 0
        self.lost_with = []
        """The calls that were there at each death."""

    async def generate(self, request):
        """Calls run together: nobody ends before all bystanders have begun."""
        self.running += 1
        try:
            async for piece in self.reply(request):
                yield piece
        finally:
            self.running -= 1

    async def reply(self, request):
        self.asked.append(request)
        if request.session_id == "poison":
            self.poisoned += 1
            await asyncio.sleep(0.002)
            if self.dies:
                self.deaths += 1
                self.lost_with.append(self.running)
                self.sick = lost()
                self.down.set()
                asyncio.get_running_loop().call_later(0.03, self.restarted)
            raise self.error
        down = self.down
        for token in range(self.tokens):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.002):
                    await down.wait()  # all connections of a server break at once
            if down.is_set() or self.sick is not None:
                raise lost()
            if request.request_id in self.aborted:
                yield chunk([], ABORT)
                return
            yield chunk([token], STOP if token == self.tokens - 1 else None)

    def restarted(self):
        self.sick, self.down = None, asyncio.Event()
        self.aborted.clear()


class Crowded(Poisonable):
    """The poisoned call dies once its group is complete, before a bystander there has a token."""

    def __init__(self, error, *, dies):
        super().__init__(error, dies=dies)
        self.poison_here = False

    async def reply(self, request):
        if request.session_id == "poison":
            self.poison_here = True
            while self.running < GROUPS[self.deaths]:  # noqa: ASYNC110 - steps are the unit
                await asyncio.sleep(0)
        # Every call that the pool lets in now begins within these steps of the loop.
        for _ in range(10 * BYSTANDERS):
            await asyncio.sleep(0)
        if request.session_id != "poison" and (self.poison_here or self.deaths < SUSPECTED):
            await self.down.wait()
            raise lost()
        async for piece in super().reply(request):
            yield piece

    def restarted(self):
        super().restarted()
        self.poison_here = False


async def outcome(pool, request):
    """Return what `said` gives, or the error."""
    try:
        return await said(pool, request)
    except EngineError as error:
        return error


async def beside(pool):
    """The ends of one poisoned call and of its bystanders, all begun at once."""
    async with asyncio.TaskGroup() as group:
        bad = group.create_task(outcome(pool, call("bad", "poison")))
        good = [
            group.create_task(outcome(pool, call(f"good{number}", f"s{number}")))
            for number in range(BYSTANDERS)
        ]
    return bad.result(), [task.result() for task in good]


@pytest.mark.parametrize("error", [CutError("cut"), lost("reset")])
async def test_a_reply_that_breaks_off_fails_its_call_and_costs_the_others_nothing(error):
    fake = Poisonable(error, dies=False)
    async with pooled(fake) as pool:
        bad, good = await beside(pool)
        assert bad is error
        assert [(tokens, last.finish_reason) for tokens, last in good] == [(ALL, STOP)] * BYSTANDERS
        assert (state(pool, "a"), pool.replicas()[0]["losses"]) == (ReplicaState.LIVE, 0)
        assert len(fake.asked) == BYSTANDERS + fake.poisoned


async def test_a_call_that_kills_its_engine_fails_alone_and_the_others_are_served():
    fake = Poisonable(lost("reset"), dies=True)
    async with pooled(fake, attempts=5) as pool:
        bad, good = await beside(pool)
        assert isinstance(bad, EngineError)
        for tokens, last in good:  # the gateway continues those that had begun
            assert last.finish_reason in {STOP, ABORT}
            assert tokens == ALL[: len(tokens)]
        assert fake.deaths == 5
        await until(lambda: state(pool, "a") == ReplicaState.LIVE)


async def test_a_session_whose_call_killed_engines_gets_one_try_for_its_next():
    fake = Poisonable(lost("reset"), dies=True)
    async with pooled(fake, attempts=5) as pool:
        for deaths in (5, 6):
            with pytest.raises(EngineError):
                await said(pool, call("bad", "poison"))
            assert fake.deaths == deaths
        pool.forget("poison")
        with pytest.raises(EngineError):
            await said(pool, call("bad", "poison"))
        assert fake.deaths == 11


async def test_suspects_run_in_groups_that_shrink_until_the_killer_is_alone():
    fake = Crowded(lost("reset"), dies=True)
    async with pooled(fake, attempts=5) as pool:
        for _ in range(2):  # the second time, too: no place is held for ever
            fake.deaths, fake.lost_with = 0, []
            bad, good = await beside(pool)
            assert isinstance(bad, EngineError)
            assert [ids for ids, *_ in good] == [ALL] * BYSTANDERS
            assert fake.lost_with == GROUPS
            pool.forget("poison")


async def test_a_session_that_fails_again_and_again_while_others_are_served_is_quarantined():
    fake = Poisonable(CutError("cut"), dies=False)
    async with pooled(fake) as pool:
        for number in range(STRIKES + 1):
            assert isinstance(await outcome(pool, call("bad", "poison")), CutError)
            assert (await said(pool, call(f"good{number}", "good")))[0] == ALL
        asked = len(fake.asked)
        for _ in range(20):
            refused = await outcome(pool, call("bad", "poison"))
            assert (refused.kind, refused.retryable) == ("engine_cut", False)
        assert len(fake.asked) == asked
        assert (await said(pool, call("good", "good")))[0] == ALL
        assert len(fake.asked) == asked + 1
        pool._failures.records["poison"].until = 0.0  # the time of its next trial has come
        for error in (CutError, EngineError):
            assert type(await outcome(pool, call("bad", "poison"))) is error
        assert len(fake.asked) == asked + 2
        pool.forget("poison")
        assert isinstance(await outcome(pool, call("bad", "poison")), CutError)


async def test_sessions_are_not_quarantined_for_an_engine_that_serves_nobody():
    fake = Fake()
    async with pooled(fake) as pool:
        for number in range(STRIKES * 3):
            fake.fail(CutError("cut"))
            assert isinstance(await outcome(pool, call("r", f"s{number % 2}")), CutError)
        assert (await said(pool, call("r", "s0")))[0] == ALL


async def test_a_replica_that_cuts_the_calls_of_several_sessions_gets_none_while_others_serve():
    a, b = Fake(), Fake()
    async with pooled(a, b, backoff_s=0.2, max_backoff_s=0.2) as pool:
        for number in range(100):
            a.fail(CutError("cut"))
            await outcome(pool, call(f"r{number}", f"s{number}"))
            if state(pool, "a") == ReplicaState.QUARANTINED:
                break
        assert state(pool, "a") == ReplicaState.QUARANTINED
        assert len(a.asked) == BREAKS
        a.faults.clear()
        for number in range(10):
            assert (await said(pool, call(f"g{number}", f"g{number}")))[0] == ALL
        assert len(a.asked) == BREAKS
        await until(lambda: state(pool, "a") == ReplicaState.LIVE)


async def test_the_only_replica_is_never_quarantined():
    fake = Fake()
    async with pooled(fake) as pool:
        for number in range(BREAKS * 3):
            fake.fail(CutError("cut"))
            await outcome(pool, call("r", f"s{number}"))
        assert state(pool, "a") == ReplicaState.LIVE


async def test_a_call_aborted_by_the_loss_of_its_engine_is_marked_as_moved():
    a = Fake()
    async with pooled(a) as pool:
        a.gate.clear()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(said(pool))
            await until(lambda: a.asked)
            a.sick = lost()
        tokens, last = waiting.result()
        assert (tokens, last.finish_reason, last.moved) == ([], ABORT, True)


async def test_a_suspect_that_waits_for_its_turn_can_be_aborted():
    fake = Poisonable(lost("reset"), dies=True)
    async with pooled(fake, attempts=3) as pool:
        for _ in range(2):
            assert isinstance(await outcome(pool, call("bad", "poison")), EngineError)
        fake.sick, fake.dies = None, False
        blame = pool._failures
        other = RoutedCall(call("other"), deaths=2)
        await blame.apart(other)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(outcome(pool, call("bad", "poison")))
            await until(lambda: len(pool.calls) == 1)
            await pool.abort("bad")
        assert waiting.result()[1].finish_reason is ABORT
        blame.end(other)


async def test_a_call_aborted_by_its_caller_is_not_marked_as_moved():
    a = Fake()
    async with pooled(a) as pool:
        a.gate.clear()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(said(pool))
            await until(lambda: a.asked)
            await pool.abort("r")
        assert not waiting.result()[1].moved

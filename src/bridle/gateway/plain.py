"""The plain path: a linear turn is served in two callbacks, without a task of its own.

A request with a head that was authenticated before, and that extends an exchange whose reply was
delivered, is read, placed and prompted in the round of the event loop that brought its last byte:
from what the last turn left (`bridle.gateway.linear`), else by the functions of the general path.
Its sample is parsed, made durable and answered in the round that brought the engine's last byte.
Each step is made for the calls of a round together, and their exchanges are written in one
transaction. Where the store's thread writes (with fsync, or after a slow write), they are answered
when that has written. What is stored is the same on both paths, and they may alternate.

A stream that leaves while it is sampled begins here as well; a task samples it, and `plain_live`
answers its client. Any doubt before the engine was asked leaves the request to the general
path, as if it had not been looked at. From then on the call is the session's as any other, in the
stage SAMPLING, and a `PlainCall` carries it. Whatever is not plain there (an error, an abort,
another prompt, a client that goes, a seal, a write that fails) hands it over: a task goes on with
the engine's call under way, or with the sample in hand, and nothing is sampled twice.
`tests/gateway/test_plain.py` plays the same traffic with and without this file.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary

import structlog
from aiohttp import HttpVersion11, web

from bridle.capture.records import Commit, Store
from bridle.dialects.base import Route, RouteKind, WireFormat
from bridle.engines.base import GenerateRequest
from bridle.engines.pool import EnginePool
from bridle.errors import BridleError, EngineError
from bridle.gateway.admission import LONG_BYTES, Admission, Taken
from bridle.gateway.call import Asked, Call, Question, Stage
from bridle.gateway.exchange import Exchanges
from bridle.gateway.faults import trace_of
from bridle.gateway.lineage import of_subagent
from bridle.gateway.linear import (
    KnownHead,
    LinearTurn,
    Tip,
    extends_delivered,
    settle,
    tip_of,
)
from bridle.gateway.listener import MOST_KEPT, Connection, takes_at_once, whole_reply
from bridle.gateway.metrics import Metrics
from bridle.gateway.plain_live import Handed, LiveAnswer
from bridle.gateway.prompts import engine_request
from bridle.gateway.recording import Finished, Prompted
from bridle.gateway.registry import GatewaySession
from bridle.gateway.relay import StreamState, whole_stream
from bridle.gateway.responses import Responses
from bridle.gateway.retries import Deliveries
from bridle.gateway.sampling import SampledReply
from bridle.gateway.settings import GatewaySettings
from bridle.types import Dialect, ModelRequest, Sampling

log = structlog.get_logger()

TOGETHER: Final = 8
"""Most calls of which one step is made before the next: the first of them waits for the others."""

GATHER_S: Final = 1.0
"""Time that the rest of a body may take to arrive; then the general path reads it."""

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)(?=\r\n)", re.IGNORECASE)

_ODD: Final = ("transfer-encoding", "content-encoding", "expect", "upgrade")
"""Headers with which a body is not what follows the head, or that want an answer before it."""


class PlainConnection:
    """The requests of one connection whose heads are known."""

    __slots__ = (
        *("_parts", "_path", "_start", "_taken", "_timer"),
        *("connection", "flight", "known", "missing"),
    )

    def __init__(self, path: PlainPath, connection: Connection) -> None:
        self._path = path
        self.connection = connection
        self.known: KnownHead | None = None
        """The head of its last request, if that is known."""
        self.flight: PlainCall | LiveAnswer | None = None
        """The call that its client waits for."""
        self._parts: list[bytes] = []
        """A request that has not arrived whole."""
        self.missing = 0
        """Bytes of it that are still to come."""
        self._start = 0
        self._taken: Taken | None = None
        self._timer: asyncio.TimerHandle | None = None

    def received(self, data: bytes) -> bool:
        """Take received bytes; `False` = the general path is to read them."""
        if self.flight is not None:  # a client that does not wait for its reply
            self.flight.hand_over()
            return False
        if self._parts:
            self._parts.append(data)
            self.missing -= len(data)
            if self.missing < 0:
                self._give_up()
            elif not self.missing and self._taken is not None:
                self._path.take(self, self._taken.session)
            return True
        if not self.connection.is_idle:
            return False
        known = self.known
        if known is None or not data.startswith(known.before):
            known = self._path.find(data)
        if known is None:
            return False
        at = known.start
        end = data.find(b"\r\n", at, at + 20)
        length = data[at:end]
        if not length.isdigit() or not data.startswith(known.after, end):
            return False
        return self._begun(known, data, end - at + known.size, int(length))

    def _begun(self, known: KnownHead, data: bytes, start: int, size: int) -> bool:
        """Take the beginning of a request whose body has this `size`, or all of it."""
        missing = size + start - len(data)
        if missing < 0 or size > self._path.admission.max_body_bytes:
            return False
        if (session := known.session()) is None:
            return False
        try:
            taken = Taken(self._path.admission, session, size)
        except BridleError:  # the general path refuses it
            return False
        self.known, self.connection.head = known, known.head
        self.connection.is_known = True
        self._parts, self.missing, self._start, self._taken = [data], missing, start, taken
        if not missing:
            self._path.take(self, taken.session)
            return True
        self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._give_up)
        if not self.connection.was_served:  # else nothing of its first head is left to be ended
            self.connection.head_arrived()
        return True

    def hand_out(self) -> tuple[bytes, int, Taken] | None:
        """Hand out what has arrived of a request, where its body begins, and its share: they are
        the caller's now. `None` = nothing has.
        """
        if (taken := self._taken) is None:
            return None
        data = b"".join(self._parts)
        if self._timer is not None:
            self._timer.cancel()
        self._parts, self.missing, self._taken, self._timer = [], 0, None, None
        return data, self._start, taken

    def _give_up(self) -> None:
        """Let the general path read what has arrived."""
        if (request := self.hand_out()) is not None:
            data, _, taken = request
            taken.give_back()
            self.connection.pass_on(data)

    def lost(self) -> None:
        """Detach the client, which has gone, from its call."""
        if (request := self.hand_out()) is not None:
            _, _, taken = request
            taken.give_back()
            taken.session.requests += 1
        if self.flight is not None:
            self.flight.client_gone()


class PlainPath:
    """The plain path of one gateway."""

    def __init__(
        self,
        *,
        exchanges: Exchanges,
        admission: Admission,
        store: Store,
        deliveries: Deliveries,
        responses: Responses,
        settings: GatewaySettings,
        metrics: Metrics,
    ) -> None:
        self.exchanges = exchanges
        self.store = store
        self.deliveries = deliveries
        self.responses = responses
        self.settings = settings
        self.metrics = metrics
        self._known: WeakValueDictionary[tuple[bytes, bytes], KnownHead] = WeakValueDictionary()
        """By their bytes; each is kept by its session."""
        self.admission = admission
        self.is_open = True
        """True if requests may take it; tests compare both."""
        self.arrived: list[PlainConnection] = []
        """Those whose request came in this round of the loop, and is not read."""
        self.replied: list[PlainCall] = []
        """Calls whose engine replied in this round of the loop, and whose reply is not read."""
        self.served = 0
        """Calls that it answered."""

    def line(self, connection: Connection) -> PlainConnection:
        """Return the reader of a new connection."""
        return PlainConnection(self, connection)

    def offer(
        self, http: web.BaseRequest, session: GatewaySession, headers: dict[str, str], route: Route,
        wire: WireFormat, request: ModelRequest,
    ) -> None:  # fmt: skip
        """Register the head of an answered request, so that later ones with it take the
        plain path.
        """
        known = self._offered(http, session, headers, route, wire)
        if known is not None and session.tip is None and not session.sealed:
            session.tip = tip_of(session, request, known, self.exchanges.models)

    def _offered(
        self, http: web.BaseRequest, session: GatewaySession, headers: dict[str, str], route: Route,
        wire: WireFormat,
    ) -> KnownHead | None:  # fmt: skip
        """Return the head of a request, known from now on; `None` = it is unusual."""
        connection = http.protocol
        assert isinstance(connection, Connection)
        line, raw = connection.line, connection.raw_head
        if raw is None or not isinstance(line, PlainConnection):
            return None
        if line.known is not None and line.known.head is connection.head:
            return line.known
        if route.kind is not RouteKind.GENERATE:
            return None
        if not http.keep_alive or http.version != HttpVersion11:
            return None
        lengths = list(_LENGTH.finditer(raw))
        if len(lengths) != 1 or not headers.keys().isdisjoint(_ODD):
            return None
        parts = raw[: lengths[0].start(1)], raw[lengths[0].end(1) :]
        line.known = self._known.get(parts)
        if line.known is None:
            line.known = self._known[parts] = KnownHead(
                connection, session, headers, route, wire, parts
            )
            session.in_hand.heads.append(line.known)
        return line.known

    def find(self, data: bytes) -> KnownHead | None:
        """Return the registered request head that `data` begins with; `None` = it begins
        with none.
        """
        end = data.find(b"\r\n\r\n", 0, MOST_KEPT) + 4
        length = _LENGTH.search(data, 0, end) if self._known and end > 4 else None
        if length is None:
            return None
        return self._known.get((data[: length.start(1)], data[length.end(1) : end]))

    def take(self, line: PlainConnection, session: GatewaySession) -> None:
        """Begin the call of a request that has arrived: with the others of this round of the loop,
        or now if no call is under way.
        """
        self.arrived.append(line)
        tip = session.tip
        if tip is not None and not tip.pool.calls:
            self.begin_arrived()
        elif len(self.arrived) == 1:
            asyncio.get_running_loop().call_soon(self.begin_arrived)

    def begin_arrived(self) -> None:
        """Read the requests that have arrived, and send their calls to the engine.

        A step is made for several calls one after the other: it takes less time then, because the
        processor has its code and data at hand. A request that is not linear is left to the general
        path.
        """
        arrived, self.arrived = self.arrived, []
        ready: dict[GatewaySession, PlainCall] = {}
        for line in arrived:
            if line.missing or (request := line.hand_out()) is None:
                continue
            data, start, taken = request
            if len(ready) == TOGETHER or taken.session in ready:
                self._begin(ready)
                ready = {}
            flight = None
            try:
                flight = self._linear(line, taken, data, start)
            except BridleError:
                pass  # the general path says so
            except Exception as error:  # noqa: BLE001 - the top of a served request
                log.error("plain_path_failed", trace=trace_of(error))  # noqa: TRY400 - no variables
            if flight is None:
                taken.give_back()
                line.connection.pass_on(data)
                continue
            if not line.connection.was_served:
                line.connection.head_arrived()
            ready[taken.session] = flight
        self._begin(ready)

    def _begin(self, flights: Mapping[GatewaySession, PlainCall]) -> None:
        """Send the calls of several sessions to the engine."""
        for session, flight in flights.items():
            session.requests += 1
            question, said, line = flight.question, flight.said, flight.line
            try:
                if flight.tip is None:
                    said = of_subagent(session, question, said)
                call = self.exchanges.begun(session, question, said)
                if flight.tip is None:
                    session.conversation.begin(call.exchange_id, question.canonical)
                call.reserved, call.flight = flight.reserved, flight
                flight.call, line.flight = call, flight
                flight.begin()
            except Exception as error:  # noqa: BLE001 - the top of a served request
                if line.flight is flight:
                    flight.fail(error)
                    continue
                log.error("plain_path_failed", trace=trace_of(error))  # noqa: TRY400 - no variables
                flight.taken.give_back()
                line.connection.force_close()

    def answer_replied(self) -> None:
        """Read the engines' replies, write their exchanges in one transaction and answer."""
        replied, self.replied = self.replied, []
        for start in range(0, len(replied), TOGETHER):
            several = replied[start : start + TOGETHER]
            samples: list[tuple[PlainCall, SampledReply]] = []
            for flight in several:
                try:
                    sample = flight.sample()
                except Exception as error:  # noqa: BLE001 - the others are answered all the same
                    flight.fail(error)
                    continue
                if sample is not None:
                    samples += ((flight, sample),)
            finished: list[PlainCall] = []
            for flight, sample in samples:
                try:
                    flight.finish(sample)
                except Exception as error:  # noqa: BLE001 - the others are answered all the same
                    flight.fail(error)
                else:
                    finished += (flight,)
            self.write(finished)

    def write(self, flights: Sequence[PlainCall]) -> None:
        """Write the exchanges of several calls in one transaction, and answer their clients."""
        if not flights:
            return
        commits: list[Commit] = []
        for flight in flights:
            commits += (flight.commit,)
        try:
            writing = self.store.commit_now(commits)
        except Exception as error:  # noqa: BLE001 - it reaches the client whose exchange it is
            if len(flights) == 1:
                flights[0].not_written(error)
                return
            for flight in flights:
                self.write([flight])
            return
        for place, flight in enumerate(flights):
            try:
                if writing is None:
                    flight.committed()
                else:
                    flight.writes(writing[place])
            except Exception as error:  # noqa: BLE001 - the others are answered all the same
                log.error("plain_path_failed", trace=trace_of(error))  # noqa: TRY400 - no variables

    def _linear(
        self, line: PlainConnection, taken: Taken, data: bytes, start: int
    ) -> PlainCall | None:
        """Read a request; `None` = it is not linear. `BridleError` where it is to be refused."""
        exchanges, known, session = self.exchanges, line.known, taken.session
        assert known is not None, "its head was found"
        if not self.is_open or session.sealed or session.replay is not None:
            return None
        tip, question = session.tip, None
        if tip is not None and tip.known is known and not session.running:
            question = tip.next(data, start, session)
        if tip is not None and question is not None:
            parent, said, pool = tip.call, tip.call.asked, tip.pool
        else:
            if tip is not None:
                settle(session)
                tip = None
            if (found := self._extending(known, session, data[start:])) is None:
                return None
            question, parent, said, pool = found
        exchanges.refuse_if_spent(session)
        prompted = question.served.prompts.extended_now(question, parent, taken.size)
        if prompted is not None:
            budget = exchanges.budget(session, question, prompted.prompt.length)
            reserved = session.account.take(budget, lambda: session.tokens)
            if reserved is not None:
                return PlainCall(
                    *(self, line, data, taken, known.route, question, said, parent, prompted),
                    *(reserved, pool, tip),
                )
        return None

    def _extending(
        self, known: KnownHead, session: GatewaySession, body: bytes
    ) -> tuple[Question, Call, Asked, EnginePool] | None:
        """Read and place a request that extends a delivered reply; `None` = it does not."""
        exchanges, route, wire = self.exchanges, known.route, known.wire
        if wire.dialect is Dialect.OPENAI_RESPONSES:
            body = self.responses.resolved(session, wire.dialect, body)
        if len(body) > LONG_BYTES and session.messages.news(body) > LONG_BYTES:
            return None
        request = wire.parse(route, body, session.messages)
        if "previous" in request.extra:
            request = self.responses.whole(session, route, body, request)
        found = known.said(session, request, exchanges.models)
        if found is None or request.prefill is not None:
            return None
        said, served, pool = found
        question = exchanges.place(session, wire, request, served)
        if question.parent is None or not extends_delivered(question, question.parent):
            return None
        session.check(question.canonical)
        return question, question.parent, said, pool


@dataclass(slots=True, eq=False)
class PlainCall:
    """A call on the plain path, from the request to the engine to the reply to its client."""

    path: PlainPath
    line: PlainConnection
    data: bytes
    """The request, its head included."""
    taken: Taken
    route: Route
    question: Question
    said: Asked
    parent: Call
    """The call that it extends."""
    prompted: Prompted
    reserved: int
    """Tokens of the session's budget that it may sample."""
    pool: EnginePool
    tip: Tip | None
    """The last turn before it, from which it was read; `None` = the session's memory has it."""
    turn: LinearTurn | None = None
    """Its part of the tip; `None` = it has no tip, or has not begun."""
    call: Call = field(init=False)
    effective: Sampling = field(init=False)
    request: GenerateRequest = field(init=False)
    alarm: asyncio.TimerHandle | None = None
    """Rings when the head of a stream is to leave."""
    finished: Finished = field(init=False)
    """Its facts, once its sample is read."""
    commit: Commit = field(init=False)
    """Its record, from then on."""
    writing: asyncio.Future[None] | None = None
    """The end of the write in the store's thread; `None` = it does not write it."""

    def begin(self) -> None:
        """Send the call to the engine."""
        exchanges, session, call = self.path.exchanges, self.taken.session, self.call
        question, prompted = self.question, self.prompted
        if self.tip is None:
            exchanges.link(session, call, question, self.parent)
            exchanges.know(session, call, question, prompted)
        else:
            call.head.prompt_tokens = prompted.prompt.length
            self.turn = self.tip.begun(call, question)
            self.path.metrics.placements.values[question.placement.kind, True] += 1
        self.effective = exchanges.sampling(session, question, call.reserved)
        if question.request.stream and self.path.settings.stream != "whole":
            call.live = exchanges.live(session, call, prompted, self.effective)
        call.enter(Stage.SAMPLING)
        self.request = engine_request(call, question, prompted, self.effective)
        waiting = self.pool.begin(self.request)
        if waiting is None:
            self.hand_over()
            return
        if call.live is not None:  # it leaves while a task samples it
            asyncio.get_running_loop().call_soon(self._sample_live)
            return
        waiting.add_done_callback(self.arrived)
        if question.request.stream:
            patience_s = self.path.settings.headers_after_s
            self.alarm = asyncio.get_running_loop().call_later(patience_s, self.hand_over)

    def arrived(self, _: asyncio.Future[Any]) -> None:
        """Answer with the other replies of this round of the loop, or now if no other call is under
        way.
        """
        path = self.path
        path.replied.append(self)
        if len(self.pool.calls) == 1:
            path.answer_replied()
        elif len(path.replied) == 1:
            asyncio.get_running_loop().call_soon(path.answer_replied)

    def sample(self) -> SampledReply | None:
        """Return the engine's reply; `None` = a task continues the call, because the reply failed
        or is not plain.
        """
        if self.call.flight is not self:
            return None
        try:
            chunk = self.pool.arrived(self.request)
        except EngineError:  # the task gets the same error
            chunk = None
        if chunk is None or chunk.finish_reason is None:
            self.hand_over()
            return None
        self.call.note_first_token()
        sampled = chunk.output_ids, chunk.logprobs, chunk.finish_reason, chunk.versions
        return SampledReply(*sampled, chunk, None, None, 0)

    def finish(self, sampled: SampledReply) -> None:
        """Parse the sample and make the record of its exchange, which is to be written."""
        call, session, exchanges = self.call, self.taken.session, self.path.exchanges
        is_settled = self.tip is None or self.tip is not session.tip
        question = call.posed() if is_settled else self.question
        self.finished = exchanges.finished(
            session, call, question, self.prompted, self.effective, sampled
        )
        if is_settled or self.turn is None:
            self.commit = exchanges.indexed(session, self.finished)
        else:
            self.commit = exchanges.recorded(session, self.finished)

    def not_written(self, error: Exception) -> None:
        """Pass a call whose exchange cannot be written to the general path."""
        self.hand_over(self._written(_failing(error)))

    def writes(self, writing: asyncio.Future[None]) -> None:
        """Wait until the store's thread has written the exchange."""
        self.writing = writing
        writing.add_done_callback(self._durable)

    def _written(self, writing: Awaitable[None]) -> Coroutine[None, None, None]:
        _, bodies = self.commit
        return self.path.exchanges.written(self.taken.session, self.finished, bodies, writing)

    def _durable(self, writing: asyncio.Future[None]) -> None:
        """Handle the end of the write in the store's thread."""
        if self.call.flight is not self:
            return  # a task waits for the same
        if writing.cancelled() or writing.exception() is not None:
            self.hand_over()
        else:
            self.committed()

    def committed(self) -> None:
        """Answer the client of a durable exchange, if its connection takes the reply at once.

        The reply leaves before anything else is done.
        """
        path, session, call = self.path, self.taken.session, self.call
        line, question, is_answered = self.line, self.question, False
        waits = line.flight is self  # else its client has gone
        if waits:
            if question.request.stream:
                reply = whole_stream(call, question.request, self.route, question.wire)
            else:
                reply = whole_reply(self.finished.answer.body)
            if is_answered := takes_at_once(line.connection.transport, len(reply)):
                line.flight = None
                line.connection.write_reply(reply)
        if self.alarm is not None:
            self.alarm.cancel()
        _, bodies = self.commit
        path.exchanges.committed(session, self.finished, bodies)
        call.flight = None
        path.metrics.calls.values[("committed",)] += 1
        path.exchanges.end(session, call)
        if is_answered:
            self.answered()
        elif waits:
            self.to_relay()

    def answered(self) -> None:
        """Record that the client got the whole reply, from which the next turn may go on."""
        path, session, call, wire = self.path, self.taken.session, self.call, self.question.wire
        if self.turn is not None and self.tip is session.tip:
            self.turn.read_reply(session, wire)
        path.deliveries.received(session, call)
        path.metrics.requests.values[wire.dialect, RouteKind.GENERATE, 200] += 1
        self.taken.give_back()
        path.served += 1
        known = self.line.known
        assert known is not None, "its head was found"
        if self.turn is None:
            if session.tip is None:
                request = self.question.request
                session.tip = tip_of(session, request, known, path.exchanges.models)
        elif (
            self.tip is not None
            and self.tip is session.tip
            and not self.tip.goes_on(self.turn, session)
        ):
            settle(session)

    # ---- what is not plain

    def fail(self, error: Exception) -> None:
        """Have a task answer an error of the gateway; if that fails too, close the connection.

        Nothing is raised, so that the other calls of a round are served.
        """
        work = _failing(error)
        try:
            self.hand_over(work)
        except Exception as failed:  # noqa: BLE001 - the top of a served request
            work.close()
            log.error("plain_path_failed", trace=trace_of(failed))  # noqa: TRY400 - no variables
            self.line.connection.force_close()

    def hand_over(self, work: Coroutine[None, None, None] | None = None) -> None:
        """Continue the call in a task, and answer its client on the general path.

        `work` is the rest of the work; `None` = wait for the engine or the store, and all that
        follows.
        """
        self._start_task(work)
        if self.line.flight is self:
            self.to_relay()

    def _sample_live(self) -> None:
        """Have a task sample a live call, once all requests of this round of the loop are sent."""
        if self.call.flight is self:
            self._begin_task(self._sampled_live())
            LiveAnswer(self)

    async def _sampled_live(self) -> None:
        """Sample a live call and write its exchange."""
        exchanges, session, call = self.path.exchanges, self.taken.session, self.call
        asked = call, call.posed(), self.prompted, self.effective
        try:
            sampled = await exchanges.sampled(session, *asked)
            if call.error is not None or sampled.engine_prompt is not None:
                settle(session)  # a beginning may come back; another prompt shows other turns
            self.finish(sampled)
        except BaseException:
            settle(session)
            raise
        await self._written(self.path.store.commit(*self.commit))

    def _start_task(self, work: Coroutine[None, None, None] | None) -> None:
        exchanges, session, call = self.path.exchanges, self.taken.session, self.call
        settle(session)
        call.flight = None
        if self.alarm is not None:
            self.alarm.cancel()
        if work is None and self.writing is not None:
            work = self._written(self.writing)
        work = work or exchanges.resumed(session, call, self.prompted, self.effective)
        self._begin_task(work)

    def _begin_task(self, work: Coroutine[None, None, None]) -> None:
        call = self.call
        self.path.exchanges.start(self.taken.session, call, work)
        assert call.task is not None
        call.task.add_done_callback(lambda _: self.pool.drop(call.exchange_id))

    def to_relay(self, begun: StreamState | None = None) -> None:
        """Let the general path answer the client; `begun` is the stream of which it has a part."""
        settle(self.taken.session)
        connection, self.line.flight = self.line.connection, None
        call, request, deliveries = self.call, self.question.request, self.path.deliveries
        connection.handed = Handed(self.taken.session, call, request, self.taken, deliveries, begun)
        connection.pass_on(self.data)

    def client_gone(self) -> None:
        """Detach the client, which has gone; the call continues, and a retry may join it."""
        self.line.flight = None
        if self.call.flight is self:
            self._start_task(None)
        self.taken.give_back()
        self.path.deliveries.left(self.taken.session, self.call, partly=False)


async def _failing(error: Exception) -> None:
    raise error

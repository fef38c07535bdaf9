"""A model call from its normalised request to its commit.

`admit` places the request and begins a call (or joins one); `_run` is the call's life: prompt,
sample, parse, commit. It goes on when its client has gone; `retries` decides for how long. Whatever
fails here ends as `Call.error`, which `relay` tells in the dialect's shape.

Earlier ids are never parsed, compared one by one, or copied: a prompt is a chain node that adds its
own suffix, and capture gets only that suffix (law 9).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import replace
from functools import partial

import structlog

from bridle.aio import Nursery
from bridle.capture.records import Exchange, Store
from bridle.dialects.base import ReplyHead, StoredReply, WireFormat
from bridle.dialects.ids import reply_id
from bridle.engines.base import Engine, EngineInfo, GenerateChunk
from bridle.errors import EngineError, RenderError, RequestError, boundary
from bridle.gateway import budgets, faults, lineage
from bridle.gateway.budgets import (
    grammar_of,
    is_for_calls,
    refusal,
    takes_calls,
    without_calls,
)
from bridle.gateway.call import Answer, Asked, Call, Question, SpanList, Stage
from bridle.gateway.engine_prompts import show
from bridle.gateway.linear import settle
from bridle.gateway.live import LiveReply
from bridle.gateway.metrics import Metrics
from bridle.gateway.models import Models, Served, make_policy
from bridle.gateway.prompts import PROMPT_TAIL, engine_request
from bridle.gateway.recording import (
    Finished,
    Prompted,
    exchange_record,
    images_of,
    new_bodies,
    sampled_under,
)
from bridle.gateway.registry import GatewaySession, question_key
from bridle.gateway.replay import Captured
from bridle.gateway.retries import Deliveries
from bridle.gateway.sampling import REFUSED_S, SampledReply, Sofar
from bridle.gateway.settings import GatewaySettings
from bridle.gateway.weights import Policy
from bridle.prompting.canonical import canonical
from bridle.prompting.conversation import Placement, PlacementKind
from bridle.prompting.prompt import PromptIds
from bridle.prompting.renderer import PromptRenderer
from bridle.types import FinishReason, Kind, ModelRequest, Reply, Sampling, Usage

log = structlog.get_logger()

_RENDERING = boundary(RenderError, "rendering the prompt")


class Exchanges:
    """Runs the calls of all sessions of one gateway."""

    def __init__(
        self,
        *,
        engine: Engine,
        info: EngineInfo,
        renderer: PromptRenderer,
        store: Store,
        settings: GatewaySettings,
        nursery: Nursery,
        deliveries: Deliveries,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._settings = settings
        self._nursery = nursery
        self._deliveries = deliveries
        self._metrics = metrics
        self.policy = Policy.of(info.version, settings.data_dir)
        by_engine = settings.prompt == "engine"
        self.models = Models(
            make_policy(engine, info, renderer, lambda: self.policy.version, by_engine=by_engine)
        )
        self.closing = False
        """True if the gateway is going down."""

    # ---- beginning

    async def admit(
        self, session: GatewaySession, wire: WireFormat, request: ModelRequest, asked: Asked
    ) -> Call:
        """Begin a call for a request, or join the running call that it repeats, with its client
        attached.

        Raises `RequestError` when the request is refused: the gateway is paused or ends, the
        session has ended or reached a limit, or a tool result has no call.
        """
        served = self.models.find(request.model, asked.kind)
        question = self.place(session, wire, request, served)
        session.check(question.canonical)
        if await session.tries.waited(question.key, asked):
            if session.sealed:
                raise faults.session_ended()
            question = self.place(session, wire, request, served)
        if (joined := self._deliveries.joined(session, question.key, asked)) is not None:
            return joined
        try:
            self.refuse_if_spent(session)
        except RequestError as error:
            session.tries.refused(question.key, asked, error)
            raise
        call = self.begun(session, question, lineage.of_subagent(session, question, asked))
        session.conversation.begin(call.exchange_id, question.canonical)
        self.start(session, call, self._exchange(session, call))
        return call

    def begun(self, session: GatewaySession, question: Question, asked: Asked) -> Call:
        """Create the call of a question and register it with its session; the client is attached.

        Its place in the conversation is not registered here.
        """
        request, served = question.request, question.served
        drawn, now = os.urandom(24).hex(), time.time()
        call = Call(
            exchange_id=drawn[:24],
            session_id=session.session_id,
            started_at=now,
            clock_start=time.perf_counter(),
            question_key=question.key,
            other=served.other,
            asked=asked,
            question=question,
            clients=1,
            retry_count=asked.retry_count,
            head=ReplyHead(drawn[24:], request.model, int(now)),
        )
        session.calls[call.exchange_id] = call
        session.tries.begin(call)
        session.begun += 1
        if asked.idempotency_key is not None:
            session.tries.named(call, asked.idempotency_key)
        session.running.add(call)
        self._metrics.in_flight.values[()] += 1
        return call

    def start(self, session: GatewaySession, call: Call, work: Coroutine[None, None, None]) -> None:
        """Start a task that takes a call to its commit or its failure by `work`."""
        call.task = self._nursery.start(self._run(session, call, work), name="call")
        call.task.add_done_callback(partial(self._over, session, call, work))

    def check_length(self, request: ModelRequest) -> None:
        """Raise `RequestError` for a request that is far too long for its model."""
        self.models.find(request.model, Kind.AGENT).prompts.check_length(request)

    async def count(self, session: GatewaySession, wire: WireFormat, request: ModelRequest) -> int:
        """Count the prompt tokens of `request`; nothing is sampled."""
        served = self.models.find(request.model, Kind.AGENT)
        question = self.place(session, wire, request, served)
        shown = await show(served, request)
        parent = _parent(session, question.placement)
        return len((await served.prompts.prompted(question, parent, shown)).prompt)

    def place(
        self, session: GatewaySession, wire: WireFormat, request: ModelRequest, served: Served
    ) -> Question:
        """Return the request's question: `served`, which answers it, and the exchange that it
        continues, found in the conversation.
        """
        if session.tip is not None:
            settle(session)
        key = canonical(request, session.atoms)
        template_args = served.template_args(request)
        placement = session.conversation.place(request, key, template_args=template_args)
        if placement.kind is PlacementKind.ROOT:
            placement = lineage.after_summary(session, request, placement)
        parent = session.calls.get(placement.parent or "")
        if parent is not None and parent.other != served.other:
            placement = replace(placement, reason="other_model", extend=False)
        asked_for = question_key(request, key, template_args)
        return Question(request, wire, key, placement, template_args, served, asked_for, parent)

    def refuse_if_spent(self, session: GatewaySession) -> None:
        """Raise `RequestError` if the gateway ends, is paused, or the session's limits allow no
        call.
        """
        if self.closing:
            raise faults.shutting_down()
        if self.policy.paused:
            raise faults.paused()
        if not session.is_limited:
            return
        in_flight = len(session.running)
        limit = budgets.reached_limit(
            session.limits,
            turns=session.turns + in_flight,
            tokens=session.tokens,
            seconds=session.seconds(),
        )
        if limit is not None:
            session.note_limit(limit)
            raise faults.spent(limit)
        if (refusal := budgets.too_many_in_flight(session.limits, in_flight)) is not None:
            raise refusal

    # ---- the life of a call

    async def _run(
        self, session: GatewaySession, call: Call, work: Coroutine[None, None, None]
    ) -> None:
        """Take a call to its commit or its failure."""
        try:
            await work
        except asyncio.CancelledError:
            self._fail(session, call, self._why_cancelled(session), outcome="cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - the top of a served request
            self._log_failure(call, error)
            refused = faults.request_error(faults.without_frames(error))
            self._fail(session, call, refused, outcome="failed")
        else:
            outcome = "committed" if call.error is None else "cut"
            self._metrics.calls.values[(outcome,)] += 1
            self._deliveries.committed(session, call)
        finally:
            self.end(session, call)

    def end(self, session: GatewaySession, call: Call) -> None:
        """Update the session's counts when a call is over, and release its reserved tokens."""
        session.running.discard(call)
        session.account.release(call.reserved)
        self._metrics.in_flight.values[()] -= 1

    def _over(
        self, session: GatewaySession, call: Call, work: Coroutine[None, None, None], _: object
    ) -> None:
        """End a call whose task was cancelled before it began to run."""
        if call in session.running:
            work.close()
            self._fail(session, call, self._why_cancelled(session), outcome="cancelled")
            self.end(session, call)

    def _fail(
        self, session: GatewaySession, call: Call, error: RequestError, *, outcome: str
    ) -> None:
        session.conversation.forget(call.exchange_id)
        session.calls.pop(call.exchange_id, None)
        session.tries.failed(call)
        call.error = error
        call.enter(Stage.FAILED)
        self._metrics.calls.values[(outcome,)] += 1

    def _why_cancelled(self, session: GatewaySession) -> RequestError:
        if session.sealed:
            return faults.session_ended()
        return faults.shutting_down() if self.closing else faults.client_left()

    def _log_failure(self, call: Call, error: Exception) -> None:
        if isinstance(error, RequestError):
            return  # a mistake of the request; the harness gets the error
        log.warning(
            "call_failed",
            session=call.session_id,
            exchange=call.exchange_id,
            stage=call.stage.value,
            error=f"{type(error).__name__}: {error}",
        )

    async def resumed(
        self, session: GatewaySession, call: Call, prompted: Prompted, effective: Sampling
    ) -> None:
        """Continue a call whose engine call was begun outside a task, and commit it."""
        sampled = await self.sampled(session, call, call.posed(), prompted, effective)
        await self.finish(session, call, prompted, effective, sampled)

    async def _exchange(self, session: GatewaySession, call: Call) -> None:
        question, parent = await self._settle(session, call)
        request, served = question.request, question.served
        shown = await show(served, request)
        with _RENDERING:
            prompted = await served.prompts.prompted(question, parent, shown)
        replay = session.replay
        if replay is None or call.other is not None:
            await self.answer(session, call, prompted)
            return
        prompted, captured = replay.take(prompted, call.asked.kind, served.sampler.decode)
        try:
            await self.answer(session, call, prompted, captured)
        except BaseException:
            if captured is not None:
                replay.put_back(captured)
            raise

    async def answer(
        self,
        session: GatewaySession,
        call: Call,
        prompted: Prompted,
        captured: Captured | None = None,
    ) -> None:
        """Sample a reply under the prompt, or take the captured one, and commit it."""
        question = call.posed()
        request, served = question.request, question.served
        length = prompted.prompt.length
        effective = await self._effective(session, call, question, length)
        self.know(session, call, question, prompted)
        plan = served.plan or session.plan
        call.grammar = grammar_of(request, plan, served.info, served.renderer)
        if captured is None and request.stream and self._settings.stream != "whole":
            call.live = self.live(session, call, prompted, effective)
        call.enter(Stage.SAMPLING)
        if captured is not None:
            sampled = captured.sample(served.sampler.decode)
        else:
            sampled = await self.sampled(session, call, question, prompted, effective)
        await self.finish(session, call, prompted, effective, sampled)

    def know(
        self, session: GatewaySession, call: Call, question: Question, prompted: Prompted
    ) -> None:
        """Record in the call its prompt's length, and the counts of the assistant turns that it
        shows.
        """
        call.head.prompt_tokens = prompted.prompt.length
        call.turns = lineage.turns_shown(session, question, prompted.parent)

    def live(
        self, session: GatewaySession, call: Call, prompted: Prompted, effective: Sampling
    ) -> LiveReply | None:
        """Return the reply that is sent while it is sampled; `None` = it is sent when it is whole.

        Replies that may be sampled again from their start (with a grammar or images) are sent
        whole; so are those that the client began (a prefill), and those with logprobs.
        """
        question = call.posed()
        request = question.request
        again = call.grammar is not None or prompted.shown is not None
        if again or request.logprobs or request.prefill is not None:
            return None
        reader = question.served.renderer.live(
            tools=request.tools,
            prompt_tail=prompted.prompt.tail(PROMPT_TAIL),
            stops=effective.stop,
            calls_as_text=not takes_calls(request),
        )
        return LiveReply(reader, prompted.prompt, reasoning=session.plan.shows_reasoning)

    async def sampled(
        self,
        session: GatewaySession,
        call: Call,
        question: Question,
        prompted: Prompted,
        effective: Sampling,
    ) -> SampledReply:
        """Return the sample. `EngineError` or `RequestError` if there is none.

        Where a part of the reply has left already, what there is of the sample stands, and
        `call.error` says why it has no end.
        """
        sofar, sampler = Sofar(), question.served.sampler
        asked = engine_request(call, question, prompted, effective)

        def on_chunk(chunk: GenerateChunk) -> None:
            if call.live is not None:
                call.live.feed(chunk)
            call.note_first_token()

        patience_s = min(REFUSED_S, self._settings.headers_after_s)
        sample = partial(
            sampler.sample,
            on_chunk=on_chunk,
            sofar=sofar,
            retry_until=call.clock_start + patience_s,
        )
        try:
            if call.live is not None:
                async with call.on_leash():
                    return await sample(asked, prompted.prompt)
            try:
                return await sample(asked, prompted.prompt)
            except EngineError as error:
                if error.status != 400 or not is_for_calls(call.grammar):
                    raise
            call.grammar = None
            asked = replace(asked, grammar=None)
            return await sample(asked, prompted.prompt)
        except TimeoutError:
            call.error = self._why_cancelled(session)
        except EngineError as error:
            refused = refusal(error, question.request)
            if call.live is None or not call.live.partly_sent:
                raise refused from error
            self._log_failure(call, error)
            call.error = faults.request_error(refused)
        finally:
            call.leash = None
        return sampler.cut(asked, sofar)

    async def _settle(self, session: GatewaySession, call: Call) -> tuple[Question, Call | None]:
        """Fix the call's place; one whose parent's commit is under way waits for it first.

        Returns the question in that place, and the call that it continues.
        """
        question = call.posed()
        parent = _parent(session, question.placement)
        if parent is not None and parent.in_flight:
            broke_off = parent.live is not None
            if parent.clients == 0:
                parent.cut()  # its harness goes on from what it got: nobody will ask for the rest
            await parent.done.wait()
            if parent.stage is Stage.FAILED or broke_off:
                session.conversation.forget(call.exchange_id)
                question = self.place(session, question.wire, question.request, question.served)
                session.conversation.begin(call.exchange_id, question.canonical)
                call.question = question
                parent = _parent(session, question.placement)
        self.link(session, call, question, parent)
        return question, parent

    def link(
        self, session: GatewaySession, call: Call, question: Question, parent: Call | None
    ) -> None:
        """Link the call to the one that it continues, whose reply is thereby shown to be
        delivered.
        """
        placement = question.placement
        partly = placement.kind is PlacementKind.PARTIAL
        if parent is not None and not partly and parent.finish is not FinishReason.ABORT:
            self._deliveries.shown(session, parent, call.exchange_id)
        if parent is not None and partly:
            self._deliveries.expire(session, parent)  # its harness goes on without the rest
        call.continues = None if parent is None else parent.exchange_id
        base = parent
        if base is None and placement.repeats:
            base = session.calls.get(placement.repeats[0])
        base = None if base is call else base
        call.spans = SpanList(base.spans if base else None, question.request.span_digests)
        call.base_id = base.exchange_id if base else None
        self._metrics.placements.values[placement.kind, placement.extend] += 1

    async def _effective(
        self, session: GatewaySession, call: Call, question: Question, prompt_tokens: int
    ) -> Sampling:
        """Return the sampling in effect, its tokens reserved; the overflow when there is no room
        left.
        """
        budget = self.budget(session, question, prompt_tokens)
        try:
            call.reserved = await session.account.reserve(budget, lambda: session.tokens)
        except RequestError:
            session.note_limit("tokens")
            raise
        return self.sampling(session, question, call.reserved)

    def budget(self, session: GatewaySession, question: Question, prompt_tokens: int) -> int:
        """Return the most tokens to sample, without the session's own limit. Raises the context
        overflow.
        """
        return budgets.output_budget(
            prompt_tokens=prompt_tokens,
            context_length=question.served.info.context_length,
            asked=question.request.sampling.max_tokens,
            task=(question.served.plan or session.plan).max_output_tokens,
            minimum=self._settings.min_output_tokens,
        )

    def sampling(self, session: GatewaySession, question: Question, reserved: int) -> Sampling:
        """Return the sampling parameters for the engine, with `reserved` as the most tokens."""
        return (question.served.plan or session.plan).effective(
            question.request.sampling,
            budget=reserved,
            stop_token_ids=question.served.renderer.stop_token_ids,
            salt=f"{session.session_id}:{session.begun}",
        )

    # ---- the end

    async def finish(
        self,
        session: GatewaySession,
        call: Call,
        prompted: Prompted,
        effective: Sampling,
        sampled: SampledReply,
    ) -> None:
        """Parse the sampled reply, index it and write the exchange durably; then the call is
        COMMITTED.
        """
        finished = self.finished(session, call, call.posed(), prompted, effective, sampled)
        exchange, bodies = self.indexed(session, finished)
        await self.written(session, finished, bodies, self._store.commit(exchange, bodies))

    def finished(
        self,
        session: GatewaySession,
        call: Call,
        question: Question,
        prompted: Prompted,
        effective: Sampling,
        sampled: SampledReply,
    ) -> Finished:
        """Return the facts of a call whose reply is whole, and set its stage to COMMITTING."""
        request, wire, served = question.request, question.wire, question.served
        prompt, extended = sampled_under(prompted, sampled)
        call.turns = call.turns if extended else lineage.turns_under(session, call, prompt)
        reply = None
        if request.prefill is not None:
            reply = served.prompts.plain_reply(request, prompt, sampled)
        reply = reply or self._parse(call, question, prompt, sampled)
        if request.logprobs:
            reply = served.prompts.with_logprobs(reply, sampled)
        usage = Usage(
            prompt_tokens=prompt.length,
            completion_tokens=sampled.output_ids.size,
            # Of a resumed call, the engine's prompt ended with the tokens so far.
            cached_tokens=min(max(0, sampled.last.cached_tokens), prompt.length),
            reasoning_tokens=reply.reasoning_tokens,
        )
        hidden = reply.reasoning is not None and not session.plan.shows_reasoning
        shown = replace(reply, reasoning=None) if hidden else reply
        body = wire.reply_json(request, call.head, shown, usage)
        call.answer = Answer(shown, usage, body)
        finished = Finished(
            call=call,
            question=question,
            prompted=prompted,
            sample=sampled,
            effective=effective,
            reply=reply,
            answer=call.answer,
        )
        call.prompt, call.output_ids, call.finish = prompt, sampled.output_ids, sampled.finish
        if prompted.shown is not None or prompted.images:
            call.images = images_of(finished)
        call.reasoned = bool(shown.reasoning)
        call.enter(Stage.COMMITTING)
        return finished

    async def written(
        self,
        session: GatewaySession,
        finished: Finished,
        bodies: Mapping[bytes, bytes],
        writing: Awaitable[None],
    ) -> None:
        """Wait until the exchange is durable; then set the call's stage to COMMITTED."""
        try:
            await writing
        except BaseException:
            session.stored.difference_update(bodies)
            raise
        self.committed(session, finished, bodies)

    def committed(
        self, session: GatewaySession, finished: Finished, bodies: Mapping[bytes, bytes]
    ) -> None:
        """Update counts for an exchange that the store has made durable, and let its reply leave.

        `bodies` are the raw messages that it stored, by digest.
        """
        call, request, answer = finished.call, finished.question.request, finished.answer
        session.in_hand.captured += len(request.head) + len(answer.body)
        for body in bodies:
            session.in_hand.captured += len(bodies[body])
        if request.extra.get("store") and call.error is None:
            kept = StoredReply(request.message_spans, answer.body, request.head, request.tools_span)
            session.shelf.keep(reply_id(answer.body), call.exchange_id, kept)
        session.turns += 1
        session.tokens += answer.usage.completion_tokens
        sample, replayed = finished.sample, finished.sample.replayed is not None
        if not replayed and call.other is None:
            self.policy.version = max(self.policy.version, sample.versions[-1].version)
        seconds = time.perf_counter() - call.clock_start
        self._metrics.committed(answer.usage, seconds, replayed=replayed)
        if sample.break_position is not None:
            self._metrics.breaks.values[()] += 1
        call.enter(Stage.COMMITTED)
        if call.error is not None:
            self._deliveries.broken(session, call)

    def indexed(
        self, session: GatewaySession, finished: Finished
    ) -> tuple[Exchange, Mapping[bytes, bytes]]:
        """Add the exchange to the index; return its record, and the bodies that are new with it.

        A request that continues it before they are durable finds it and waits for its `done`.
        """
        question = finished.question
        shown = question.wire.reply_messages(finished.answer.body)
        session.newest = finished.call, question, shown
        lineage.index_reply(
            session,
            finished.call.exchange_id,
            (question.request, question.canonical, question.template_args),
            shown,
            tokens=finished.sample.output_ids.size,
            kind=finished.call.asked.kind,
        )
        return self.recorded(session, finished)

    def recorded(
        self, session: GatewaySession, finished: Finished
    ) -> tuple[Exchange, Mapping[bytes, bytes]]:
        """Return the record of an exchange, and the bodies that are new with it."""
        question = finished.question
        pairs = question.canonical.pairing
        unpaired = session.new_unpaired(question.canonical) if pairs.calls else 0
        exchange = exchange_record(finished, session.next_index, unpaired)
        bodies = new_bodies(finished, session.stored)
        session.next_index += 1
        session.stored.update(bodies)
        return exchange, bodies

    def _parse(
        self, call: Call, question: Question, prompt: PromptIds, sampled: SampledReply
    ) -> Reply:
        """Return the reply that the sampled ids say; the engine's own parse where it made one."""
        calls = takes_calls(question.request)
        if (parsed := sampled.last.reply) is not None:
            return parsed if calls else without_calls(parsed)
        return question.served.renderer.parse(
            sampled.output_ids,
            tools=question.request.tools,
            prompt_tail=prompt.tail(PROMPT_TAIL),
            finish=sampled.finish,
            stop_text=sampled.last.stop_text,
            call_ids=sampled.call_ids if call.live is None else call.live.call_ids,
            calls_as_text=not calls,
        )


def _parent(session: GatewaySession, placement: Placement) -> Call | None:
    """Return the call that a placement continues; `None` = none, or its commit failed."""
    return None if placement.parent is None else session.calls.get(placement.parent)

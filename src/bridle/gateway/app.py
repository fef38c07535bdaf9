"""The gateway: one entry to everything in this room.

`async with GatewayServer(...)` starts the engine, checks that it can give what training needs (law
8), brings old sessions' keys back from the store, and listens. Leaving it cancels what is in
flight, writes down what became of every reply, and closes the engine; the store stays its owner's.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Final, Self

import numpy as np
import structlog
from aiohttp import web

from bridle.aio import Nursery, Stacked
from bridle.capture.records import SessionRecord, Store
from bridle.config import Limits, SamplingPolicy
from bridle.engines.base import Engine, EngineInfo, PauseMode, Weights
from bridle.engines.pool import as_pool
from bridle.engines.probe import compare_template, compare_vocabulary
from bridle.errors import EngineError
from bridle.gateway.admission import Admission
from bridle.gateway.call import Stage
from bridle.gateway.control import ControlPlane, control_token
from bridle.gateway.data import DataPlane, read_head
from bridle.gateway.exchange import Exchanges
from bridle.gateway.keys import key_digest, mint_key
from bridle.gateway.listener import Connection, ConnectionServer, Handler, Listener
from bridle.gateway.metrics import Metrics
from bridle.gateway.models import POLICY, OtherModel, check_models
from bridle.gateway.plain import PlainPath
from bridle.gateway.registry import (
    STORED_AS,
    GatewaySession,
    Registry,
    SessionFacts,
    SessionHandle,
    facts_of,
    new_session_id,
    stored_settings,
)
from bridle.gateway.relay import Relay
from bridle.gateway.replay import Replay
from bridle.gateway.responses import Responses
from bridle.gateway.restore import Restorer, register_stored
from bridle.gateway.retries import Deliveries
from bridle.gateway.routing import split_target
from bridle.gateway.settings import GatewaySettings
from bridle.gateway.weights import (
    WEIGHTS_FILE,
    AddReplica,
    SetPolicy,
    add_replica,
    kept_releases,
    kept_weights,
    policy_json,
    remove_replica,
    set_policy,
)
from bridle.prompting.renderer import PromptRenderer
from bridle.prompting.texts import KEY as TOKENIZER
from bridle.prompting.texts import tokenizer_record
from bridle.types import JSON, LogprobMode

log = structlog.get_logger()

REPLYING_S: Final = 1.0
"""Time that a seal waits for replies that are just being written; then they are cut."""


class GatewayServer(Stacked):
    """The model API that harnesses call. Use it as an async context manager, once."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: PromptRenderer,
        store: Store,
        settings: GatewaySettings,
        models: Sequence[OtherModel] = (),
        sockets: Sequence[socket.socket] = (),
        prepare: Callable[[GatewayServer], Awaitable[None]] | None = None,
    ) -> None:
        """`sockets` listen already: for the data routes and, with a `control_port`, the control
        routes. `prepare` is awaited before requests are served.
        """
        super().__init__()
        check_models(models)
        self._sockets = sockets
        self._prepare = prepare
        self._engine = as_pool(engine)
        self._models = models
        self._pools = {POLICY: self._engine}
        """All engines, by the name of their entry in the models table."""
        self._renderer = renderer
        self._tokenizer = tokenizer_record(renderer.source)
        self._store = store
        self._settings = settings
        self._registry = Registry()
        self._metrics = Metrics()
        self.url = ""
        """`http://host:port` of the data routes, as harnesses reach it; known when entered."""
        self.control_url: str | None = None
        """`http://host:port` of the control routes; known when entered."""
        self.control_token = ""
        """The token that the control routes ask for."""
        self.info: EngineInfo
        """The engine's abilities; known when entered."""

    # ---- lifecycle

    async def __aenter__(self) -> Self:
        """Start.

        `EngineError` if the engine cannot give what training needs; `ConfigError` if a port or the
        control token's file cannot be had.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._engine.aclose)
            self._engine.vouch = self._check_tokenizer
            await self._start_engine()
            check_engine(self.info, allow_untokenized=self._settings.allow_untokenized)
            nursery = await stack.enter_async_context(Nursery(_log_lost))
            self._assemble(nursery)
            await self._start_others(stack)
            register_stored(self._registry, self._store)
            stack.push_async_callback(self._settle_records)
            if self._prepare is not None:
                await self._prepare(self)
            await self._listen(stack)
            stack.push_async_callback(self._end_sessions)
            self._stack = stack.pop_all()
        return self

    async def _start_engine(self) -> None:
        """Start the policy's engines; those with older weights than the last process had load these
        first.
        """
        folder = self._settings.data_dir
        self._engine.vocab_size = self._renderer.vocab_size
        kept = await asyncio.to_thread(kept_weights, folder)
        if kept is not None:
            self._engine.remember(*kept)
        self._engine.start_released(await asyncio.to_thread(kept_releases, folder))
        try:
            self.info = await self._engine.start()
        except EngineError as error:
            if kept is None or folder is None:
                raise
            message = (
                f"{error}. The last weights here were version {kept[1]}, of {kept[0]}; to go on "
                f"without them remove {folder / WEIGHTS_FILE}"
            )
            raise EngineError(message, retryable=error.retryable, status=error.status) from error

    async def _check_tokenizer(self, engine: Engine, info: EngineInfo) -> None:
        """Refuse a replica that reads other words in our ids than were written (law 8)."""
        if not info.token_in:
            return
        plain = partial(self._renderer.tokenizer.encode, add_special_tokens=False)
        found = await compare_vocabulary(
            engine, lambda text: np.array(plain(text)), self._renderer.vocab_size
        )
        if not found.ok:
            raise EngineError(
                f"engine {info.model!r}, tokenizer: {found.found}. {found.means} {found.fix}"
            )
        if self._settings.prompt == "engine":
            found = await compare_template(engine)
            if not found.ok:
                message = f"engine {info.model!r} cannot render prompts: {found.found}."
                raise EngineError(f"{message} {found.fix}")

    def _assemble(self, nursery: Nursery) -> None:
        settings, metrics = self._settings, self._metrics
        metrics.watch(lambda: self._pools)
        if settings.data_dir is not None:
            metrics.watch_disk(settings.data_dir)
        deliveries = Deliveries(
            store=self._store,
            nursery=nursery,
            retry_grace_s=settings.retry_grace_s,
            metrics=metrics,
        )
        self._deliveries = deliveries
        self._exchanges = Exchanges(
            engine=self._engine,
            info=self.info,
            renderer=self._renderer,
            store=self._store,
            settings=settings,
            nursery=nursery,
            deliveries=deliveries,
            metrics=metrics,
        )
        self._restorer = Restorer(self._store, self._exchanges.models)
        responses = Responses(self._store)
        self.plain = PlainPath(
            exchanges=self._exchanges,
            admission=Admission(settings, self._exchanges.check_length),
            store=self._store,
            deliveries=deliveries,
            responses=responses,
            settings=settings,
            metrics=metrics,
        )
        self._data = DataPlane(
            registry=self._registry,
            exchanges=self._exchanges,
            relay=Relay(settings, deliveries),
            info=self.info,
            metrics=metrics,
            restore=self._restorer.restore,
            responses=responses,
            plain=self.plain,
        )
        self.control_token = control_token(settings)
        self._control = ControlPlane(
            sessions=self,
            store=self._store,
            engine=self._engine,
            info=self.info,
            policy=self._exchanges.policy,
            token=self.control_token,
            metrics=metrics,
        )

    async def update_weights(
        self, source: Weights, version: int, *, mode: PauseMode = "abort", timeout_s: float = 60.0
    ) -> None:
        """Load the weights `source` into the policy's engines as `version`; sessions go on.

        Running calls are held in this `mode` and resumed. `EngineError` if some replica did not
        take the weights.
        """
        await self._engine.update_weights(source, version, mode=mode, timeout_s=timeout_s)
        self._exchanges.policy.version = version

    async def _start_others(self, stack: AsyncExitStack) -> None:
        """Start the engines of the models table and make its entries known."""
        for other in self._models:
            if other.engine is None:
                self._exchanges.models.add(other, self.info)
                continue
            pool = self._pools[other.name] = as_pool(other.engine)
            stack.push_async_callback(pool.aclose)
            info = await pool.start()
            self._exchanges.models.add(replace(other, engine=pool), info)

    async def _listen(self, stack: AsyncExitStack) -> None:
        settings, sockets = self._settings, [*self._sockets, None, None]
        listener = self._listener(self._on_data, settings.port, sockets[0], self.plain.line)
        data = await stack.enter_async_context(listener)
        port = data.url.rpartition(":")[2]
        self.url = (settings.public_url or data.url).rstrip("/").replace("{port}", port)
        self.control_url = data.url
        if settings.control_port is not None:
            listener = self._listener(self._on_control, settings.control_port, sockets[1])
            self.control_url = (await stack.enter_async_context(listener)).url

    def _listener(
        self,
        handler: Handler,
        port: int,
        listening: socket.socket | None,
        make_line: Callable[[Connection], ConnectionServer] | None = None,
    ) -> Listener:
        return Listener(
            handler,
            host=self._settings.host,
            port=port,
            listening=listening,
            make_line=make_line,
            max_body_bytes=self._settings.max_body_bytes,
            head_timeout_s=self._settings.head_timeout_s,
            write_timeout_s=self._settings.write_timeout_s,
        )

    async def _on_data(self, http: web.BaseRequest) -> web.StreamResponse:
        head = read_head(http)
        target = head.target
        if target.is_control and (self._settings.control_port is None or target.path == "/health"):
            return await self._control.handle(http, target)
        return await self._data.handle(http, head)

    async def _on_control(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._control.handle(http, split_target(http.raw_path))

    async def _end_sessions(self) -> None:
        """Cancel what is in flight, so that every client hears of the end."""
        self._exchanges.closing = True
        for session in self._registry:
            await self._quiesce(session)

    async def _settle_records(self) -> None:
        """Have every record written; nobody is connected any more."""
        for session in self._registry:
            await self._quiesce(session)
        await self._store.flush()

    # ---- sessions

    async def open_session(
        self,
        session_id: str | None = None,
        *,
        task_id: str | None = None,
        metadata: JSON | None = None,
        sampling: SamplingPolicy | None = None,
        limits: Limits | None = None,
        replay: Replay | None = None,
    ) -> SessionHandle:
        """Open a session; the returned handle has the only copy of its key.

        `session_id` `None` = one is made. `replay` has the captured replies that it gets first (a
        fork); they are lost if the gateway's process ends. `ConfigError` if the id is taken or
        cannot be one, `StoreError` if the session cannot be recorded.
        """
        session_id = session_id or new_session_id()
        self._registry.check_new_id(session_id)
        sampling, limits = sampling or SamplingPolicy(), limits or Limits()
        key = mint_key()
        digest = key_digest(key)
        record = SessionRecord(
            session_id=session_id,
            opened_at=time.time(),
            task_id=task_id,
            metadata={
                **(metadata or {}),
                STORED_AS: stored_settings(digest, sampling, limits),
                TOKENIZER: self._tokenizer,
            },
        )
        session = GatewaySession(record, sampling=sampling, limits=limits)
        session.replay = replay
        self._registry.add(session, digest)
        try:
            await self._store.open_session(record)
        except BaseException:
            self._registry.remove(session, digest)
            raise
        self._metrics.sessions.values[()] += 1
        base = f"{self.url}/s/{session_id}"
        base_urls = {"anthropic": base, "openai": f"{base}/v1", "google": base}
        return SessionHandle(session_id, key, base_urls)

    async def seal(self, session_id: str) -> SessionFacts:
        """End a session: its key is invalid at once, running calls are cancelled, commits awaited.

        Idempotent. `KeyError` if there is no such session.
        """
        session = self._known(session_id)
        self._restorer.count(session)
        if not session.sealed:
            session.sealed, session.ended = True, asyncio.Event()
            self._metrics.sessions.values[()] -= 1
            try:
                await self._quiesce(session)
                session.forget_conversation()
                for pool in self._pools.values():
                    pool.forget(session_id)
            finally:
                session.ended.set()
        elif session.ended is not None:
            await session.ended.wait()
        return session.facts()

    async def _quiesce(self, session: GatewaySession) -> None:
        """Wait until nothing of the session is under way, having cancelled what can be."""
        for call in session.calls.values():
            if call.flight is not None:
                call.flight.hand_over()
        for call in session.calls.values():
            under_way = call.stage in {Stage.PLACED, Stage.SAMPLING} and not call.cut()
            if under_way and call.task is not None:
                call.task.cancel()
        if running := [call.task for call in session.calls.values() if call.task is not None]:
            await asyncio.wait(running)
        writing = [task for task, call in session.replying.items() if call.stage is Stage.COMMITTED]
        if writing:
            _, slow = await asyncio.wait(writing, timeout=REPLYING_S)
            if session.sealed and slow:
                for task in slow:
                    task.cancel()
                await asyncio.wait(slow)
        for call in session.calls.values():
            self._deliveries.close(session, call)
        await self._store.written()

    def facts(self, session_id: str) -> SessionFacts:
        """Return the results of a session so far. `KeyError` if no session has that id."""
        session = self._registry.get(session_id)
        if session is None:
            deleted = facts_of(self._store.outcome(session_id))
            if deleted is None:
                raise KeyError(session_id)
            return deleted
        self._restorer.count(session)
        return session.facts()

    async def limit_reached(self, session_id: str) -> None:
        """Wait until a call of an open session is refused for one of the session's limits.

        `KeyError` if there is no such session.
        """
        await self._known(session_id).limited.wait()

    async def set_policy(self, wanted: SetPolicy) -> None:
        """Change the policy (version, weights, pause) as `POST /policy` does.

        `EngineError` if an engine failed to.
        """
        await set_policy(wanted, self._exchanges.policy, self._engine)

    async def add_replica(self, engine: str) -> None:
        """Add an inference server as `POST /replicas` does. Raises `ConfigError` or
        `EngineError`.
        """
        await add_replica(AddReplica(engine=engine), self._engine)

    async def remove_replica(self, name: str, drain_s: float) -> None:
        """Remove an inference server as `DELETE /replicas` does. `ConfigError` if none has that
        name.
        """
        await remove_replica(name, drain_s, self._engine)

    def metrics(self) -> str:
        """Return the gateway's metrics as Prometheus text, the reply of `GET /metrics`."""
        return self._metrics.render().decode()

    def policy(self) -> JSON:
        """Return the policy version and whether sampling is held, the reply of `GET /policy`."""
        return policy_json(self._exchanges.policy, self._engine, self.info.model)

    def forget(self, session_id: str) -> bool:
        """Drop an ended session from memory; return whether there was one. Its stored records stay.

        Its id and its key are then as unknown as any other.
        """
        session = self._registry.get(session_id)
        ending = session is not None and session.ended is not None and not session.ended.is_set()
        if session is None or not session.sealed or ending:
            return False
        digest = session.record.metadata[STORED_AS]["key_sha256"]
        self._registry.remove(session, bytes.fromhex(digest))
        return True

    def session_ids(self) -> list[str]:
        """Return the ids of all sessions, those of earlier processes on this store included, oldest
        first.
        """
        return [session.session_id for session in self._registry]

    def page(self, after: int, limit: int) -> tuple[list[str], int | None]:
        """Return the ids of up to `limit` sessions after number `after`, and the `after` of the
        next page.
        """
        found = self._registry.page(after, limit + 1)
        more = found[limit - 1].number if len(found) > limit else None
        return [session.session_id for session in found[:limit]], more

    def _known(self, session_id: str) -> GatewaySession:
        session = self._registry.get(session_id)
        if session is None:
            raise KeyError(session_id)
        return session


def check_engine(info: EngineInfo, *, allow_untokenized: bool) -> None:
    """Raise `EngineError` for an engine that cannot give what training needs.

    The message says what is missing and how to get it.
    """
    missing = []
    if not info.token_in:
        missing.append("it does not sample under token ids that it is given")
    if info.logprob_mode is LogprobMode.NONE:
        missing.append("it gives no logprobs of the sampled tokens")
    if missing and not allow_untokenized:
        raise EngineError(
            f"engine {info.model!r} cannot be trained on: {'; '.join(missing)}. Use an engine that "
            "gives token ids and logprobs (vLLM, SGLang, `embedded:DIR`), or pass "
            "--allow-untokenized to capture text only"
        )


def _log_lost(error: BaseException) -> None:
    """Log a delivery whose record could not be written; the exchange itself is durable."""
    log.error("delivery_not_recorded", error=f"{type(error).__name__}: {error}")

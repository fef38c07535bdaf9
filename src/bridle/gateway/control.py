"""The control routes: for those who run sessions, never for a sandbox.

They take the control token, never a session key. `GET /health` is open.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final, Protocol, TypeAlias, TypeVar
from urllib.parse import parse_qs

import numpy as np
import orjson
import structlog
from aiohttp import web
from pydantic import Field, ValidationError

from bridle.aio import Checkup
from bridle.capture.records import Delivery, Exchange, Outcome, Score, Store
from bridle.config import BuilderSpec, Limits, SamplingPolicy, Settings, explain
from bridle.credentials import load_or_make_token
from bridle.dialects.json_reader import check_json
from bridle.engines.base import EngineInfo
from bridle.engines.pool import EnginePool
from bridle.errors import (
    BridleError,
    ConfigError,
    EngineError,
    RequestError,
    StoreError,
    root_cause,
)
from bridle.gateway.faults import trace_of
from bridle.gateway.keys import TOO_MANY, WrongTokens
from bridle.gateway.metrics import Metrics
from bridle.gateway.registry import FACTS, SessionFacts, SessionHandle, facts_of
from bridle.gateway.relay import json_response
from bridle.gateway.routing import Target
from bridle.gateway.settings import GatewaySettings
from bridle.gateway.weights import (
    AddReplica,
    Policy,
    SetEngine,
    SetPolicy,
    add_replica,
    engines_json,
    policy_json,
    remove_replica,
    set_policy,
)
from bridle.prompting.texts import decoder_of
from bridle.trajectory import rebuild
from bridle.trajectory.result import trajectory_json
from bridle.types import JSON, DeliveryState, SessionStatus

if TYPE_CHECKING:
    from bridle.types import Ids

log = structlog.get_logger()

TOKEN_ENV: Final = "BRIDLE_CONTROL_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE: Final = "control.token"  # noqa: S105 - the name of a file
HEALTH_TIMEOUT_S: Final = 5.0
BODY_TIMEOUT_S: Final = 20.0
MAX_BODY_BYTES: Final = 1_000_000
ModelT = TypeVar("ModelT", bound=Settings)
PAGE: Final = 1000
"""Most sessions of one page of the list."""

ID: Final = "{id}"


class OpenSession(Settings):
    """Body of `POST /sessions`; `{}` will do."""

    session_id: str | None = None
    """`None` = one is made."""
    task_id: str | None = None
    metadata: JSON = Field(default_factory=dict)
    sampling: SamplingPolicy = SamplingPolicy()
    limits: Limits = Limits()


class GiveReward(Settings):
    """Body of `POST /sessions/{id}/reward`."""

    reward: float | None = Field(allow_inf_nan=False)
    """`None` takes an earlier reward back."""
    trace_rewards: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] | None = None
    by: str = Field(default="", max_length=200)
    why: str = Field(default="", max_length=10_000)
    metadata: JSON = Field(default_factory=dict)


class SessionControl(Protocol):
    """The part of a gateway that the control routes use."""

    async def open_session(
        self,
        session_id: str | None = None,
        *,
        task_id: str | None = None,
        metadata: JSON | None = None,
        sampling: SamplingPolicy | None = None,
        limits: Limits | None = None,
    ) -> SessionHandle:
        """Open a session; the returned handle has its key."""

    async def seal(self, session_id: str) -> SessionFacts:
        """End a session: its key is invalid at once, running calls are cancelled, commits
        awaited.
        """

    def facts(self, session_id: str) -> SessionFacts:
        """Return the results of a session so far. `KeyError` if no session has that id."""

    def forget(self, session_id: str) -> bool:
        """Drop an ended session from memory; return whether there was one."""

    def page(self, after: int, limit: int) -> tuple[list[str], int | None]:
        """Return up to `limit` session ids, oldest first, behind the place `after`.

        The second value is the `after` of the next page; `None` = this page is the last one.
        """


def control_token(settings: GatewaySettings) -> str:
    """Return the token of the control routes: given, from the environment, kept in `data_dir`, or
    new.

    A new one is written to `data_dir/control.token` with mode 0600. `ConfigError` when that file
    cannot be read or written.
    """
    if given := settings.control_token or os.environ.get(TOKEN_ENV, "").strip():
        return given
    if settings.data_dir is None:
        return secrets.token_urlsafe(32)
    return load_or_make_token(settings.data_dir / TOKEN_FILE)


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A control request, past its token."""

    http: web.BaseRequest
    session_id: str
    """The session or the engine that the path names; may be empty."""
    query: str


Answer: TypeAlias = Callable[[ControlRequest], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """A control request is answered with this status."""

    def __init__(self, status: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self._retry_after_s = retry_after_s

    def response(self) -> web.Response:
        response = _error(self.status, str(self))
        if self._retry_after_s:
            response.headers["Retry-After"] = str(self._retry_after_s)
        return response


class TokenCheck:
    """Lets requests with the control token pass."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._wrong = WrongTokens()

    def __call__(self, http: web.BaseRequest) -> None:
        """Raise a 401 `Refusal` without the token, 429 for a peer that sent many wrong ones."""
        scheme, _, given = http.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "bearer" and hmac.compare_digest(sent, self._token):
            http.protocol.is_known = True  # type: ignore[attr-defined]  # a `Connection`
            return
        if sent and (wait_s := self._wrong.wait_s(http.remote)):
            raise Refusal(429, TOO_MANY, wait_s)
        raise Refusal(
            401, "the control token is missing or wrong; send it as `Authorization: Bearer TOKEN`"
        )


async def read_body(http: web.BaseRequest) -> bytes:
    """Return a control request's body. `Refusal` if it is too large or too slow."""
    if (http.content_length or 0) > MAX_BODY_BYTES:
        raise Refusal(413, f"the request is larger than {MAX_BODY_BYTES} bytes")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await http.read()
    except TimeoutError:
        raise Refusal(
            408, f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s"
        ) from None


class ControlPlane:
    """Answers those who run sessions."""

    def __init__(
        self,
        *,
        sessions: SessionControl,
        store: Store,
        engine: EnginePool,
        info: EngineInfo,
        policy: Policy,
        token: str,
        metrics: Metrics,
    ) -> None:
        self._sessions = sessions
        self._store = store
        self._storing = Checkup(store.check)
        self._engine = engine
        self._info = info
        self._policy = policy
        self._check_token = TokenCheck(token)
        self._metrics = metrics
        self._routes: dict[tuple[str, ...], Answer] = {
            ("GET", "metrics"): self._show_metrics,
            ("GET", "policy"): self._show_policy,
            ("POST", "policy"): self._set_policy,
            ("GET", "engines"): self._show_engines,
            ("POST", "engines", ID): self._set_engine,
            ("GET", "replicas"): self._show_replicas,
            ("POST", "replicas"): self._add_replica,
            ("DELETE", "replicas"): self._remove_replica,
            ("GET", "sessions"): self._list,
            ("POST", "sessions"): self._open,
            ("GET", "sessions", ID): self._show,
            ("DELETE", "sessions", ID): self._delete,
            ("POST", "sessions", ID, "reward"): self._reward,
            ("GET", "sessions", ID, "exchanges"): self._exchanges,
            ("GET", "sessions", ID, "trajectory"): self._trajectory,
        }

    async def handle(self, http: web.BaseRequest, target: Target) -> web.StreamResponse:
        """Serve one control request; errors are `{"error": {"message"}}`, some with a `code`."""
        try:
            return await self._serve(http, target)
        except Refusal as refusal:
            return refusal.response()
        except ConfigError as error:
            return _error(400, str(error))
        except StoreError as error:
            return _error(503, str(error), "store_error")
        except ConnectionError:
            raise
        except BridleError as error:
            return _error(500, str(error))
        except Exception as error:  # noqa: BLE001 - the top of a served request
            log.error("control_request_failed", trace=trace_of(error))  # noqa: TRY400 - no variables in a log
            return _error(500, "internal error of the gateway; its log has more")

    async def _serve(self, http: web.BaseRequest, target: Target) -> web.StreamResponse:
        words = target.path.strip("/").split("/")
        if words == ["health"] and http.method in {"GET", "HEAD"}:
            return await self._health()
        self._check_token(http)
        if words[0] == "engines" and len(words) > 1:
            words = ["engines", target.path.lstrip("/").removeprefix("engines/")]
        named = words[0] in {"sessions", "engines"}
        pattern = tuple(ID if i == 1 and named else word for i, word in enumerate(words))
        answer = self._routes.get((http.method, *pattern))
        if answer is None:
            raise Refusal(
                404, f"the gateway's control API has no route {http.method} /{'/'.join(words)}"
            )
        return await answer(ControlRequest(http, words[1] if len(words) > 1 else "", target.query))

    async def _health(self) -> web.StreamResponse:
        unavailable = "store_error"
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self._storing()
                unavailable = "engine_unavailable"
                await self._engine.health()
        except (StoreError, EngineError, TimeoutError) as error:
            return _json({"status": unavailable, "detail": root_cause(error)}, 503)
        return _json({"status": "ok"})

    async def _show_metrics(self, _: ControlRequest) -> web.StreamResponse:
        return web.Response(
            body=self._metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _show_policy(self, _: ControlRequest) -> web.StreamResponse:
        return _json(policy_json(self._policy, self._engine, self._info.model))

    async def _set_policy(self, asked: ControlRequest) -> web.StreamResponse:
        await set_policy(await _body(asked.http, SetPolicy), self._policy, self._engine)
        return await self._show_policy(asked)

    async def _show_engines(self, _: ControlRequest) -> web.StreamResponse:
        return _json({"engines": engines_json(self._engine.replicas())})

    async def _set_engine(self, asked: ControlRequest) -> web.StreamResponse:
        wanted = await _body(asked.http, SetEngine)
        try:
            policy = wanted.policy(asked.session_id)
        except ValidationError as error:
            raise explain(error, "the request's body") from error
        await set_policy(policy, self._policy, self._engine)
        return await self._show_engines(asked)

    async def _show_replicas(self, _: ControlRequest) -> web.StreamResponse:
        return _json({"replicas": self._engine.replicas()})

    async def _add_replica(self, asked: ControlRequest) -> web.StreamResponse:
        await add_replica(await _body(asked.http, AddReplica), self._engine)
        return await self._show_replicas(asked)

    async def _remove_replica(self, asked: ControlRequest) -> web.StreamResponse:
        query = parse_qs(asked.query)
        name, given = query.get("name", [""])[-1], query.get("drain_s", ["0"])[-1]
        try:
            drain_s = float(given)
        except ValueError:
            raise ConfigError(f"drain_s: {given!r} is not a number of seconds") from None
        await remove_replica(name, drain_s, self._engine)
        return await self._show_replicas(asked)

    async def _list(self, asked: ControlRequest) -> web.StreamResponse:
        query = parse_qs(asked.query)
        after, limit = _whole(query, "after", 0), _whole(query, "limit", PAGE)
        ids, more = self._sessions.page(after, max(1, min(limit, PAGE)))
        shown = []
        for session_id in ids:
            await asyncio.sleep(0)  # model calls go on between two sessions
            with suppress(Refusal):  # deleted meanwhile
                shown.append(asdict(self._facts(session_id)))
        return _json({"sessions": shown, "next": more})

    async def _open(self, asked: ControlRequest) -> web.StreamResponse:
        wanted = await _body(asked.http, OpenSession)
        if wanted.session_id is not None and self._is_taken(wanted.session_id):
            raise Refusal(
                409,
                f"session {wanted.session_id!r} exists already; give the new session another id",
            )
        handle = await self._sessions.open_session(
            wanted.session_id,
            task_id=wanted.task_id,
            metadata=wanted.metadata,
            sampling=wanted.sampling,
            limits=wanted.limits,
        )
        opened = {"session_id": handle.session_id, "key": handle.key, "base_url": handle.base_urls}
        return _json(opened)

    def _is_taken(self, session_id: str) -> bool:
        try:
            self._sessions.facts(session_id)
        except KeyError:
            return False
        return True

    def _facts(self, session_id: str) -> SessionFacts:
        try:
            return self._sessions.facts(session_id)
        except KeyError:
            raise Refusal(404, f"this gateway has no session {session_id!r}") from None

    async def _show(self, asked: ControlRequest) -> web.StreamResponse:
        facts = asdict(self._facts(asked.session_id))
        outcome = self._store.outcome(asked.session_id)
        return _json({**facts, "outcome": None if outcome is None else asdict(outcome)})

    async def _delete(self, asked: ControlRequest) -> web.StreamResponse:
        self._facts(asked.session_id)
        outcome = self._store.outcome(asked.session_id)
        if (deleted := facts_of(outcome)) is not None:
            return _json(asdict(deleted))
        facts = await self._sessions.seal(asked.session_id)
        if self._store.outcome(asked.session_id) is None:
            outcome = Outcome(
                session_id=asked.session_id,
                status=SessionStatus.COMPLETED.value,
                ended_at=time.time(),
                reward=None,
                metadata={"ended_by": "DELETE", FACTS: asdict(facts)},
            )
            await self._store.close_session(outcome)
            self._sessions.forget(asked.session_id)
        return _json(asdict(facts))

    async def _reward(self, asked: ControlRequest) -> web.StreamResponse:
        """Record a reward beside what is known; it counts once the session has ended."""
        given = await _body(asked.http, GiveReward)
        self._facts(asked.session_id)
        score = Score(asked.session_id, time.time(), **dict(given))
        await self._store.score(score)
        return _json(asdict(score))

    async def _exchanges(self, asked: ControlRequest) -> web.StreamResponse:
        self._facts(asked.session_id)

        def read() -> bytes:
            capture = self._store.read(asked.session_id)
            return encode({"exchanges": exchanges_json(capture.exchanges, capture.deliveries)})

        return json_response(await asyncio.to_thread(read))

    async def _trajectory(self, asked: ControlRequest) -> web.StreamResponse:
        wanted = parse_qs(asked.query).get("builder")
        builder = None if wanted is None else BuilderSpec(strategy=wanted[-1])
        self._facts(asked.session_id)

        def read() -> bytes:
            capture = self._store.read(asked.session_id)
            decode = decoder_of(capture.session.metadata)
            return encode(trajectory_json(rebuild(capture, builder=builder, decode=decode)))

        return json_response(await asyncio.to_thread(read))


def _whole(query: Mapping[str, list[str]], name: str, default: int) -> int:
    given = query.get(name, [str(default)])[-1]
    if not given.isascii() or not given.isdigit():
        raise Refusal(400, f"query parameter {name}={given!r}: give a whole number")
    return int(given)


def encode(value: object) -> bytes:
    """Return JSON of plain data, dataclasses and numpy arrays."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def exchanges_json(exchanges: Sequence[Exchange], deliveries: Mapping[str, Delivery]) -> list[JSON]:
    """Return one object per exchange, in commit order; `encode` turns them into JSON.

    `prompt_ids` are `None` where an exchange that they depend on could not be read.
    """
    whole: dict[str, Ids] = {}
    shown = []
    for exchange in exchanges:
        prompt_ids: Ids | None = exchange.suffix_ids
        if exchange.parent_id is not None:
            before = whole.get(exchange.parent_id)
            prompt_ids = (
                None
                if before is None
                else np.concatenate((before[: exchange.kept], exchange.suffix_ids))
            )
        if prompt_ids is not None:
            whole[exchange.exchange_id] = np.concatenate((prompt_ids, exchange.output_ids))
        delivery = deliveries.get(exchange.exchange_id)
        shown.append(_exchange_json(exchange, prompt_ids, delivery))
    return shown


def _exchange_json(exchange: Exchange, prompt_ids: Ids | None, delivery: Delivery | None) -> JSON:
    state = None if delivery is None else delivery.state
    return {
        "exchange_id": exchange.exchange_id,
        "index": exchange.index,
        "parent_id": exchange.parent_id,
        "continues": exchange.continues,
        "root_reason": exchange.root_reason,
        "dialect": exchange.dialect.value,
        "kind": exchange.kind.value,
        "prompt_ids": prompt_ids,
        "output_ids": exchange.output_ids,
        "logprobs": exchange.logprobs,
        "logprob_mode": exchange.logprob_mode.value,
        "versions": exchange.versions,
        "finish_reason": exchange.finish_reason.value,
        "delivered": state is DeliveryState.DELIVERED,
        "delivery": None if state is None else state.value,
        "joined_by": [] if delivery is None else delivery.joined_by,
        "sampling": exchange.sampling,
        "constrained": exchange.constrained,
        "reply": orjson.Fragment(exchange.reply),
        "started_at": exchange.started_at,
        "first_token_s": exchange.first_token_s,
        "duration_s": exchange.duration_s,
        "extra": exchange.extra,
    }


def _json(value: object, status: int = 200) -> web.Response:
    return json_response(encode(value), status)


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    return _json({"error": {"message": message} | ({"code": code} if code else {})}, status)


async def _body(http: web.BaseRequest, model: type[ModelT]) -> ModelT:
    """Return the request's JSON as `model`; an empty body is `{}`.

    `ConfigError` names what is wrong.
    """
    body = await read_body(http)
    try:
        check_json(body)
    except RequestError as error:
        raise Refusal(400, f"the request's body cannot be used: {error}") from error
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise explain(error, "the request's body") from error

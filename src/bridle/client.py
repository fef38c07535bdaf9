"""The client of the rollout server, which trainers, bridges and the command line use.

    with Client("http://127.0.0.1:8080") as client:
        client.submit_many(tasks)
        for group in client.groups():
            train(group.results)

`AsyncClient` is the same with `await`. Requests are idempotent and are retried while a server
restarts. A group is acknowledged when the consumer asks for the next one; after a crash the
consumer gets the others again, in order.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import threading
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
import orjson
import structlog

from bridle.config import Task
from bridle.credentials import find_token, split_token
from bridle.errors import ConfigError, ServerError
from bridle.trajectory.result import from_packed
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, is_server_url, without_user_info

T = TypeVar("T")
P = ParamSpec("P")

log = structlog.get_logger(__name__)

TOKEN_ENV = "BRIDLE_SERVER_TOKEN"  # noqa: S105 - the variable's name
DEFAULT_URL = "http://127.0.0.1:8080"

BATCH = 100
"""Tasks of one request of `submit_many`."""

IDS = 1000
"""Task ids of one request of `cancel` or `ack`."""

POLL_S = 30
"""Time that one long poll waits."""

CONNECT_S = 1.5
"""Time that one try to connect may take."""

SOON_S = 2.0
"""A client whose patience lasts longer than this logs that it waits."""

Order = Literal["done", "submitted", "priority"]


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """One session that has ended."""

    session_id: str
    sample_index: int
    status: str
    """`COMPLETED`, `TIMEOUT`, `ERROR` or `CANCELLED`."""
    cause: str | None
    """Reason why it did not complete (`bridle.types.Cause`); `None` = it did."""
    error: str | None
    reward: float | None
    """`None` = not known."""
    trajectory: Trajectory
    """Without traces where there is none."""
    metadata: JSON
    """The task's own, and the evaluator's under `evaluation`."""
    timing: dict[str, float]
    """Seconds per stage."""
    raw: JSON = field(repr=False, default_factory=dict)
    """The server's JSON without the trajectory."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupResult:
    """A task whose sessions have all ended."""

    task_id: str
    cursor: int
    """Its place in the order in which groups ended."""
    state: str
    """`completed`, `failed` or `cancelled`."""
    results: tuple[Result, ...]
    """One per session, in the order of samples; empty without trajectories."""
    usable: int
    missing: tuple[JSON, ...]
    """Sessions that are not usable, with their cause."""
    version_lag: int | None
    """Policy versions between its oldest token and now; `None` = nothing was sampled."""
    raw: JSON = field(repr=False, default_factory=dict)
    """The server's JSON without the results."""


class AsyncClient:
    """A client of one server. Use as an async context manager.

    Each method raises `ServerError` if the server refuses the request or could not be reached for
    `patience_s`.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, token: str | None = None, patience_s: float = 60.0
    ) -> None:
        """Take the token from the URL (`http://x:TOKEN@host`), else `token`, else
        `$BRIDLE_SERVER_TOKEN`, else that of this user's own server at this URL.

        `ConfigError` for a URL without `http://` or `https://`, and a token that is not one line.
        """
        if not is_server_url(url):
            raise ConfigError(
                f"server {without_user_info(url)!r} is not a URL; give for instance {DEFAULT_URL}"
            )
        self.url, own = split_token(url.rstrip("/"))
        self.token = (own or token or os.environ.get(TOKEN_ENV, "")).strip() or None
        """The token that is sent; `None` = none, until a server of this user is found."""
        if not (self.token or "").isprintable():
            raise ConfigError(
                f"the token of server {self.url} has a line break or another control character in "
                f"it; --token or {TOKEN_ENV} takes the token alone"
            )
        self._patience_s = patience_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(
            total=None, connect=10, sock_connect=CONNECT_S, sock_read=POLL_S + 60
        )
        self._http = aiohttp.ClientSession(timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    # ---- tasks

    async def submit(self, /, task: Task | Mapping[str, Any], **terms: object) -> bool:
        """Submit one task; return whether it is new. See `submit_many`."""
        return (await self.submit_many([task], **terms))[0]

    async def submit_many(
        self, /, tasks: Iterable[Task | Mapping[str, Any]], **terms: object
    ) -> list[bool]:
        """Submit tasks; return whether each is new. Submitting the same one again does nothing.

        `terms` are options of each submitted task: `dispatch_priority`, `callback_url`,
        `min_completed_fraction`, `early_stop_min_usable_sessions`, `max_refills`, `max_attempts`,
        `hand_out`. The server accepts up to 100 tasks together or not at all; `ServerError` names
        what is wrong.
        """
        bodies = [_body(task, terms) for task in tasks]
        fresh: list[bool] = []
        for start in range(0, len(bodies), BATCH):
            answer = await self._json("POST", "/v1/tasks", {"tasks": bodies[start : start + BATCH]})
            fresh += [one["new"] for one in answer["tasks"]]
        return fresh

    async def task(self, task_id: str) -> JSON:
        """Return the state of a task, with counts of its sessions."""
        return await self._json("GET", f"/v1/tasks/{task_id}")

    async def tasks(self, *, state: str | None = None) -> AsyncGenerator[JSON, None]:
        """Yield all tasks, oldest first."""
        query = {"cursor": 0, "limit": 500} | ({"state": state} if state else {})
        while (page := await self._json("GET", "/v1/tasks", query=query))["tasks"]:
            for task in page["tasks"]:
                yield task
            query["cursor"] = page["cursor"]

    async def sessions(self, task_id: str) -> list[JSON]:
        """Return the sessions of a task that have started or ended."""
        path, query, found = f"/v1/tasks/{task_id}/sessions", {"cursor": -1, "limit": 1000}, []
        while (page := await self._json("GET", path, query=query))["sessions"]:
            found += page["sessions"]
            query["cursor"] = page["cursor"]
        return found

    async def newest_sessions(
        self, *, limit: int = 100, offset: int = 0, state: str | None = None
    ) -> list[JSON]:
        """Return sessions that have started or ended, those of the newest task first; at most
        1000.
        """
        query: JSON = {"limit": limit, "offset": offset} | ({"state": state} if state else {})
        found: list[JSON] = (await self._json("GET", "/v1/sessions", query=query))["sessions"]
        return found

    async def session(self, session_id: str) -> JSON:
        """Return the state of a session, or its result without the trajectory."""
        return await self._json("GET", f"/v1/sessions/{session_id}")

    async def wait(self, task_id: str, *, timeout_s: float | None = None) -> JSON:
        """Wait until a task is final, and return its state.

        `TimeoutError` after `timeout_s`; `None` = no limit.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                query = {"wait_s": POLL_S}
                task = await self._json("GET", f"/v1/tasks/{task_id}", query=query)
                if task["cursor"] is not None:
                    return task

    async def cancel(self, *task_ids: str) -> list[str]:
        """Cancel tasks with all their sessions; return the ids that are unknown."""
        unknown: list[str] = []
        for start in range(0, len(task_ids), IDS):
            body = {"task_ids": task_ids[start : start + IDS]}
            unknown += (await self._json("POST", "/v1/tasks/cancel", body))["unknown"]
        return unknown

    async def cancel_session(self, session_id: str) -> JSON:
        """Cancel one session, and return its state."""
        return await self._json("DELETE", f"/v1/sessions/{session_id}")

    async def give_reward(self, /, session_id: str, reward: float, **more: object) -> JSON:
        """Give an ended session another reward; `more` is `trace_rewards`, `by` and `why`."""
        body = {"reward": reward, **more}
        return await self._json("POST", f"/v1/sessions/{session_id}/reward", body)

    async def fork(
        self, session_id: str, *, at: int, samples: int = 1, task_id: str | None = None
    ) -> str:
        """Submit a task whose sessions begin with this one's first `at` replies; return its id."""
        body = {"at": at, "num_samples": samples, "task_id": task_id}
        answer = await self._json("POST", f"/v1/sessions/{session_id}/fork", body)
        return str(answer["task_id"])

    # ---- results

    async def groups(
        self,
        *,
        cursor: int = 0,
        order: Order = "done",
        trajectories: bool = True,
        ack: bool = True,
        page: int = 4,
        quiet_s: float | None = None,
    ) -> AsyncGenerator[GroupResult, None]:
        """Yield groups as they end; without `cursor`, first all that are not acknowledged.

        With `ack`, a group is acknowledged when the consumer asks for the next one; otherwise the
        consumer calls `AsyncClient.ack`. The iteration ends after `quiet_s` without a further
        group; `None` = never.
        """
        held: set[str] = set()
        last_group_at = time.monotonic()
        while True:
            left_s = POLL_S if quiet_s is None else quiet_s - (time.monotonic() - last_group_at)
            wait_s = 0 if held else max(0, min(POLL_S, int(left_s)))
            query: JSON = {
                "cursor": 0 if order == "priority" else cursor,
                "limit": min(100, page + len(held)),
                "order": order,
                "wait_s": wait_s,
            }
            if trajectories:
                query["include"] = "trajectories"
            body = await self._request("GET", "/v1/groups", query=query, accept="msgpack")
            answer: JSON = msgspec.msgpack.decode(body)
            cursor = answer["cursor"]
            fresh = [one for one in answer["groups"] if one["task_id"] not in held]
            for one in fresh:
                yield _group(one)
                if ack:
                    await self.ack(task_ids=[one["task_id"]])
                elif order == "priority":
                    held.add(one["task_id"])
                last_group_at = time.monotonic()
            if not fresh and left_s <= 0:
                return
            if not fresh and not wait_s:
                await asyncio.sleep(0.1)

    async def ack(self, *, cursor: int | None = None, task_ids: Sequence[str] = ()) -> int:
        """Acknowledge these groups, or all that ended up to the `GroupResult.cursor` of one; return
        how many had not been acknowledged before.
        """
        count = 0
        for start in range(0, max(1, len(task_ids)), IDS):
            body = {"cursor": cursor, "task_ids": list(task_ids[start : start + IDS])}
            count += (await self._json("POST", "/v1/groups/ack", body))["acked"]
        return count

    async def trajectory(self, session_id: str) -> Trajectory:
        """Return the trajectory of a session that has ended."""
        path = f"/v1/sessions/{session_id}/trajectory"
        return from_packed(
            msgspec.msgpack.decode(await self._request("GET", path, accept="msgpack"))
        )

    async def artifact(self, session_id: str, name: str) -> bytes:
        """Return a log (`stdout.log`) or artifact of a session."""
        return await self._request("GET", f"/v1/sessions/{session_id}/artifacts/{name}")

    # ---- the server

    async def status(self) -> JSON:
        """Return the server's counts of tasks, sessions and nodes."""
        found = await self._json("GET", "/v1/status")
        if "tasks" not in found:
            raise _strange(200, orjson.dumps(found))
        return found

    async def nodes(self) -> list[JSON]:
        """Return the nodes with their slots and running sessions."""
        found: list[JSON] = (await self._json("GET", "/v1/nodes"))["nodes"]
        return found

    async def policy(self) -> JSON:
        """Return the policy version under which sessions start, and whether sampling is held."""
        return await self._json("GET", "/policy")

    async def set_policy(self, /, **changes: object) -> JSON:
        """Change the policy by fields of `bridle.gateway.weights.SetPolicy`; returns the policy
        then.
        """
        return await self._json("POST", "/policy", changes)

    async def engines(self) -> list[JSON]:
        """Return the engines, their states (`serving`, `released`...) and versions."""
        found: list[JSON] = (await self._json("GET", "/engines"))["engines"]
        return found

    async def set_engine(self, engine: str, /, **changes: object) -> list[JSON]:
        """Release an engine to its trainer, or resume it, by its id; `all` = all.

        `changes` are fields of `bridle.gateway.weights.SetEngine`. Returns the engines then.
        """
        path = f"/engines/{quote(engine, safe='')}"
        found: list[JSON] = (await self._json("POST", path, changes))["engines"]
        return found

    async def pause(self) -> JSON:
        """Pause the server: no further session starts."""
        return await self._json("POST", "/v1/pause")

    async def drain(self, timeout_s: int = 60) -> JSON:
        """Pause the server, and wait at most `timeout_s` until no session runs."""
        return await self._json("POST", "/v1/drain", query={"timeout_s": timeout_s})

    async def resume(self) -> JSON:
        """End a pause of the server: sessions start again."""
        return await self._json("POST", "/v1/resume")

    async def dead_callbacks(self) -> list[JSON]:
        """Return the first 1000 callbacks that failed too often and are not retried any more."""
        query = {"state": "dead", "limit": 1000}
        found: list[JSON] = (await self._json("GET", "/v1/callbacks", query=query))["callbacks"]
        return found

    async def replay(self, delivery_id: str | None = None) -> int:
        """Send a dead callback again, or all of them (`None`); return how many."""
        middle = "" if delivery_id is None else f"/{delivery_id}"
        count: int = (await self._json("POST", f"/v1/callbacks{middle}/replay"))["replayed"]
        return count

    async def events(self) -> AsyncGenerator[JSON, None]:
        """Yield the server's events from now on, until it stops.

        `ServerError` at once, without another try, if the connection fails or ends early.
        """
        http = self._session()
        timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=60)
        token = self._token_header()
        try:
            async with http.get(f"{self.url}/events", timeout=timeout, headers=token) as answer:
                if not answer.ok:
                    raise _refused(answer.status, await answer.read())
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        yield orjson.loads(line[6:])
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    # ---- requests

    async def _json(
        self, method: str, path: str, body: object = None, *, query: Mapping[str, Any] | None = None
    ) -> JSON:
        content = await self._request(method, path, body, query=query)
        try:
            answer: JSON = orjson.loads(content)
        except ValueError:
            raise _strange(200, content) from None
        if not isinstance(answer, dict):
            raise _strange(200, content)
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, Any] | None = None,
        accept: str = "json",
    ) -> bytes:
        """Send a request, with retries for no connection, 429 and 503; log that it waits."""
        data = None if body is None else orjson.dumps(body)
        accepted = {"accept": f"application/{accept}" if accept != "json" else "*/*"}
        started, wait_s, waits = time.monotonic(), 0.1, False
        while True:
            headers = accepted | self._token_header()
            try:
                async with self._session().request(
                    method, self.url + path, data=data, params=query, headers=headers
                ) as answer:
                    content = await answer.read()
                if answer.ok:
                    if waits:
                        waited_s = round(time.monotonic() - started, 1)
                        log.info("the server answers again", url=self.url, waited_s=waited_s)
                    return content
                fault = _refused(answer.status, content)
                if answer.status == 401 and "authorization" not in headers and self._token_header():
                    continue  # it started while this was sent, and announces itself first
                if answer.status not in (429, 503):
                    raise fault
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                fault = self._unreachable(error)
            left_s = started + self._patience_s - time.monotonic()
            if wait_s > left_s:
                raise fault
            if not waits and left_s > SOON_S:
                waits = True
                left = {"url": self.url, "error": str(fault), "left_s": round(left_s)}
                log.warning("waiting for the server", **left)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 5.0)

    def _unreachable(self, error: Exception) -> ServerError:
        number = error.errno if isinstance(error, OSError) else None
        own = getattr(error, "os_error", error)  # of TLS: its number is no `errno`
        why = os.strerror(number) if number and number > 0 else error
        why = (own.strerror or why) if isinstance(own, ssl.SSLError) else why
        message = f"{self.url} cannot be reached: {why}; is `bridle serve` running there?"
        return ServerError(message, code="unreachable")

    def _token_header(self) -> dict[str, str]:
        """Return the header with the token; looks again for a server of this user."""
        if self.token is None and (found := find_token(self.url)) is not None:
            self.url, self.token = found
        return {} if self.token is None else {"authorization": f"Bearer {self.token}"}

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError(
                "the client has no connection: use it inside `async with AsyncClient(...)`"
            )
        return self._http


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return `method` as one of `Client` that blocks until the result."""

    @wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    """Return `method` as one of `Client` that blocks until each item."""

    @wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._each(method(self._client, *args, **kwargs))

    return call


class Client:
    """A blocking `AsyncClient` with its own event loop. Use as a context manager.

    It may be used from any thread, also one with a running event loop.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, token: str | None = None, patience_s: float = 60.0
    ) -> None:
        self._client = AsyncClient(url, token=token, patience_s=patience_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="bridle client", daemon=True
        )

    @property
    def url(self) -> str:
        """URL of the server, without a token."""
        return self._client.url

    @property
    def token(self) -> str | None:
        """API token that the client sends; `None` = none."""
        return self._client.token

    def __enter__(self) -> Self:
        self._thread.start()
        self._wait(self._client.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._client.__aexit__())
        self._wait(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the client has no connection: use it inside `with Client(...)`")
        pending = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return pending.result()
        except BaseException:
            pending.cancel()
            raise

    def _each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        async def following() -> tuple[bool, T | None]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        async def close() -> None:
            await items.aclose()

        try:
            while True:
                there, item = self._wait(following())
                if not there:
                    return
                yield item  # type: ignore[misc]  # there is one
        finally:
            # The loop's thread does not run any more when Python or the client has ended.
            if not sys.is_finalizing() and self._thread.is_alive():
                self._wait(close())

    submit = _blocking(AsyncClient.submit)
    submit_many = _blocking(AsyncClient.submit_many)
    task = _blocking(AsyncClient.task)
    tasks = _iterating(AsyncClient.tasks)
    sessions = _blocking(AsyncClient.sessions)
    newest_sessions = _blocking(AsyncClient.newest_sessions)
    session = _blocking(AsyncClient.session)
    wait = _blocking(AsyncClient.wait)
    cancel = _blocking(AsyncClient.cancel)
    cancel_session = _blocking(AsyncClient.cancel_session)
    give_reward = _blocking(AsyncClient.give_reward)
    fork = _blocking(AsyncClient.fork)
    groups = _iterating(AsyncClient.groups)
    ack = _blocking(AsyncClient.ack)
    trajectory = _blocking(AsyncClient.trajectory)
    artifact = _blocking(AsyncClient.artifact)
    status = _blocking(AsyncClient.status)
    nodes = _blocking(AsyncClient.nodes)
    policy = _blocking(AsyncClient.policy)
    set_policy = _blocking(AsyncClient.set_policy)
    engines = _blocking(AsyncClient.engines)
    set_engine = _blocking(AsyncClient.set_engine)
    pause = _blocking(AsyncClient.pause)
    drain = _blocking(AsyncClient.drain)
    resume = _blocking(AsyncClient.resume)
    dead_callbacks = _blocking(AsyncClient.dead_callbacks)
    replay = _blocking(AsyncClient.replay)
    events = _iterating(AsyncClient.events)


def _body(task: Task | Mapping[str, Any], terms: Mapping[str, object]) -> JSON:
    given = task.model_dump(mode="json", exclude_unset=True) if isinstance(task, Task) else task
    return {**given, **terms}


def _group(body: JSON) -> GroupResult:
    raw = {name: value for name, value in body.items() if name != "results"}
    return GroupResult(
        task_id=body["task_id"],
        cursor=body["cursor"],
        state=body["state"],
        results=tuple(map(_result, body.get("results", ()))),
        usable=body["usable_sessions"],
        missing=tuple(body["missing"]),
        version_lag=body["version_lag"],
        raw=raw,
    )


def _result(body: JSON) -> Result:
    names = (
        *("session_id", "sample_index", "status", "cause", "error", "reward", "metadata"),
        "timing",
    )
    raw = {name: value for name, value in body.items() if name != "trajectory"}
    trajectory = from_packed(body["trajectory"])
    return Result(**{name: body[name] for name in names}, trajectory=trajectory, raw=raw)


def _refused(status: int, content: bytes) -> ServerError:
    try:
        error = orjson.loads(content)["error"]
        return ServerError(error["message"], status=status, code=error["code"])
    except (ValueError, KeyError, TypeError):
        return _strange(status, content)


def _strange(status: int, content: bytes) -> ServerError:
    """Return the error for an answer that is not a rollout server's."""
    said = " ".join(content[:200].decode(errors="replace").split())
    message = f"the server answered {status} and not as `bridle serve` does; is it one? {said}"
    return ServerError(message.rstrip(), status=status)

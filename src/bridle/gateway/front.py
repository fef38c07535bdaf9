"""One gateway of several processes: a port, sessions placed on workers, and their sum told.

The front listens and holds no session. A connection goes to the worker whose session its first
request names (`handover`); control requests are answered here, by asking the worker that a session
lives on, or all of them. Every worker is a whole gateway with a store of its own in
`DATA/worker-K`, so each law is kept where it is kept without workers; one that dies is started
again and knows its sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import aiohttp
import orjson
import structlog
from aiohttp import web

from bridle.aio import Nursery
from bridle.capture.sqlite import SqliteReader
from bridle.dialects import DIALECTS
from bridle.dialects.routes import caller
from bridle.errors import BridleError, ConfigError, RequestError
from bridle.gateway.control import control_token
from bridle.gateway.forward import Forwarder
from bridle.gateway.handover import Door, listen
from bridle.gateway.keys import key_digest
from bridle.gateway.listener import Listener
from bridle.gateway.merging import merged_metrics, merged_replicas
from bridle.gateway.placing import Places
from bridle.gateway.relay import JSON_TYPE, json_response, refusal
from bridle.gateway.routing import Target, split_target
from bridle.gateway.settings import GatewaySettings
from bridle.gateway.worker import Worker
from bridle.types import JSON

log = structlog.get_logger()

CAPTURE: Final = "capture.sqlite"
MOST_WORKERS: Final = 64

Answer: TypeAlias = tuple[int, bytes]
"""Status and body of a worker's reply."""

Route: TypeAlias = Callable[[web.BaseRequest, Sequence[str]], Awaitable[web.Response]]
"""Answers a control request, given the words of its path."""


def worker_folder(data: Path, number: int) -> Path:
    """Where the worker of that number keeps its capture."""
    return data / f"worker-{number}"


def check_folder(data: Path, workers: int) -> None:
    """Refuse a data folder whose sessions some other number of workers has. `ConfigError`."""
    found = [path.parent.name for path in data.glob(f"worker-*/{CAPTURE}")]
    before = 1 + max((int(n[7:]) for n in found if re.fullmatch(r"worker-\d+", n)), default=-1)
    if (data / CAPTURE).exists() and workers > 1:
        raise ConfigError(f"{data} is the folder of one process; give --workers another one")
    if before and before != workers:
        raise ConfigError(f"{data} holds the sessions of {before} workers: give --workers {before}")


class Front:
    """Serves a gateway of several processes. Use it as an async context manager, once."""

    def __init__(
        self,
        *,
        settings: GatewaySettings,
        data: Path,
        workers: int,
        command: Sequence[str],
        told: Callable[[int, Front], bytes],
    ) -> None:
        """`command` starts a worker; `told(number, front)` is what the one of that number reads."""
        self._settings = settings
        self._data = data
        self._command = command
        self._told = told
        self._count = workers
        self._places = Places(workers)
        self.workers: list[Worker] = []
        self._policy: JSON = {}
        """What was set, for a worker that is started again."""
        self._replicas: list[tuple[str, str, bytes]] = []
        """Requests that changed the replicas, likewise."""
        self._routes: dict[tuple[str, ...], Route] = {
            ("GET", "health"): self._health,
            ("HEAD", "health"): self._health,
            ("GET", "metrics"): self._metrics,
            ("GET", "sessions"): self._list,
            ("POST", "sessions"): self._open,
            ("DELETE", "sessions", "{id}"): self._delete,
            ("GET", "policy"): self._show_policy,
            ("POST", "policy"): self._set_policy,
            ("GET", "replicas"): self._change_replicas,
            ("POST", "replicas"): self._change_replicas,
            ("DELETE", "replicas"): self._change_replicas,
        }
        self._stack = AsyncExitStack()
        self.url = ""
        """`http://host:port` of the data routes, as harnesses reach it; known when entered."""
        self.own_url = ""
        """The same as this machine reaches it."""
        self.control_url = ""
        self.control_token = ""

    # ---- life

    async def __aenter__(self) -> Self:
        """Start the workers and listen. `ConfigError`, or what keeps a worker from starting."""
        check_folder(self._data, self._count)
        settings = self._settings
        async with AsyncExitStack() as stack:
            self._asker = await stack.enter_async_context(Forwarder(keep=True))
            self._again = await stack.enter_async_context(Forwarder(keep=False))
            listening = listen(settings.host, settings.port)
            stack.callback(listening.close)
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            self.own_url = f"http://{host}:{listening.getsockname()[1]}"
            self.url = (settings.public_url or self.own_url).rstrip("/")
            self.control_token = control_token(settings)
            self._nursery = await stack.enter_async_context(Nursery(_log_lost))
            stack.push_async_callback(self._stop_workers)
            await self._start_workers()
            self._listener = await stack.enter_async_context(self._inner(self._on_data, None))
            self.control_url = self.own_url
            if settings.control_port is not None:
                inner = self._inner(self._on_control, settings.control_port)
                self.control_url = (await stack.enter_async_context(inner)).url
            timeout_s = settings.head_timeout_s
            door = Door(listening, self._to_its_owner, head_timeout_s=timeout_s)
            stack.callback(door.close)
            door.open()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all workers; nothing is left behind."""
        await self._stack.aclose()

    def _inner(self, handler: Callable[[web.BaseRequest], Any], port: int | None) -> Listener:
        """A listener; without a port, one for connections that come through the door."""
        return Listener(
            handler,
            host=self._settings.host,
            port=port,
            max_body_bytes=self._settings.max_body_bytes,
            head_timeout_s=self._settings.head_timeout_s,
        )

    async def _start_workers(self) -> None:
        for number in range(self._count):
            told = self._told(number, self)
            self.workers.append(Worker(f"worker-{number}", self._command, told))
        async with asyncio.TaskGroup() as group:
            begun = [group.create_task(_begun(worker)) for worker in self.workers]
        if errors := [error for task in begun if (error := task.result()) is not None]:
            raise errors[0]
        for number, worker in enumerate(self.workers):
            with SqliteReader(worker_folder(self._data, number) / CAPTURE) as reader:
                self._places.read(number, reader)
            self._nursery.start(worker.keep(self._prepare), name=worker.name)

    async def _stop_workers(self) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in self.workers:
                group.create_task(worker.stop())

    async def _prepare(self, worker: Worker) -> None:
        """Tell a worker that was started again what the others were told."""
        for method, path, body in self._replicas:
            await self._told_again(worker, method, path, body)
        if self._policy:
            await self._told_again(worker, "POST", "/policy", orjson.dumps(self._policy))

    async def _told_again(self, worker: Worker, method: str, path: str, body: bytes) -> None:
        bearer = f"Bearer {self.control_token}"
        status, said = await self._asker.ask(method, worker.url + path, body=body, token=bearer)
        if status != 200:
            log.warning("worker_refused", worker=worker.name, path=path, said=said.decode())

    # ---- data

    def _to_its_owner(self, head: bytes, connection: socket.socket) -> None:
        """Whose a connection is, by its first request."""
        owner = self._places.owner(head)
        if owner is None:
            self._nursery.start(self._listener.adopt(connection), name="adopt")
        else:
            self.workers[owner].giver.give(connection)

    async def _on_data(self, http: web.BaseRequest) -> web.StreamResponse:
        """A request on a connection that began with a control request."""
        target = split_target(http.raw_path)
        if not target.is_control:  # a connection of its own finds the worker
            return await self._again.forward(http, self.own_url)
        if self._settings.control_port is not None and target.path != "/health":
            wire = DIALECTS[caller(target.path, {})]
            error = RequestError(f"no such route: {http.method}", status=404, code="not_found")
            return refusal(wire, error)
        return await self._control(http, target)

    async def _on_control(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._control(http, split_target(http.raw_path))

    # ---- control

    async def _control(self, http: web.BaseRequest, target: Target) -> web.StreamResponse:
        """Answer those who run sessions; who may is the workers' to say."""
        words = target.path.strip("/").split("/")
        pattern = (http.method, *words[:1], *("{id}" for _ in words[1:2]), *words[2:])
        answer = self._routes.get(pattern, self._pass_on)
        try:
            return await answer(http, words)
        except TimeoutError:
            return _error(503, "a worker of this gateway is being started again")
        except (aiohttp.ClientError, OSError):
            return _error(503, "a worker of this gateway died; ask again")

    async def _pass_on(self, http: web.BaseRequest, words: Sequence[str]) -> web.Response:
        """What concerns one session, and what nobody knows: the answer of a worker."""
        number = self._places.of(words[1]) if len(words) > 1 and words[0] == "sessions" else None
        return _sent(await self._ask(self.workers[number or 0], http))

    async def _ask(
        self, worker: Worker, http: web.BaseRequest, body: bytes | None = None
    ) -> Answer:
        """What a worker answers to a control request, with another `body` if one is given."""
        await worker.wait_until_ready()
        if body is None and http.body_exists:
            body = await http.read()
        token = http.headers.get("Authorization", "")
        return await self._asker.ask(
            http.method, worker.url + http.raw_path, body=body, token=token
        )

    async def _ask_all(
        self, http: web.BaseRequest, body: bytes | None = None, *, but: int = 0
    ) -> list[Answer]:
        """What all workers but the first `but` answer, in their order."""
        if http.body_exists:
            await http.read()  # once for all of them
        try:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(self._ask(worker, http, body))
                    for worker in self.workers[but:]
                ]
        except* (OSError, aiohttp.ClientError) as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asked]

    async def _health(self, http: web.BaseRequest, _: Sequence[str]) -> web.Response:
        if not all(worker.ready for worker in self.workers):
            down = [worker.name for worker in self.workers if not worker.ready]
            told = {"status": "worker_unavailable", "detail": ", ".join(down)}
            return json_response(orjson.dumps(told), 503)
        answers = await self._ask_all(http)
        return _sent(_failure(answers) or answers[0])

    async def _metrics(self, http: web.BaseRequest, _: Sequence[str]) -> web.Response:
        answers = await self._ask_all(http)
        if failed := _failure(answers):
            return _sent(failed)
        up = sum(worker.ready for worker in self.workers)
        restarts = sum(worker.restarts for worker in self.workers)
        more = [
            ("bridle_workers", "Processes of this gateway that serve.", "gauge", up),
            ("bridle_worker_restarts_total", "Workers started again.", "counter", restarts),
        ]
        text = merged_metrics([body.decode() for _, body in answers], more)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=text.encode(), headers={"Content-Type": kind})

    async def _list(self, http: web.BaseRequest, _: Sequence[str]) -> web.Response:
        answers = await self._ask_all(http)
        told = [
            session for _, body in answers for session in orjson.loads(body).get("sessions", ())
        ]
        return _sent(_failure(answers) or (200, orjson.dumps({"sessions": told})))

    async def _open(self, http: web.BaseRequest, _: Sequence[str]) -> web.Response:
        """Open a session where the fewest live."""
        body = await http.read()
        wanted = _object(body).get("session_id")
        named = wanted if isinstance(wanted, str) else None
        known = None if named is None else self._places.of(named)
        if known is not None:
            return _sent(await self._ask(self.workers[known], http, body))  # it refuses
        up = [number for number in range(self._count) if self.workers[number].ready]
        place = min(up or range(self._count), key=self._places.load)
        if named is not None:
            self._places.reserve(named, place)
        status = 0
        try:
            status, answer = await self._ask(self.workers[place], http, body)
        finally:
            if named is not None and status != 200:
                self._places.forget(named)
        if status == 200:
            opened = orjson.loads(answer)
            self._places.add(opened["session_id"], key_digest(opened["key"]), place)
        return _sent((status, answer))

    async def _delete(self, http: web.BaseRequest, words: Sequence[str]) -> web.Response:
        session_id = words[1]
        worker = self.workers[self._places.of(session_id) or 0]
        status, answer = await self._ask(worker, http)
        if status == 200:
            self._places.ended(session_id)
        return _sent((status, answer))

    async def _show_policy(self, http: web.BaseRequest, _: Sequence[str]) -> web.Response:
        answers = await self._ask_all(http)
        return _sent(_failure(answers) or (200, _newest(answers)))

    async def _set_policy(self, http: web.BaseRequest, _: Sequence[str]) -> web.Response:
        """Set on all workers, or on none of them."""
        wanted = _object(await http.read())
        if wanted.get("weights") is not None:
            return _sent(await self._load_weights(http, wanted))
        async with AsyncExitStack() as undo:
            if wanted.get("hold"):
                undo.push_async_callback(self._let_go, http)
            answers = await self._ask_all(http)
            if failed := _failure(answers):
                return _sent(failed)
            undo.pop_all()
        self._note_policy(wanted)
        return _sent((200, _newest(answers)))

    async def _load_weights(self, http: web.BaseRequest, wanted: JSON) -> Answer:
        """Have the first worker load them while the others let nothing be sampled."""
        if wanted.get("rolling"):
            return 400, b'{"error":{"message":"rolling: not with several workers"}}'
        limits = {"timeout_s": wanted["timeout_s"]} if "timeout_s" in wanted else {}
        hold = {"hold": wanted.get("mode", "abort"), **limits}
        goes_on: JSON = {"hold": False}
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._let_go, http, goes_on, but=1)
            held = await self._ask_all(http, orjson.dumps(hold), but=1)
            if failed := _failure(held):
                return failed
            answer = await self._ask(self.workers[0], http)
            if answer[0] == 200:
                goes_on["version"] = wanted["version"]
                self._note_policy({"version": wanted["version"]})
        return answer

    async def _let_go(
        self, http: web.BaseRequest, goes_on: JSON | None = None, *, but: int = 0
    ) -> None:
        """End a hold wherever it is; a worker that is gone holds nothing."""
        body = orjson.dumps(goes_on or {"hold": False})
        for worker in self.workers[but:]:
            if worker.ready:
                with contextlib.suppress(OSError, aiohttp.ClientError):
                    await self._ask(worker, http, body)

    def _note_policy(self, wanted: JSON) -> None:
        given = {name: wanted[name] for name in ("version", "paused", "hold") if name in wanted}
        self._policy.update((name, value) for name, value in given.items() if value is not None)

    async def _change_replicas(self, http: web.BaseRequest, _: Sequence[str]) -> web.Response:
        body = await http.read()
        answers = await self._ask_all(http)
        if failed := _failure(answers):
            return _sent(failed)
        if http.method != "GET":
            self._replicas.append((http.method, http.raw_path, body))
        told = [orjson.loads(answer)["replicas"] for _, answer in answers]
        return _sent((200, orjson.dumps({"replicas": merged_replicas(told)})))


async def _begun(worker: Worker) -> BridleError | None:
    """Start a worker; the error if it did not, for the others are to be ended in good order."""
    try:
        await worker.start()
    except BridleError as error:
        return error
    return None


def _object(body: bytes) -> JSON:
    """A body's JSON object; empty where it is none, which the worker refuses."""
    try:
        told = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return told if isinstance(told, dict) else {}


def _failure(answers: Sequence[Answer]) -> Answer | None:
    return next((answer for answer in answers if answer[0] != 200), None)


def _newest(answers: Sequence[Answer]) -> bytes:
    """The policy as all have it; its version is the newest that one of them has seen."""
    told = [orjson.loads(body) for _, body in answers]
    return orjson.dumps({**told[0], "version": max(one["version"] for one in told)})


def _sent(answer: Answer) -> web.Response:
    status, body = answer
    return web.Response(status=status, body=body, headers={"Content-Type": JSON_TYPE})


def _error(status: int, message: str) -> web.Response:
    return json_response(orjson.dumps({"error": {"message": message}}), status)


def _log_lost(error: BaseException) -> None:
    log.error("front_task_failed", error=f"{type(error).__name__}: {error}")

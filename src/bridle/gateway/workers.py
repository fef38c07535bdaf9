"""A gateway of several processes: `Supervisor` runs the workers and answers the control routes.

Each worker is a whole gateway with a data port, a store (`DATA/worker-K`) and engine connections of
its own. The supervisor opens the workers' listening sockets and the workers inherit them, so a
worker that is started again has the same port, and clients that connect meanwhile wait in the
socket's backlog. The supervisor takes no part in model calls: it forwards a control request to the
worker of the session, or to all workers, and merges their answers.

`Worker` starts a worker's process, restarts it when it dies, and stops it. The process reads its
settings from standard input as one line of JSON and reports on standard output that it serves, or
why it cannot. It stops when its standard input is closed, which also happens when the supervisor is
killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeAlias
from urllib.parse import parse_qs, quote, unquote

import aiohttp
import orjson
import structlog
from aiohttp import web
from pydantic import ValidationError
from yarl import URL

from bridle.aio import Nursery, Stacked, run_shielded
from bridle.capture.sqlite import SqliteReader
from bridle.dialects import DIALECTS, recognise
from bridle.dialects.base import caller
from bridle.engines.base import is_adapter
from bridle.errors import (
    BridleError,
    ConfigError,
    EngineError,
    RenderError,
    RequestError,
    StoreError,
)
from bridle.folders import FolderLock, private_folder
from bridle.gateway.control import Refusal, TokenCheck, control_token, read_body
from bridle.gateway.listener import Handler, Listener, listen
from bridle.gateway.metrics import merged_metrics
from bridle.gateway.registry import STORED_AS, new_session_id
from bridle.gateway.relay import json_response, refusal
from bridle.gateway.routing import split_target
from bridle.gateway.settings import GatewaySettings
from bridle.gateway.weights import SetEngine, engines_json
from bridle.types import JSON

log = structlog.get_logger()

CAPTURE: Final = "capture.sqlite"

READY_S: Final = 30.0
"""Longest wait of a control request for a worker that is being restarted."""

MISDIRECTED: Final = (
    "this port of a gateway with several workers serves no model calls; "
    "send them to the base_url that POST /sessions returned"
)

Answer: TypeAlias = tuple[int, bytes]
"""Status and body of a response; JSON but for metrics."""


def worker_folder(data: Path, number: int) -> Path:
    return data / f"worker-{number}"


def check_folder(data: Path, workers: int) -> None:
    """Raise `ConfigError` if `data` holds the sessions of another number of workers."""
    found = [path.parent.name for path in data.glob(f"worker-*/{CAPTURE}")]
    before = 1 + max((int(n[7:]) for n in found if re.fullmatch(r"worker-\d+", n)), default=-1)
    if (data / CAPTURE).exists() and workers > 1:
        raise ConfigError(
            f"{data} holds the sessions of a gateway of one process: name another folder by "
            "--data, or give --workers 1"
        )
    if before and before != workers:
        raise ConfigError(
            f"{data} holds the sessions of {before} workers: give --workers {before}, or name "
            "another folder by --data"
        )


class Supervisor(Stacked):
    """A gateway of several worker processes. Use it as an async context manager, once."""

    def __init__(
        self,
        *,
        settings: GatewaySettings,
        data: Path,
        workers: int,
        command: Sequence[str],
        spec: JSON,
    ) -> None:
        """`command` starts a worker, which reads `spec` and what is its own (`_spec_of`)."""
        super().__init__()
        self._settings = settings
        self._data = data
        self._count = workers
        self._command = command
        self._spec = spec
        self._worker_of: dict[str, Worker] = {}
        """The worker of every session, ended ones included."""
        self._policy: JSON = {}
        """`version`, `paused` and `hold` as they were set, for workers that are restarted."""
        self._steering = asyncio.Lock()
        """Held while one request changes them on the workers."""
        self._replicas: list[tuple[str, str]] = []
        """Changes of the replicas ("add", engine) or ("remove", name), for the same."""
        self.workers: list[Worker] = []
        self.url = ""
        """`http://host:port` of the settings' `port`, which serves the control routes, or only
        `/health` if the settings have a `control_port`. Known when entered, as what follows."""
        self.control_url = ""
        self.control_token = ""
        self.ports: list[int] = []
        """The workers' data ports."""

    # ---- lifecycle

    async def __aenter__(self) -> Self:
        """Start the workers and listen. `ConfigError`, or the error of a worker's start."""
        settings = self._settings
        check_folder(self._data, self._count)
        if settings.public_url is not None and "{port}" not in settings.public_url:
            raise ConfigError(
                f"public_url {settings.public_url!r} must contain {{port}}: each worker has a port"
                " of its own"
            )
        self.control_token = control_token(settings)
        self._check_token = TokenCheck(self.control_token)
        async with AsyncExitStack() as stack:
            stack.enter_context(FolderLock(self._data))
            entry = stack.enter_context(listen(settings.host, settings.port))
            control = None
            if settings.control_port is not None:
                control = stack.enter_context(listen(settings.host, settings.control_port))
            self._add_workers(stack)
            headers = {"Authorization": f"Bearer {self.control_token}"}
            limits = aiohttp.ClientTimeout(total=None)
            client = aiohttp.ClientSession(headers=headers, timeout=limits)
            self._http = await stack.enter_async_context(client)
            stack.push_async_callback(self._stop_workers)
            nursery = await stack.enter_async_context(Nursery(_log_lost))
            await self._start_workers(nursery)
            self.url = await self._listen(stack, self._on_entry, entry)
            self.control_url = self.url
            if control is not None:
                self.control_url = await self._listen(stack, self._on_control, control)
            self._stack = stack.pop_all()
        return self

    async def _listen(
        self, stack: AsyncExitStack, handler: Handler, listening: socket.socket
    ) -> str:
        listener = Listener(
            handler,
            host=self._settings.host,
            port=0,
            listening=listening,
            max_body_bytes=self._settings.max_body_bytes,
            head_timeout_s=self._settings.head_timeout_s,
        )
        return (await stack.enter_async_context(listener)).url

    def _add_workers(self, stack: AsyncExitStack) -> None:
        """Open the sockets of all workers: data at the ports after ours, control on loopback."""
        settings = self._settings
        for number in range(self._count):
            port = settings.port and settings.port + 1 + number
            data = stack.enter_context(listen(settings.host, port))
            control = stack.enter_context(listen("127.0.0.1", 0))
            private_folder(worker_folder(self._data, number))
            spec = partial(self._spec_of, number)
            sockets = (data, control)
            worker = Worker(f"worker-{number}", command=self._command, spec=spec, sockets=sockets)
            self.workers.append(worker)
            self.ports.append(_port(data))

    def _spec_of(self, number: int) -> JSON:
        """Return what a worker reads at its start: its settings, and the policy and the changes of
        replicas that the others have by now.
        """
        gateway = {
            "port": self.ports[number],
            "control_port": _port(self.workers[number].sockets[1]),
            "control_token": self.control_token,
            "data_dir": str(worker_folder(self._data, number)),
        }
        steered = {"policy": self._policy, "replicas": self._replicas}
        return {**self._spec, "gateway": gateway, **steered}

    async def _start_workers(self, nursery: Nursery) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(worker.start())
        except* BridleError as errors:
            raise errors.exceptions[0] from None
        for number, worker in enumerate(self.workers):
            self._read_sessions(worker, worker_folder(self._data, number) / CAPTURE)
            nursery.start(worker.keep_running(), name=worker.name)

    def _read_sessions(self, worker: Worker, capture: Path) -> None:
        """Find the sessions that the worker's store has from earlier processes."""
        with SqliteReader(capture) as reader:
            for record in reader.sessions():
                if STORED_AS in record.metadata:
                    self._worker_of[record.session_id] = worker
                    if reader.outcome(record.session_id) is None:
                        worker.live.add(record.session_id)

    async def _stop_workers(self) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in self.workers:
                group.create_task(worker.stop())

    # ---- requests

    async def _on_entry(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer control routes and refuse all others in the shape of the client's provider."""
        target = split_target(http.raw_path)
        split = self._settings.control_port is not None
        if target.is_control and (not split or target.path == "/health"):
            return await self._on_control(http)
        headers = {name.lower(): value for name, value in http.headers.items()}
        route = recognise(http.method, target.path, target.query, headers)
        if route is None:
            message = (
                f"the gateway has no such route for {http.method} requests; check the base URL"
            )
            error = RequestError(message, status=404, code="not_found")
            return refusal(DIALECTS[caller(target.path, headers)], error)
        return refusal(DIALECTS[route.dialect], RequestError(MISDIRECTED, status=421))

    async def _on_control(self, http: web.BaseRequest) -> web.StreamResponse:
        target = split_target(http.raw_path)
        words = target.path.strip("/").split("/")
        try:
            if words == ["health"] and http.method in {"GET", "HEAD"}:
                return _response(await self._health())
            self._check_token(http)
            body = await read_body(http)
        except Refusal as refused:
            return refused.response()
        path = quote(target.path) + (f"?{target.query}" if target.query else "")
        answer = await self._answer(http.method, words, path, body)
        if words == ["metrics"] and answer[0] == 200:
            kind = "text/plain; version=0.0.4; charset=utf-8"
            return web.Response(body=answer[1], headers={"Content-Type": kind})
        return _response(answer)

    async def _answer(  # noqa: C901, PLR0911 - one per route
        self, method: str, words: Sequence[str], path: str, body: bytes
    ) -> Answer:
        match (method, *words):
            case "GET", "metrics":
                return await self._metrics()
            case "GET", "sessions":
                return await self._list()
            case "POST", "sessions":
                return await self._open(body)
            case _, "sessions", session_id, *_:
                worker = self._worker_of.get(session_id, self.workers[0])
                answer = await self._ask(worker, method, path, body)
                if method == "DELETE" and answer[0] == 200:
                    worker.live.discard(session_id)
                return answer
            case "GET", "policy":
                answers = await self._ask_all("GET", path)
                return _failure(answers) or _newest(answers)
            case "POST", "policy":
                async with self._steering:
                    return await self._set_policy(body)
            case "GET", ("engines" | "replicas") as route:
                return await self._show_replicas(route)
            case "POST", "engines", *_:
                return await self._steer_engine(path, body)
            case (("POST" | "DELETE"), "replicas"):
                return await self._change_replicas(method, path, body)
        return await self._ask(self.workers[0], method, path, body)  # refused there

    async def _ask(self, worker: Worker, method: str, path: str, body: bytes = b"") -> Answer:
        """Send a control request to one worker; 503 if it does not answer."""
        url = URL(f"http://127.0.0.1:{_port(worker.sockets[1])}{path}", encoded=True)
        try:
            async with asyncio.timeout(READY_S):
                await worker.ready.wait()
            async with self._http.request(method, url, data=body) as reply:
                return reply.status, await reply.read()
        except TimeoutError:
            return _refused(503, f"{worker.name} of this gateway is being restarted; ask again")
        except (aiohttp.ClientError, OSError):
            return _refused(503, f"{worker.name} of this gateway died; ask again")

    async def _ask_all(
        self, method: str, path: str, body: bytes = b"", *, skip: int = 0
    ) -> list[Answer]:
        """Send a control request to all workers but the first `skip`; answers in their order."""
        async with asyncio.TaskGroup() as group:
            asks = [self._ask(worker, method, path, body) for worker in self.workers[skip:]]
            tasks = [group.create_task(ask) for ask in asks]
        return [task.result() for task in tasks]

    async def _health(self) -> Answer:
        if down := [worker.name for worker in self.workers if not worker.ready.is_set()]:
            body = {"status": "worker_unavailable", "detail": ", ".join(down)}
            return 503, orjson.dumps(body)
        answers = await self._ask_all("GET", "/health")
        return _failure(answers) or answers[0]

    async def _metrics(self) -> Answer:
        answers = await self._ask_all("GET", "/metrics")
        if failed := _failure(answers):
            return failed
        ready = sum(worker.ready.is_set() for worker in self.workers)
        restarts = sum(worker.restarts for worker in self.workers)
        own = [
            ("bridle_workers", "Processes of this gateway that serve.", "gauge", ready),
            ("bridle_worker_restarts_total", "Workers started again.", "counter", restarts),
        ]
        return 200, merged_metrics([body.decode() for _, body in answers], own).encode()

    # ---- sessions

    async def _list(self) -> Answer:
        """Return all sessions of all workers, asked page by page."""
        sessions: list[JSON] = []
        for worker in self.workers:
            after: int | None = 0
            while after is not None:
                path = f"/sessions?after={after}" if after else "/sessions"
                answer = await self._ask(worker, "GET", path)
                if answer[0] != 200:
                    return answer
                page = orjson.loads(answer[1])
                sessions += page["sessions"]
                after = page.get("next")
        return 200, orjson.dumps({"sessions": sessions, "next": None})

    async def _open(self, body: bytes) -> Answer:
        """Open a session on the worker with the fewest live ones."""
        wanted = _object(body)
        session_id = None if wanted is None else wanted.get("session_id") or new_session_id()
        if wanted is None or not isinstance(session_id, str):
            return await self._ask(self.workers[0], "POST", "/sessions", body)  # refused there
        body = orjson.dumps(wanted | {"session_id": session_id})
        known = self._worker_of.get(session_id)
        if known is not None:
            return await self._ask(known, "POST", "/sessions", body)  # refused, or opened late
        ready = [one for one in self.workers if one.ready.is_set()]
        worker = min(ready or self.workers, key=lambda one: len(one.live))
        self._worker_of[session_id] = worker
        worker.live.add(session_id)
        answer = await self._ask(worker, "POST", "/sessions", body)
        if answer[0] != 200:
            worker.live.discard(session_id)
            if answer[0] != 503:  # a worker that died may have opened it
                del self._worker_of[session_id]
        return answer

    # ---- policy and replicas

    async def _set_policy(self, body: bytes) -> Answer:
        """Set it on all workers; a hold that one of them refuses ends on all."""
        wanted = _object(body)
        if wanted is None:
            return await self._ask(self.workers[0], "POST", "/policy", body)  # refused there
        # An adapter goes to each worker: calls name those that their own process has loaded.
        if wanted.get("weights") is not None and not is_adapter(str(wanted["weights"])):
            if wanted.get("released") is None:
                return await self._load_weights(wanted)
            first = await self._ask(self.workers[0], "POST", "/policy", body)
            if first[0] != 200:
                return first
            body = orjson.dumps({**wanted, "weights": None})  # they are in place for the others
        before = self._policy
        given = {name: wanted.get(name) for name in ("version", "paused", "hold")}
        self._policy = before | {name: one for name, one in given.items() if one is not None}
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._take_back, before, hold=bool(wanted.get("hold")))
            answers = await self._ask_all("POST", "/policy", body)
            if failed := _failure(answers):
                return failed
            undo.pop_all()
        return _newest(answers)

    async def _steer_engine(self, path: str, body: bytes) -> Answer:
        """Release or resume an engine on all workers, and list the engines."""
        try:
            wanted = SetEngine.model_validate_json(body or b"{}")
            policy = wanted.policy(unquote(path.removeprefix("/engines/")))
        except ValidationError:
            return await self._ask(self.workers[0], "POST", path, body)  # refused there
        changes = policy.model_dump(mode="json", exclude_none=True)
        async with self._steering:
            answer = await self._set_policy(orjson.dumps(changes))
        return answer if answer[0] != 200 else await self._show_replicas("engines")

    async def _take_back(self, before: JSON, *, hold: bool) -> None:
        self._policy = before
        if hold:
            await self._settle({"hold": False})

    async def _load_weights(self, wanted: JSON) -> Answer:
        """Have the first worker load the weights while the others hold."""
        if wanted.get("rolling"):
            return _refused(400, "rolling: not with several workers")
        before = self._policy
        mode = before.get("hold") or wanted.get("mode", "abort")
        after: JSON = {} if before.get("hold") else {"hold": False}  # an earlier hold stays
        limits = {"timeout_s": wanted["timeout_s"]} if "timeout_s" in wanted else {}
        self._policy = before | {"hold": mode}
        try:
            hold = orjson.dumps({"hold": mode, **limits})
            if failed := _failure(await self._ask_all("POST", "/policy", hold, skip=1)):
                return failed
            body = orjson.dumps(wanted)
            answer = await self._ask(self.workers[0], "POST", "/policy", body)
            if answer[0] == 200:
                given = ("version", "paused")
                after |= {name: wanted[name] for name in given if wanted.get(name) is not None}
            return answer
        finally:
            self._policy = before | after
            await self._settle(after)

    async def _settle(self, policy: JSON) -> None:
        """Set a policy on every worker that serves; a restarting one reads it when it starts."""
        for worker in self.workers if policy else ():
            if worker.ready.is_set():
                await self._ask(worker, "POST", "/policy", orjson.dumps(policy))

    async def _change_replicas(self, method: str, path: str, body: bytes) -> Answer:
        """Make a change on all workers. One that some of them made and others missed can be
        repeated: the former refuse it then.
        """
        answers = await self._ask_all(method, path, body)
        made = any(status == 200 for status, _ in answers)
        if failed := _failure([one for one in answers if not made or one[0] != 400]):
            return failed
        if method == "POST":
            self._replicas.append(("add", orjson.loads(body)["engine"]))
        else:
            query = parse_qs(path.partition("?")[2])
            self._replicas.append(("remove", query["name"][-1]))
        return await self._show_replicas("replicas")

    async def _show_replicas(self, route: str) -> Answer:
        """Return the answer of `GET /replicas` or `GET /engines`."""
        answers = await self._ask_all("GET", "/replicas")
        if failed := _failure(answers):
            return failed
        replicas = merged_replicas([orjson.loads(answer)["replicas"] for _, answer in answers])
        return 200, orjson.dumps(
            {route: engines_json(replicas) if route == "engines" else replicas}
        )


_SUMMED: Final = (
    "calls_in_flight",
    "sessions",
    "calls",
    "failures",
    "losses",
    "prompt_tokens",
    "cached_tokens",
)
"""Fields of a replica that are summed over the workers."""


def merged_replicas(listed: Sequence[Sequence[JSON]]) -> list[JSON]:
    """Return the workers' lists of replicas as one: counts are added up, a worker's error
    is kept.
    """
    merged: dict[str, JSON] = {}
    for one in (replica for replicas in listed for replica in replicas):
        before = merged.get(one["name"])
        if before is None:
            merged[one["name"]] = one
            continue
        worse = one if before["state"] == "live" else before
        sums = {name: before[name] + one[name] for name in _SUMMED}
        version = max(before["version"], one["version"])
        merged[one["name"]] = {**worse, **sums, "version": version}
    return list(merged.values())


def _port(listening: socket.socket) -> int:
    port: int = listening.getsockname()[1]
    return port


def _object(body: bytes) -> JSON | None:
    """Return the JSON object of a body, `{}` of an empty one; `None` if it is not an object."""
    try:
        read = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        return None
    return read if isinstance(read, dict) else None


def _failure(answers: Sequence[Answer]) -> Answer | None:
    return next((answer for answer in answers if answer[0] != 200), None)


def _newest(answers: Sequence[Answer]) -> Answer:
    """Return the policy of all workers, with the newest version that one of them knows."""
    policies = [orjson.loads(body) for _, body in answers]
    version = max(one["version"] for one in policies)
    return 200, orjson.dumps({**policies[0], "version": version})


def _refused(status: int, message: str) -> Answer:
    return status, orjson.dumps({"error": {"message": message}})


def _response(answer: Answer) -> web.Response:
    return json_response(answer[1], answer[0])


def _log_lost(error: BaseException) -> None:
    log.error("supervisor_task_failed", error=f"{type(error).__name__}: {error}")


START_ERRORS: Final[dict[str, type[BridleError]]] = {
    kind.__name__: kind for kind in (ConfigError, EngineError, RenderError, StoreError)
}
"""Errors that a worker reports by name when it cannot start; others become `BridleError`."""

SPAWN_S: Final = 30.0
"""Time limit for creating a process."""

END_S: Final = 20.0
"""Time that a worker gets to stop before it is killed."""

BACKOFF_S: Final = 0.1
"""Wait after the first failed restart; doubles up to `MAX_BACKOFF_S`."""

MAX_BACKOFF_S: Final = 30.0


class Worker:
    """A worker process and the sessions it serves."""

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str],
        spec: Callable[[], JSON],
        sockets: Sequence[socket.socket],
    ) -> None:
        """Keep the settings, start nothing. Each start asks `spec` for what the process reads."""
        self.name = name
        self.sockets = sockets
        """Listening sockets that the process inherits; the caller closes them."""
        self.ready = asyncio.Event()
        """Set while the process serves."""
        self.live: set[str] = set()
        """Ids of its sessions that have not ended."""
        self.restarts = 0
        self.pid: int | None = None
        """Id of the newest process; `None` before the first start."""
        self._command = command
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the worker's process and return when it serves.

        Raises the `BridleError` that the process reports if it cannot start.
        """
        try:
            # Shielded, so that a cancellation leaves no unknown process behind.
            process = await run_shielded(self._spawn(), timeout_s=SPAWN_S)
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(ConnectionError):
                process.stdin.write(orjson.dumps(self._spec()) + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                raise BridleError(
                    f"the gateway's process {self.name!r} ended before it could serve"
                )
            if "error" in (said := orjson.loads(line)):
                raise START_ERRORS.get(said["kind"], BridleError)(said["error"])
        except BaseException:
            await self.stop()
            raise
        self.ready.set()

    async def _spawn(self) -> asyncio.subprocess.Process:
        numbers = [one.fileno() for one in self.sockets]
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *map(str, numbers),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=numbers,
            start_new_session=True,  # Ctrl-C reaches the supervisor only
        )
        self.pid = self._process.pid
        return self._process

    async def keep_running(self) -> None:
        """Restart the worker's process whenever it ends, until cancelled."""
        failures = 0
        while True:
            if self._process is not None:
                code = await self._process.wait()
                self.ready.clear()
                log.warning("worker_died", worker=self.name, code=code)
            if failures:
                await asyncio.sleep(min(BACKOFF_S * 2 ** (failures - 1), MAX_BACKOFF_S))
            self.restarts += 1
            try:
                await self.start()
                failures = 0
            except (BridleError, OSError) as error:
                failures = min(failures + 1, 10)
                log.error("worker_did_not_start", worker=self.name, error=str(error))  # noqa: TRY400 - the text says all

    async def stop(self) -> None:
        """Ask the worker's process to stop, and kill it if it has not after `END_S`; idempotent.

        `keep_running` is to be cancelled before.
        """
        self.ready.clear()
        await run_shielded(self._end(), timeout_s=2 * END_S)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            log.warning("worker_killed", worker=self.name)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

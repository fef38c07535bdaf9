"""The routes of Polar's clients, and the translation of its `TaskRequest` to a `Submission`.

Polar's routes for its nodes (registration, heartbeats, their callbacks) are not served. A field
that has no equivalent is refused by its name. The default builder is `per_request`, as in Polar.

Source: Polar's rollout server as its clients use it (fields and defaults noted November 2026).
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from pydantic import Field, ValidationError
from starlette.responses import Response, StreamingResponse

from bridle import __version__
from bridle.config import (
    Action,
    AgentSpec,
    Budgets,
    BuilderSpec,
    EvaluatorSpec,
    Limits,
    SamplingPolicy,
    Settings,
    Task,
)
from bridle.datasets.swe import GRADED, decode_field, swe_task
from bridle.errors import ConfigError, StateError, StoreError, root_cause
from bridle.server.http import ApiError, ApiRequest, RouteTable, TokenRole, reply, validation_error
from bridle.server.queries import is_final, polar_task, task_status
from bridle.server.routes_v1 import check, list_sessions, page_json, submit, task_row
from bridle.server.schemas import (
    GroupOptions,
    PageQuery,
    PolarCancelQuery,
    PolarTaskQuery,
    SamplesQuery,
    Submission,
)
from bridle.server.settings import SubmissionPolicy
from bridle.trajectory.result import encode
from bridle.types import JSON, Kind, one_line

HARNESSES = {"openhands_sdk": "openhands", "shell": "command"}
"""Polar's names of harnesses -> Bridle's, where they differ."""

EVALUATORS = {"swebench_harness": "swebench", "swegym_git_diff": "swebench"}

AGENT_KEYS: Mapping[str, Mapping[str, str]] = {
    "codex": {
        "reasoning_effort": "config.model_reasoning_effort",
        "reasoning_summary": "config.model_reasoning_summary",
    },
    "mini_swe_agent": {
        "step_limit": "config.agent.step_limit",
        "cost_limit": "config.agent.cost_limit",
        "model_kwargs": "config.model.model_kwargs",
    },
}
"""Polar's settings of a harness -> their paths in Bridle's."""

EVALUATOR_KEYS: Mapping[str, Mapping[str, str]] = {
    "test_on_output": {
        "test_command": "command",
        "expected_output_json": "expected",
        "exclude_patterns": "exclude",
        "test_timeout": "timeout_s",
    },
    "swebench": {"exclude_patterns": "exclude", "test_timeout": "timeout_s"},
    "harbor": {"tests_dir": "tests", "verifier_timeout": "timeout_s"},
}
"""Polar's keys of an evaluator's config -> Bridle's."""

WITHOUT_EFFECT = {"apply_timeout", "upload_attempts", "upload_retry_backoff_seconds"}
"""Keys that are ignored: patches and folders are uploaded within the task's own budget."""

FIXED = {
    "tests_target": "/tests",
    "verifier_dir": "/logs/verifier",
    "test_command": "bash /tests/test.sh",
}
"""Keys of Polar's `harbor` that may only have their defaults."""

JUDGED = (
    "'harbor_rubric' asks a judge at an address of the task's, and only engines that the operator "
    'names are asked here: [models."{model}"] engines = ["openai:{url}#{model}"]; then send '
    "strategy 'composite' with the parts 'harbor' and 'judge' (model '{model}', mode 'process', "
    "low -5, high 5, and the text of rubric.md as its rubric)"
)

TAKES_ALL = re.compile(r"\bgit add -A\b.*\bgit diff --cached\b", re.DOTALL)
"""A `patch_command` that takes all changes with new files, as Bridle always does."""

AGENT_S = 600.0
"""Polar's default of `timeout_seconds`."""


class PolarRuntime(Settings):
    """Polar's `RuntimeSpec`."""

    backend: str = "docker"
    image: str | None = None
    prepare: tuple[Action, ...] = ()
    eval_prepare: tuple[Action, ...] | None = None
    env: dict[str, str] = Field(default_factory=dict)
    network: str | None = None
    """Default `gateway_only`; Polar's is `host`."""
    workdir: str | None = None
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=0)
    allow_internet: bool | None = None
    """Network `open` if `network` is not given."""
    internet_volumes: tuple[Any, ...] = ()
    import_path: str | None = None
    kwargs: JSON = Field(default_factory=dict)
    direct_exec_init_command: Any = None


class PolarShell(Settings):
    """Polar's `ExecInput`."""

    command: str = Field(min_length=1)
    cwd: str | None = None
    env: dict[str, str] | None = None


class PolarAgent(AgentSpec):
    """Polar's `AgentSpec`, with Bridle's `version`, `command` and `function`."""

    custom_shell: str | PolarShell | None = None
    """Command of harness `shell`; Bridle also accepts a plain string."""


class PolarEvaluator(EvaluatorSpec):
    """Polar's `EvaluatorSpec`."""

    refresh_runtime: bool = True
    """Ignored: evaluation is separate from the agent unless `trusted` or `shared` is set."""


class PolarTask(GroupOptions):
    """Polar's `TaskRequest`, with Bridle's `sampling`, `limits`, `budgets` and `train`."""

    task_id: str
    instruction: str
    num_samples: int = 1
    timeout_seconds: float = Field(default=AGENT_S, gt=0)
    runtime: PolarRuntime | None = None
    agent: PolarAgent
    builder: BuilderSpec = BuilderSpec(strategy="per_request")
    evaluator: PolarEvaluator | None = None
    metadata: JSON = Field(default_factory=dict)
    sampling: SamplingPolicy = SamplingPolicy()
    limits: Limits = Limits()
    budgets: Budgets = Budgets()
    train: tuple[Kind, ...] = Task.model_fields["train"].default

    def refused(self, permits: SubmissionPolicy) -> Iterator[tuple[str, str]]:
        """Yield every field of a Polar task that Bridle cannot translate, with the reason."""
        runtime = self.runtime or PolarRuntime()
        if runtime.network == "host" and not permits.host_network:
            why = "'host' is not permitted; the operator permits it: permits.host_network = true"
            yield "runtime.network", why
        if runtime.internet_volumes:
            yield "runtime.internet_volumes", "volumes are not permitted; use `kwargs.volumes`"
        if runtime.direct_exec_init_command is not None:
            yield "runtime.direct_exec_init_command", "is not supported; use `prepare`"
        for volume in _listed(runtime.kwargs.get("volumes")):
            if not re.fullmatch(r"/[^:]*:/[^:]*:ro", str(volume)):
                why = f"{volume!r}: volumes are read-only: write /HOST:/INSIDE:ro"
                yield "runtime.kwargs.volumes", why
        if self.agent.custom_shell is not None and self.agent.harness != "shell":
            yield "agent.custom_shell", "goes with harness 'shell'"
        if self.evaluator is not None:
            yield from self._refused_evaluator(self.evaluator)

    def _refused_evaluator(self, evaluator: PolarEvaluator) -> Iterator[tuple[str, str]]:
        config = evaluator.config
        if evaluator.strategy == "harbor_rubric":
            yield (
                "evaluator.strategy",
                JUDGED.format(
                    model=str(config.get("judge_model", "NAME"))[:200],
                    url=str(config.get("judge_base_url", "URL"))[:200],
                ),
            )
        if evaluator.strategy == "harbor":
            for key, only in FIXED.items():
                if str(config.get(key, only)).rstrip("/") != only:
                    yield f"evaluator.config.{key}", f"can only be {only!r}"
        taken = config.get("patch_command")
        if taken is not None and not TAKES_ALL.search(str(taken)):
            why = "the patch always has all of the agent's changes and new files; omit this field"
            yield "evaluator.config.patch_command", why
        if "repo_dir" in config and self._repos(config) is None:
            why = "the agent's repository must be in runtime.workdir, the folder that is kept"
            yield "evaluator.config.repo_dir", why
        try:
            self._instance(config)
        except ConfigError as error:
            yield "evaluator.config.instance", str(error).partition(": ")[2]

    def submission(self) -> Submission:
        """Translate a Polar task to Bridle's `Submission`. pydantic's `ValidationError` names a
        wrong field.
        """
        fields: JSON = {
            name: getattr(self, name)
            for name in self.model_fields_set
            if name in Submission.model_fields and name not in ("runtime", "agent", "evaluator")
        }
        fields |= {"builder": self.builder, "agent": self._agent(), "budgets": self._budgets()}
        if self.runtime is not None:
            fields["runtime"] = self._runtime(self.runtime)
        if self.evaluator is not None:
            strategy = EVALUATORS.get(self.evaluator.strategy, self.evaluator.strategy)
            given = self.evaluator.model_dump(exclude_unset=True, exclude={"refresh_runtime"})
            given |= {"strategy": strategy, "config": self._config(strategy, self.evaluator)}
            fields["evaluator"] = EvaluatorSpec.model_validate(given)
        return Submission.model_validate(fields)

    def _agent(self) -> JSON:
        agent, shell = self.agent, self.agent.custom_shell
        given = agent.model_dump(exclude_unset=True, exclude={"custom_shell"})
        if isinstance(shell, PolarShell):
            into = "" if shell.cwd is None else f"cd {shlex.quote(shell.cwd)} && "
            given["command"] = f"{into}{shell.command}"
            given["env"] = {**agent.env, **(shell.env or {})}
        elif shell is not None:
            given["command"] = shell
        if agent.harness is not None:
            given["harness"] = HARNESSES.get(agent.harness, agent.harness)
        settings = dict(agent.settings)
        version = settings.pop("version", None)
        if version:
            given["version"] = version
        for key, path in AGENT_KEYS.get(agent.harness or "", {}).items():
            if key in settings:
                _put(settings, path.split("."), settings.pop(key))
        return given | ({"settings": settings} if agent.settings else {})

    def _config(self, strategy: str, evaluator: PolarEvaluator) -> JSON:
        """Return the evaluator's config with Bridle's keys."""
        names = EVALUATOR_KEYS.get(strategy, {})
        left = WITHOUT_EFFECT | {"repo_dir", "patch_command"}
        left |= set(FIXED) if strategy == "harbor" else set()
        config = {
            names.get(key, key): value
            for key, value in evaluator.config.items()
            if key not in left or strategy not in EVALUATOR_KEYS
        }
        if "expected" in config:
            config["expected"] = decode_field(config["expected"])
        repos = self._repos(evaluator.config) if "repo_dir" in evaluator.config else None
        if repos is not None:
            repo, tested = repos
            config |= {"repo": repo} | ({} if tested is None else {"tested": tested})
        instance = self._instance(evaluator.config)
        return config if instance is None else config | {"instance": instance}

    def _repos(self, config: JSON) -> tuple[str, str | None] | None:
        """Return the agent's repository in the work folder, and the tested one if it is another.

        `None` = the agent's is not in the work folder.
        """
        workdir = self.runtime.workdir if self.runtime is not None else None
        tested = config["repo_dir"]
        found = re.search(r"\bcd (\S+)", str(config.get("patch_command", "")))
        worked = PurePosixPath(found[1] if found else str(tested))
        if workdir is None or not isinstance(tested, str) or not worked.is_relative_to(workdir):
            return None
        repo = str(worked.relative_to(workdir))
        return repo, None if PurePosixPath(tested) == worked else tested

    @staticmethod
    def _instance(config: JSON) -> object:
        """Return a data set's row with its grading. `ConfigError` if it cannot be graded."""
        row = decode_field(config.get("instance"))
        if not isinstance(row, dict) or all(row.get(name) for name in GRADED):
            return row
        task = swe_task(row, "instance")
        if task["runtime"]["prepare"][0]["type"] == "exec":  # it makes the task
            raise ConfigError(
                "instance: rows of SWE-smith cannot be given here: submit them as tasks (POST "
                "/v1/tasks)"
            )
        return task["evaluator"]["config"]["instance"]

    def _budgets(self) -> JSON:
        """Return the budgets; `metadata.agent_timeout` overrides `timeout_seconds`."""
        own = self.metadata.get("agent_timeout")
        given = self.budgets.model_dump(exclude_unset=True)
        return {"agent_s": self.timeout_seconds if own is None else own} | given

    @staticmethod
    def _runtime(given: PolarRuntime) -> JSON:
        if given.network is not None:
            network = "open" if given.network == "host" else given.network
        else:
            network = "open" if given.allow_internet else "gateway_only"
        same = ("image", "prepare", "env", "workdir", "cpus", "memory_mb", "storage_mb")
        kwargs = {name: value for name, value in given.kwargs.items() if name != "volumes"}
        if "volumes" in given.kwargs:
            kwargs["binds"] = [
                str(each).removesuffix(":ro") for each in _listed(given.kwargs["volumes"])
            ]
        return {
            **{name: getattr(given, name) for name in same},
            "kwargs": kwargs,
            "backend": given.import_path or given.backend,
            "eval_prepare": given.eval_prepare or (),
            "network": network,
            "gpus": given.gpus or None,
        }


def _put(settings: JSON, path: list[str], value: object) -> None:
    """Set a value at a path of nested objects."""
    *folders, name = path
    for folder in folders:
        inner = settings.get(folder)
        settings[folder] = settings = dict(inner) if isinstance(inner, dict) else {}
    settings[name] = value


def _listed(value: object) -> list[object]:
    """Return a list as it is, `None` as an empty one, and any other value as a list of it."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# ---- routes


HEALTH_TIMEOUT_S: Final = 5.0

KEEPALIVE_S: Final = 15.0
"""Longest silence in the event stream."""

ROUTES = RouteTable()


@ROUTES.add("POST", "/rollout/task/submit", TokenRole.SUBMIT, body=PolarTask)
async def submit_task(request: ApiRequest) -> Response:
    """Accept one task in Polar's form."""
    wanted = await request.body(PolarTask)
    for param, message in wanted.refused(request.context.policy):
        raise ApiError(
            422, "not_permitted", f"{param} of the task is refused: {message}", param=param
        )
    try:
        submission = wanted.submission()
    except ValidationError as error:
        raise validation_error(error, "the body") from None
    await submit(request, [check(request, submission)])
    return reply({"task_id": submission.task_id, "status": "running"})


@ROUTES.add("GET", "/rollout/task/{task_id}", TokenRole.READ, query=PolarTaskQuery)
async def show_task(request: ApiRequest) -> Response:
    """Return a task's counts until it is final, then all its results."""
    task = await task_row(request)
    results = is_final(task) or request.query(PolarTaskQuery).include == "results"
    status = await task_status(request.service, task, results=results)
    return await asyncio.to_thread(reply, status)


@ROUTES.add("DELETE", "/rollout/task/{task_id}", TokenRole.SUBMIT, query=PolarCancelQuery)
async def cancel_task(request: ApiRequest) -> Response:
    """Cancel a task; `register_if_missing` reserves an unknown id as a cancelled task."""
    task_id, caller = request.path("task_id"), request.caller
    register = request.query(PolarCancelQuery).register_if_missing in ("true", "1")
    if register and await request.queries.task(task_id) is None:
        try:
            await request.service.reserve(
                task_id, owner=caller.name, tenant=caller.tenant is not None
            )
        except ValidationError as error:
            raise validation_error(error, "the task") from None
    await request.service.cancel_task((await task_row(request))["key"])
    return reply(await task_status(request.service, await task_row(request), results=False))


@ROUTES.add("GET", "/tasks", TokenRole.READ, query=PageQuery)
async def list_tasks(request: ApiRequest) -> Response:
    """List tasks, oldest first."""
    page = request.query(PageQuery)
    rows = await request.queries.tasks(after=page.cursor, limit=page.limit)
    return reply(page_json("tasks", rows, page, "seq", lambda row: polar_task(row, [], [])))


ROUTES.add("GET", "/tasks/{task_id}/sessions", TokenRole.READ, query=SamplesQuery)(list_sessions)


@ROUTES.add("GET", "/events", TokenRole.READ)
async def events(request: ApiRequest) -> Response:
    """Stream the server's events, from now on, as server-sent events."""
    return StreamingResponse(_events(request), media_type="text/event-stream")


async def _events(request: ApiRequest) -> AsyncIterator[bytes]:
    with request.service.events.subscribe(request.caller.tenant) as subscriber:
        yield b": listening\n\n"
        while not request.service.stopping.is_set():
            event = await subscriber.next(KEEPALIVE_S)
            if event is None:
                yield b": still here\n\n"
            else:
                yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), one_line(encode(event)))
                await asyncio.sleep(0)


@ROUTES.add("GET", "/health", None)
async def health(request: ApiRequest) -> Response:
    """Return 200, or 503 if a part of the server has failed or nothing can be stored."""
    state = {"status": "ok", "version": __version__}
    if request.service.failure is not None:
        return reply(state | {"status": "failed"}, 503)
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await request.service.check_stores()
    except (StateError, StoreError, TimeoutError) as error:
        return reply(state | {"status": "store_error", "detail": root_cause(error)}, 503)
    return reply(state)

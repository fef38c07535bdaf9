"""Settings of a server: the `[server]` table of a config file. Command-line flags override it.

`SubmissionPolicy` is an allow-list of the fields of submitted tasks. A field that is not listed is
refused. A field of `INSIDE` reaches only the sandbox, the gateway and the result. Every other field
names something on the server's machine (a process, a file, an import), and has a rule that compares
it with the operator's lists. The settings of a harness, an evaluator or a runtime are listed by its
class: `submittable` has the names that a submitted task may give, separated by spaces; a name with
`:rule` behind it is compared by that method of `_PolicyCheck`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field

from bridle.config import RuntimeSpec, Settings, Task
from bridle.credentials import is_loopback
from bridle.datasets.jsonl import read_manifest, unsound
from bridle.errors import ConfigError
from bridle.evaluators import EVALUATORS
from bridle.harnesses import CHECKS, HARNESSES
from bridle.plugins import installed, load
from bridle.runtimes import RUNTIMES, resolve_auto
from bridle.trajectory.builders import BUILDERS
from bridle.types import JSON

TaskT = TypeVar("TaskT", bound=Task)

NOT_LISTED = "is not in a folder that the operator lists (permits.host_paths)"
PULLED: Final = ("docker://", "oras://", "library://", "shub://")
"""Beginnings of an Apptainer image that is not a path of the machine."""

SHARES_NETWORK: Final = ("apptainer", "bubblewrap")
"""Runtimes whose network `open` is the machine's, loopback included."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SAMPLING: Final = _names("""
    temperature.mode temperature.value top_p.mode top_p.value top_k.mode top_k.value
    presence_penalty.mode presence_penalty.value frequency_penalty.mode frequency_penalty.value
    repetition_penalty.mode repetition_penalty.value min_p.mode min_p.value logit_bias.mode
    logit_bias.value seed.mode seed.value max_output_tokens constraints orphans on_rewrite reasoning
    """)
"""Fields of a sampling policy, a task's or a harness's."""

INSIDE: Final = _names("""
    task_id instruction num_samples train rejected rejected_reward metadata
    runtime.cpus runtime.memory_mb runtime.storage_mb runtime.max_processes
    runtime.gpus runtime.resources runtime.env runtime.workdir
    runtime.prepare[].type runtime.prepare[].target runtime.prepare[].command
    runtime.prepare[].cwd runtime.prepare[].env runtime.prepare[].max_attempts
    runtime.prepare[].retry_backoff_seconds
    runtime.eval_prepare[].type runtime.eval_prepare[].target runtime.eval_prepare[].command
    runtime.eval_prepare[].cwd runtime.eval_prepare[].env runtime.eval_prepare[].max_attempts
    runtime.eval_prepare[].retry_backoff_seconds
    agent.version agent.model_name agent.command agent.env
    agent.kind_rules[].name agent.kind_rules[].kind agent.kind_rules[].system_contains
    agent.kind_rules[].last_user_contains agent.kind_rules[].model agent.kind_rules[].user_agent
    agent.mcp_servers[].name agent.mcp_servers[].transport agent.mcp_servers[].command
    agent.mcp_servers[].args agent.mcp_servers[].env agent.mcp_servers[].url
    agent.mcp_servers[].headers
    builder.config
    evaluator.shared
    evaluator.trusted
    limits.max_turns limits.max_tokens limits.max_seconds limits.max_calls_in_flight
    budgets.init_s budgets.agent_s budgets.build_s budgets.evaluate_s budgets.teardown_s
    artifacts.keep artifacts.paths artifacts.patch artifacts.max_mb
    fork.session fork.at branching.samples branching.max_depth branching.budget_tokens
    """) | {f"{place}.{name}" for place in ("sampling", "agent.sampling") for name in SAMPLING}
"""Fields without a rule; `[]` is each entry of a list."""

DEFAULTS: Final = {"harbor": {"tests": "tests"}}
"""Paths that an evaluator reads if its config has none."""

Refused: TypeAlias = Iterator[tuple[str, str]]


class SubmissionPolicy(Settings):
    """Names, paths and addresses that tasks submitted over HTTP may use: `[server.permits]`."""

    runtimes: tuple[str, ...] | None = None
    """Runtimes by name; `None` = all of Bridle's, but `local` only for admins of a server that
    listens on loopback."""
    import_paths: tuple[str, ...] = ()
    """`package.module:function` or `package.module` prefixes of agents (`agent.function`, with its
    `modules`) and scoring functions; their code is copied into sandboxes."""
    trusted: tuple[str, ...] = ()
    """The same for code that runs on the server's machine with the server's rights: scoring
    functions, and classes of runtimes, harnesses, builders and evaluators."""
    host_paths: tuple[Path, ...] = ()
    """Folders of the server's machine in which tasks may name files and folders."""
    remotes: tuple[JSON, ...] = ()
    """Allowed `kwargs` of runtime `remote`, each a table as a task would have it; `"*"` permits any
    value. Remote hosts are used with the server's own rights, so only listed ones are permitted."""
    host_network: bool = False
    """True if tasks may use the machine's network: Polar's `network: host`, and `open` in runtimes
    that share it."""
    callbacks: tuple[str, ...] = ()
    """Allowed callback addresses: host names, `*.example.org`, IP networks. Private, loopback and
    link-local addresses must be listed by network (`127.0.0.0/8`) or name; an empty list allows
    every public address."""
    verified: Path | None = None
    """Manifest of `bridle tasks verify`: a submitted task must be sound in it. `None` = any may be
    submitted."""
    local: bool = Field(default=False, exclude=True)
    """True if `local` is a default runtime; set from the listening address."""

    def refused(self, task: Task) -> Refused:
        """Yield every field of a submitted task that the policy does not permit, with the
        reason.
        """
        policy_check = _PolicyCheck(self, task)
        for pattern, field, value in _fields(task, "", ""):
            if pattern in INSIDE or value is None:
                continue
            rule = RULES.get(pattern)
            if rule is None:
                yield field, "a submitted task may not have this field"
            else:
                yield from rule(policy_check, field, value)
        if self.verified is not None:
            for cause in unsound([task], self.verified).values():
                yield "task_id", f"the operator requires verified tasks, and this one is: {cause}"

    def crossed(self, task: TaskT) -> TaskT:
        """Return the task with the changes that this policy makes before it runs.

        Scoring functions that are not trusted run in a sandbox, and a task that names no runtime
        runs in the one that is permitted.
        """
        spec = task.evaluator
        config = self._confined(spec.strategy, spec.config)
        evaluator = spec.model_copy(update={"config": config})
        update = {"evaluator": evaluator, "runtime": self.placed(task.runtime)}
        return task.model_copy(update=update)

    def placed(self, runtime: RuntimeSpec) -> RuntimeSpec:
        """Return the runtime's spec with the changes that this policy makes.

        Where `local` is not permitted, `auto` is a runtime that contains its programs, on whichever
        machine the session runs.
        """
        return resolve_auto(runtime, contained=True) if not self.permits_local else runtime

    @property
    def permits_local(self) -> bool:
        """Return whether tasks may use runtime `local`, which contains nothing."""
        return self.local if self.runtimes is None else "local" in self.runtimes

    def _confined(self, strategy: str, config: JSON) -> JSON:
        name = _short(strategy, EVALUATORS)
        if name == "function":
            own = _is_listed(str(config.get("function", "")), self.trusted)
            return config | {"sandbox": not own or bool(config.get("sandbox"))}
        if name == "composite" and isinstance(config.get("parts"), list | tuple):
            parts = [
                part | {"config": self._confined(*_part(part))} if isinstance(part, dict) else part
                for part in config["parts"]
            ]
            return config | {"parts": parts}
        return config


@dataclass(frozen=True, slots=True)
class _PolicyCheck:
    """The rules for one task; each yields the fields that it refuses."""

    policy: SubmissionPolicy
    task: Task

    @property
    def runtime(self) -> str:
        """The task's runtime, by its short name if it is one of Bridle's."""
        return _short(resolve_auto(self.policy.placed(self.task.runtime)).backend, RUNTIMES)

    def backend(self, field: str, _: str) -> Refused:
        given, listed = self.runtime, self.policy.runtimes
        if given not in RUNTIMES:
            yield from self.trusted(field, given, "runtime")
            return
        known = sorted(RUNTIMES if listed is None else listed)
        if listed is None and not self.policy.permits_local:
            known.remove("local")
        if given not in known:
            yield field, f"runtime {given!r} is not permitted; permitted: {', '.join(known)}"

    def image(self, field: str, given: str) -> Refused:
        runtime = self.runtime
        if runtime == "docker" and given.startswith("-"):
            yield field, f"{given!r} is not the name of an image"
        if runtime == "bubblewrap" or (runtime == "apptainer" and not given.startswith(PULLED)):
            yield from self.host_path(field, given)

    def network(self, field: str, given: str) -> Refused:
        if given == "open" and self.runtime in SHARES_NETWORK and not self.policy.host_network:
            why = f"'open' is the machine's own network in {self.runtime!r}"
            yield field, f"{why}; the operator can permit it (permits.host_network)"

    def kwargs(self, field: str, given: JSON) -> Refused:
        if self.runtime == "remote" and not any(_fits(given, one) for one in self.policy.remotes):
            yield (
                field,
                "the operator does not list this host for runtime 'remote' (permits.remotes)",
            )
        yield from self.own(field, "runtime", RUNTIMES, self.runtime, given)

    def settings(self, field: str, given: JSON) -> Refused:
        agent = self.task.agent
        name = agent.harness or agent.import_path or ""
        yield from self.own(field, "harness", HARNESSES | CHECKS, name, given)

    def config(self, field: str, given: JSON) -> Refused:
        yield from self.evaluator(field, self.task.evaluator.strategy, given)

    def evaluator(self, field: str, strategy: str, config: JSON) -> Refused:
        whole = DEFAULTS.get(_short(strategy, EVALUATORS), {}) | config
        yield from self.own(field, "evaluator", EVALUATORS, strategy, whole)

    def own(
        self, field: str, what: str, table: Mapping[str, str], name: str, given: JSON
    ) -> Refused:
        """Check the settings of a harness, evaluator or runtime, if it is one of Bridle's."""
        name = _short(name, table)
        if name not in table or not given:
            return
        listed: str = getattr(load(name, table, what=what), "submittable", "")
        known = dict(word.partition(":")[::2] for word in listed.split())
        for key, value in given.items():
            if key not in known:
                shown = ", ".join(sorted(known)) or "none"
                yield f"{field}.{key}", f"{name!r} has no such field; it has: {shown}"
            elif known[key] and value is not None:
                yield from getattr(self, known[key])(f"{field}.{key}", value)

    def parts(self, field: str, given: object) -> Refused:
        for place, part in enumerate(given if isinstance(given, list | tuple) else ()):
            if isinstance(part, dict):
                at = f"{field}[{place}]"
                strategy, config = _part(part)
                yield from self.trusted_class(f"{at}.strategy", strategy, EVALUATORS, "evaluator")
                yield from self.evaluator(f"{at}.config", strategy, config)

    def scorer_env(self, field: str, given: Mapping[str, str]) -> Refused:
        evaluator = self.task.evaluator
        host = next(self.on_host(evaluator.strategy, evaluator.config), None)
        if given and host is not None:
            why = f"{host!r} runs on the server's machine, where a task may not set variables"
            yield f"{field}.{min(given)}", why

    def on_host(self, strategy: str, config: JSON) -> Iterator[str]:
        """Yield the evaluators that run outside every sandbox."""
        name = _short(strategy, EVALUATORS)
        function = str(config.get("function", ""))
        if name not in EVALUATORS:
            yield strategy
        elif name == "function" and _is_listed(function, self.policy.trusted):
            yield function
        elif name == "composite":
            parts = config.get("parts")
            for part in parts if isinstance(parts, list | tuple) else ():
                if isinstance(part, dict):
                    yield from self.on_host(*_part(part))

    def strategy(self, field: str, given: str) -> Refused:
        yield from self.trusted_class(field, given, EVALUATORS, "evaluator")

    def builder(self, field: str, given: str) -> Refused:
        yield from self.trusted_class(field, given, BUILDERS, "builder")

    def harness(self, field: str, given: str) -> Refused:
        yield from self.trusted_class(field, given, HARNESSES | CHECKS, "harness")

    def trusted_class(self, field: str, given: str, table: Mapping[str, str], what: str) -> Refused:
        """Refuse a dotted path or an installed name that is neither Bridle's own nor listed."""
        if _short(given, table) not in table:
            yield from self.trusted(field, given, what)

    def trusted(self, field: str, given: str, what: str) -> Refused:
        named = ":" in given or given in installed(what)
        if named and not _is_listed(given, self.policy.trusted):
            shown = ", ".join(self.policy.trusted) or "none"
            yield field, f"{given!r} may not run on this machine; permits.trusted: {shown}"

    def copied(self, field: str, given: object) -> Refused:
        listed = (*self.policy.import_paths, *self.policy.trusted)
        if not _is_listed(str(given), listed):
            shown = ", ".join(listed) or "none"
            yield field, f"{given!r} may not be imported; permits.import_paths: {shown}"

    def function(self, field: str, given: str) -> Refused:
        module = given.rpartition(":")[0]
        if module.endswith(".py"):
            yield from self.task_path(field, module)
        else:
            yield from self.copied(field, given)

    def modules(self, field: str, given: object) -> Refused:
        for place, name in enumerate(given if isinstance(given, list | tuple) else [given]):
            yield from self.copied(f"{field}[{place}]", name)

    def branching(self, field: str, _: object) -> Refused:
        yield field, "is not served here: fork sessions by POST /v1/sessions/{session_id}/fork"

    def owner(self, field: str, _: object) -> Refused:
        yield field, "is set by the server to the token's owner"

    def task_path(self, field: str, given: object) -> Refused:
        """Check a path, which may be relative to the task's folder."""
        path = Path(self.task.task_dir or ".", str(given)).resolve()
        if not any(path.is_relative_to(folder.resolve()) for folder in self.policy.host_paths):
            yield field, f"{given!r} {NOT_LISTED}"

    def host_path(self, field: str, given: object) -> Refused:
        """Check a path that is passed to a program of the machine as it is."""
        path = str(given)
        if not path.startswith("/") or {":", ","} & set(path):
            yield field, f"{path!r} must be an absolute path, without ':' and ','"
        else:
            yield from self.task_path(field, path)

    def host_paths(self, field: str, given: object) -> Refused:
        """Check paths, each alone or as `HOST:INSIDE`."""
        for path in given if isinstance(given, list | tuple) else [given]:
            source, colon, inside = str(path).partition(":")
            if colon and (not inside.startswith("/") or {":", ","} & set(inside)):
                yield field, f"{path!r}: {inside!r} must be an absolute path, without ':' and ','"
            yield from self.host_path(field, source)


RULES: Final[Mapping[str, Callable[[_PolicyCheck, str, Any], Refused]]] = {
    "runtime.backend": _PolicyCheck.backend,
    "runtime.image": _PolicyCheck.image,
    "runtime.prepare[].source": _PolicyCheck.task_path,
    "runtime.eval_prepare[].source": _PolicyCheck.task_path,
    "runtime.network": _PolicyCheck.network,
    "runtime.kwargs": _PolicyCheck.kwargs,
    "agent.harness": _PolicyCheck.harness,
    "agent.import_path": _PolicyCheck.harness,
    "agent.function": _PolicyCheck.function,
    "agent.settings": _PolicyCheck.settings,
    "agent.skills_path": _PolicyCheck.task_path,
    "builder.strategy": _PolicyCheck.builder,
    "evaluator.strategy": _PolicyCheck.strategy,
    "evaluator.config": _PolicyCheck.config,
    "evaluator.env": _PolicyCheck.scorer_env,
    "fork.capture": _PolicyCheck.task_path,
    "branching.at": _PolicyCheck.branching,
    "owner": _PolicyCheck.owner,
    "task_dir": _PolicyCheck.task_path,
}
"""The rule of each field that names something on the server's machine."""


def _fields(model: BaseModel, pattern: str, field: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the pattern, name and value of every field that is not a model itself."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _fields(value, f"{pattern}{name}.", f"{field}{name}.")
        elif isinstance(value, tuple) and any(isinstance(one, BaseModel) for one in value):
            for place, one in enumerate(value):
                yield from _fields(one, f"{pattern}{name}[].", f"{field}{name}[{place}].")
        elif value != ():
            yield f"{pattern}{name}", f"{field}{name}", value


def _short(name: str, table: Mapping[str, str]) -> str:
    """Return the short name of one of Bridle's own classes, also if it is given as a path."""
    return next((short for short, path in table.items() if path == name), name)


def _part(part: JSON) -> tuple[str, JSON]:
    config = part.get("config")
    return str(part.get("strategy")), config if isinstance(config, dict) else {}


def _is_listed(name: str, listed: tuple[str, ...]) -> bool:
    """Return whether a dotted path, its module or a parent package of it is listed."""
    module = name.partition(":")[0]
    return any(path in (name, module) or module.startswith(f"{path}.") for path in listed)


def _fits(given: object, listed: object) -> bool:
    """Return whether every given value is listed and nothing else is given."""
    if isinstance(given, Mapping) and isinstance(listed, Mapping):
        return set(given) <= set(listed) and all(
            _fits(given.get(name), value) for name, value in listed.items()
        )
    return listed in ("*", given)


def names_files(task: Task) -> bool:
    """Return whether a task refers to files or folders relative to its `task_dir`."""
    without = task.model_copy(update={"task_dir": None})
    return any(reason.endswith(NOT_LISTED) for _, reason in SubmissionPolicy().refused(without))


class OwnerSettings(Settings):
    """Settings of one owner."""

    weight: float = Field(default=1.0, gt=0, le=1000)
    """Its share of the run slots is its weight over that of all owners with waiting sessions."""
    max_queued_samples: int | None = Field(default=None, ge=1)
    """Instead of the server's."""


class ServiceSettings(Settings):
    """Rates and timeouts of the service."""

    max_inflight_groups: int | None = Field(default=None, ge=1)
    """Groups of one owner that have started and not ended; `None` = as many as there are slots."""
    max_unacked_groups: int | None = Field(default=None, ge=1)
    """No further group of an owner starts while this many ended ones are not acknowledged; `None` =
    any number. For a trainer that acknowledges groups."""
    groups_per_version: int | None = Field(default=None, ge=1)
    """Groups that the trainer consumes per policy version; `max_version_lag` needs it."""
    max_version_lag: int | None = Field(default=None, ge=0)
    """Largest staleness of a group's first token when the group is used. Groups are held back so
    that none is wasted: at version v, at most
    `groups_per_version * (v + 1 + max_version_lag)` have been started since version 0."""
    on_stale: Literal["keep", "cancel"] = "keep"
    """Action for a running session that is more than `max_version_lag` versions behind: it
    continues or is cancelled."""
    max_queued_samples: int | None = Field(default=None, ge=1)
    """Samples of one owner that are accepted and not started; `None` = any number."""
    owners: dict[str, OwnerSettings] = Field(default_factory=dict)
    """Settings of single owners, by the name of their tokens."""
    lease_s: float = Field(default=60, gt=0)
    """A server that has not renewed its leases for so long is dead, and others take over its
    runs."""
    drain_s: float = Field(default=30, ge=0)
    """After SIGTERM, how long running sessions may continue; then they are queued again."""
    store_patience_s: float = Field(default=600, ge=0)
    """Time that writing a trajectory is retried (a full disk, an object store that is down); then
    the session ends with `store_error` and may be run again."""
    callback_give_up_s: float = Field(default=86_400, gt=0)
    """Time that a callback is retried before it is dead."""
    keep_days: float | None = Field(default=None, gt=0)
    """Files of acknowledged groups (trajectories, capture, logs, artifacts) are removed after so
    many days; `None` = never."""
    keep_gb: float | None = Field(default=None, gt=0)
    """Files of acknowledged groups are removed, oldest first, beyond this size; `None` = never."""
    keep_rows_days: float | None = Field(default=None, gt=0)
    """Rows of acknowledged groups (sessions, results, callbacks) are removed after so many days;
    their tasks' names and counts stay. `None` = never."""
    keep_unacked_days: float | None = Field(default=None, gt=0)
    """Groups count as acknowledged after so many days; `None` = never."""

    def quota_of(self, owner: str) -> int | None:
        """Return how many samples an owner may have queued; `None` = any number."""
        own = self.owners.get(owner, OwnerSettings()).max_queued_samples
        return self.max_queued_samples if own is None else own


class ServerSettings(ServiceSettings):
    """The server's address, database, files and tokens."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8080, ge=0, le=65535)
    """0 = any free one."""
    data: Path = Path("runs/server")
    """Folder of the capture, of logs, and, by default, of all else."""
    database: str | None = None
    """`postgresql://...` or a SQLite file; `None` = `server.sqlite` in `data`."""
    trajectories: str | None = None
    """Folder or fsspec URL (`s3://bucket/path`); `None` = `trajectories` in `data`."""
    tokens: Path | None = None
    """TOML file with `[[tokens]]`; the operator's own token is in `server.token` of `data`."""
    engines_from: str | None = None
    """File or URL that lists engines; it is read every few seconds, and engines join and leave as
    it says. `None` = only the given engines."""
    hosts: tuple[str, ...] = ()
    """Names that the `Host` header may have besides `localhost` and the machine's name and
    addresses; other requests get 421."""
    permits: SubmissionPolicy = SubmissionPolicy()
    """Names, paths and addresses that submitted tasks may use."""

    def checked(self) -> ServerSettings:
        """Return the settings with the defaults that depend on the listening address.

        `ConfigError` if the manifest of verified tasks cannot be read, and for settings that do
        nothing without another one.
        """
        bounded = self.max_version_lag is not None
        if self.on_stale == "cancel" and not bounded:
            raise ConfigError('server.on_stale = "cancel" needs max_version_lag')
        if bounded and self.groups_per_version is None and self.on_stale == "keep":
            raise ConfigError(
                'server.max_version_lag needs groups_per_version, or on_stale = "cancel"; alone it '
                "holds no group back"
            )
        if self.groups_per_version is not None and not bounded:
            raise ConfigError("server.groups_per_version needs max_version_lag")
        if self.permits.verified is not None:
            read_manifest(self.permits.verified)
        permits = self.permits.model_copy(update={"local": is_loopback(self.host)})
        return self.model_copy(update={"permits": permits})

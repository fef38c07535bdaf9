"""One typed tree of settings, the same from TOML, flags and environment.

Task files are part of it: a task says what to run, in what runtime, with which harness, and how the
result is scored. Field names are those of the rollout API that clients of this field already speak
(Polar's `TaskRequest`); what Bridle adds stands beside them. Every model refuses unknown fields, so
a typing mistake is named instead of ignored.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from bridle.errors import ConfigError
from bridle.types import JSON, Kind, without_user_info


class Settings(BaseModel):
    """Base of all settings: frozen, unknown fields refused, docstrings as descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


ModelT = TypeVar("ModelT", bound=BaseModel)


class FieldPolicy(Settings):
    """The rule for one sampling field that the harness may also set."""

    mode: Literal["override", "default", "respect"] = "respect"
    """`override`: always ours; `default`: ours unless the harness asks; `respect`: as asked."""
    value: float | int | None = None
    """Our value, for `override` and `default`."""


class SamplingPolicy(Settings):
    """Sampling rules of a task, per field; the defaults give the full support of training."""

    temperature: FieldPolicy = FieldPolicy(mode="override", value=1.0)
    top_p: FieldPolicy = FieldPolicy(mode="override", value=1.0)
    top_k: FieldPolicy = FieldPolicy(mode="override", value=-1)
    presence_penalty: FieldPolicy = FieldPolicy(mode="override", value=None)
    frequency_penalty: FieldPolicy = FieldPolicy(mode="override", value=None)
    repetition_penalty: FieldPolicy = FieldPolicy(mode="override", value=None)
    min_p: FieldPolicy = FieldPolicy(mode="override", value=None)
    logit_bias: FieldPolicy = FieldPolicy(mode="override", value=None)
    """Has no value of its own: `respect` passes on what the harness asks."""
    seed: FieldPolicy = FieldPolicy(mode="override", value=None)
    """A seed of ours is derived anew per session and call, so a group is not copies of one run."""
    max_output_tokens: int | None = None
    """Output budget of one call; `None` = what was asked for and what the context leaves."""
    constraints: Literal["enforce", "record"] = "enforce"
    """Effect of a schema for the answer, or of a tool that must be called. `enforce`: the engine
    samples under a grammar where it can, and such tokens train only with logprobs of the
    constrained distribution. `record`: samples are free and train; what the answer does not keep
    is recorded."""
    orphans: Literal["refuse", "serve"] = "refuse"
    """Treatment of a request with a tool result whose call stands nowhere before it: context
    was lost on the way. `serve`: it is sampled, and its exchange says how many there were."""
    on_rewrite: Literal["extend", "fork"] = "extend"
    """Treatment of a request whose harness changed the form of the model's last turn, not its
    meaning (`extra.drift` of the exchange names the change). `extend`: the sampled tokens stay;
    `fork`: the turn is rendered as the harness shows it, under a new root."""
    reasoning: Literal["show", "hide"] = "show"
    """Visibility of the model's reasoning to the harness. `hide` is for clients that refuse fields
    which their provider does not have (`reasoning_content` in Chat); the sampled tokens are the
    same, and train."""

    @field_validator("logit_bias")
    @classmethod
    def _has_no_value(cls, policy: FieldPolicy) -> FieldPolicy:
        if policy.value is not None:
            raise ValueError('logit_bias takes a mode ("override" or "respect") and no value')
        return policy


class ModelSpec(Settings):
    """The engine behind one model name; an entry of the `[models]` table.

    The entry's key is a model name or a glob (`claude-haiku-*`). A call is given to the entry with
    its exact name, else to the first whose glob fits, else to the first with its kind, else to the
    policy.
    """

    engines: tuple[str, ...] = ()
    """Replicas, as `--engine` takes them; none = the policy's engine, whose tokens train."""
    tokenizer: str | None = None
    """The engine's; `None` = its own where it brings one, else the policy's as an estimate."""
    model: str | None = None
    """The model's name on the engine's side; `None` = its only one."""
    match: tuple[str, ...] = ()
    """Further names and globs."""
    kinds: tuple[Kind, ...] = ()
    """Kinds of call that go here whatever name they have: `side`, `compaction`, `subagent`."""
    sampling: SamplingPolicy | None = None
    """`None` = as the harness asks, on an engine of its own; as the task says, on the policy's."""


class Limits(Settings):
    """Limits of one session; the first that is reached ends it. `None` = no limit."""

    max_turns: int | None = None
    """Committed model calls."""
    max_tokens: int | None = None
    """Sampled tokens over the whole session."""
    max_seconds: float | None = None
    """Seconds since the first model call; calls begun before continue to their end."""
    max_calls_in_flight: int | None = None
    """Calls at the same time; one more is refused with 429, and the session goes on."""


class Action(Settings):
    """One step of preparing a runtime."""

    type: Literal["upload_file", "upload_dir", "exec", "scrub_git"]
    """`scrub_git` removes from the repository at `target` what `HEAD` does not reach
    (`bridle.node.workspace`)."""
    source: str | None = None
    """Path on our side, relative to the task file."""
    target: str | None = None
    """Path inside the runtime, relative to its workdir."""
    command: str | None = None
    """Shell command, for `exec`."""
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    max_attempts: int = Field(default=1, ge=1)
    retry_backoff_seconds: float = Field(default=1.0, ge=0)


AUTO = "auto"
"""The runtime that is chosen on the machine where a session runs."""


class RuntimeSpec(Settings):
    """The sandbox or machine that the harness runs in."""

    backend: str = AUTO
    """Short name or `package.module:Class`; `auto` = one that contains, where the machine can."""
    image: str | None = None
    prepare: tuple[Action, ...] = ()
    """Done in INIT, in order."""
    eval_prepare: tuple[Action, ...] = ()
    """Done after the harness is dead, before evaluation."""
    env: dict[str, str] = Field(default_factory=dict)
    network: Literal["gateway_only", "open", "none"] = "gateway_only"
    workdir: str | None = None
    """`None` = a fresh folder of the session's."""
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    max_processes: int | None = Field(default=None, gt=0)
    """Processes and threads at once; `None` = the runtime's own limit."""
    gpus: int | None = Field(default=None, gt=0)
    resources: dict[str, float] = Field(default_factory=dict)
    """Other resources that its machine must offer, by name and amount, where there are many
    (executor `ray`); those that run there share it."""
    kwargs: JSON = Field(default_factory=dict)


class McpServer(Settings):
    """One MCP server that the harness gets, written into its own configuration."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    transport: Literal["stdio", "streamable-http", "sse"] = "stdio"
    command: str | None = None
    """Program, as found inside the runtime; for `stdio`."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    url: str | None = None
    """Address that works inside the runtime; for `streamable-http` and `sse`."""
    headers: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_its_address(self) -> McpServer:
        needed = "command" if self.transport == "stdio" else "url"
        if getattr(self, needed) is None:
            raise ValueError(f"an MCP server with transport {self.transport!r} needs {needed!r}")
        return self


class CallRule(Settings):
    """A mark by which a harness's calls of one kind are known; all that is given must hold."""

    name: str = Field(min_length=1)
    """Stands in each exchange as `kind_rule`."""
    kind: Kind
    """`side`, `compaction`, `subagent`, or `agent` where a packaged rule is wrong."""
    system_contains: str | None = Field(default=None, min_length=1)
    """Text inside the system message that comes first."""
    last_user_contains: str | None = Field(default=None, min_length=1)
    """Text inside the last message, where a user's."""
    model: str | None = Field(default=None, min_length=1)
    """Name or glob of the model that the call asks for."""
    user_agent: str | None = Field(default=None, min_length=1)
    """Text inside the `User-Agent` header, in any case."""

    @model_validator(mode="after")
    def _has_a_mark(self) -> CallRule:
        marks = (self.system_contains, self.last_user_contains, self.model, self.user_agent)
        if not any(marks):
            raise ValueError(
                "a rule for model calls needs system_contains, last_user_contains, model or "
                "user_agent: without one it would hold for every call"
            )
        return self


class AgentSpec(Settings):
    """The harness of a task and its settings. Exactly one of `harness` and `import_path`."""

    harness: str | None = None
    import_path: str | None = None
    """`package.module:Class` of a harness of your own."""
    version: str | None = None
    """`None` = the version that Bridle is tested with. Any other one is installed without a lock,
    is checked once, and is recorded as `<version> (unlocked)`; `image` = the program that the image
    brings, which is not installed."""
    model_name: str = "bridle-policy"
    """The model name that the harness requests; no harness knows it, so none switches protocol."""
    command: str | None = None
    """Command line, for harness `command`; `{instruction}`, `{base_url}`, `{model}` are filled."""
    function: str | None = None
    """`package.module:name` or `file.py:name` (relative to the task file), for harness `function`;
    `bridle.harnesses.function.import_path` gives that of a function."""
    settings: JSON = Field(default_factory=dict)
    """Those on this harness's page in `docs/guides/harnesses`: `args`, `config`, `api`..."""
    kind_rules: tuple[CallRule, ...] = ()
    """Rules for the kinds of its calls, tried before the packaged rules (`reference/dialects`)."""
    sampling: SamplingPolicy = SamplingPolicy()
    """Defaults for this harness, e.g. `orphans` or `on_rewrite`; fields that the task's own
    `sampling` gives count instead."""
    env: dict[str, str] = Field(default_factory=dict)
    mcp_servers: tuple[McpServer, ...] = ()
    """Written in the harness's own form; refused by a harness without an MCP client."""
    skills_path: str | None = None
    """A folder of skills (one folder each, with a `SKILL.md`), relative to the task file."""


class BuilderSpec(Settings):
    """The builder that makes traces of exchanges."""

    strategy: str = "prefix_merging"
    config: JSON = Field(default_factory=dict)


class EvaluatorSpec(Settings):
    """The evaluator of a session."""

    strategy: str = "session_completed"
    config: JSON = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    trusted: bool = False
    """Score where the agent ran, with what it left there; the result says so. By default a session
    is scored in a fresh runtime, into which only what is scored crosses as a copy."""
    shared: bool = False
    """Score where the agent ran, and let the processes that its harness left running (a server that
    the task asks for) live until then; the result says so."""

    @property
    def in_place(self) -> bool:
        """Return whether the session is scored where the agent ran."""
        return self.trusted or self.shared


class ArtifactsSpec(Settings):
    """Files of a session that stay in the run folder beside its result."""

    keep: Literal["always", "failed", "never"] | None = None
    """Of which sessions logs and files stay: all, those that did not complete, none; `None` = as
    the node says (`keep_logs`)."""
    paths: tuple[str, ...] = ()
    """Files and folders inside, relative to the work folder, that stay beside the logs."""
    patch: str | None = None
    """A git repository, relative to the work folder, whose changes stay as `patch.diff`."""
    max_mb: int = Field(default=64, gt=0)
    """MiB of one file or folder; what is larger is left out, and the result says so."""

    @field_validator("paths")
    @classmethod
    def _lie_inside(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not path or path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"{path!r} must be relative to the work folder, without '..'")
        return paths


class Budgets(Settings):
    """Seconds that each stage may take; waiting in READY costs the session nothing."""

    init_s: float = Field(default=300, gt=0)
    agent_s: float = Field(default=600, gt=0)
    build_s: float = Field(default=60, gt=0)
    evaluate_s: float = Field(default=300, gt=0)
    teardown_s: float = Field(default=30, gt=0)


class ForkSpec(Settings):
    """A captured session that a task's sessions begin as."""

    capture: str
    """Its capture file."""
    session: str
    at: int = Field(ge=1)
    """Number of its replies that are given again, in the order in which they were captured."""


class BranchingSpec(Settings):
    """Forks of a task's sessions, begun when these have completed."""

    at: tuple[int, ...] | Annotated[str, Field(pattern=r"^every:[1-9]\d*$")]
    """After how many replies: `[4, 8]`, or `every:4`."""
    samples: int = Field(default=1, ge=1)
    """Forks at each of them."""
    max_depth: int = Field(default=1, ge=1)
    """1 = forks are not forked again."""
    budget_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens of the task's sessions after which no fork begins; `None` = any number."""

    def points(self, first: int, replies: int) -> list[int]:
        """Return the numbers of the replies after which a session with `replies` replies is forked.

        They are from `first` on, and before the last one.
        """
        if isinstance(self.at, str):
            step = int(self.at.partition(":")[2])
            return [at for at in range(step, replies, step) if at >= first]
        return sorted({at for at in self.at if first <= at < replies})


class Task(Settings):
    """One instruction with how to run and score it; expands into `num_samples` sessions."""

    task_id: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=200)
    instruction: str = Field(min_length=1)
    num_samples: int = Field(default=1, ge=1)
    runtime: RuntimeSpec = RuntimeSpec()
    agent: AgentSpec = AgentSpec(harness="mini_swe_agent")
    builder: BuilderSpec = BuilderSpec()
    evaluator: EvaluatorSpec = EvaluatorSpec()
    sampling: SamplingPolicy = SamplingPolicy()
    limits: Limits = Limits()
    budgets: Budgets = Budgets()
    artifacts: ArtifactsSpec = ArtifactsSpec()
    train: tuple[Kind, ...] = (Kind.AGENT, Kind.SUBAGENT, Kind.COMPACTION)
    """Kinds of call whose tokens train."""
    rejected: Literal["train", "mask"] = "train"
    """Treatment of replies that the harness read and did not continue from (`rejected`)."""
    rejected_reward: float | None = Field(default=None, allow_inf_nan=False)
    """The reward of their traces; `None` = the session's, so that a malformed reply of a session
    that succeeded is reinforced with it."""
    metadata: JSON = Field(default_factory=dict)
    fork: ForkSpec | None = None
    """The captured session that its sessions begin as; `None` = they begin by themselves."""
    branching: BranchingSpec | None = None
    """Forks of its sessions, which join their group; `None` = there are none."""
    owner: str | None = None
    """Set by a rollout server: the submitter, who alone forks the task's captured sessions."""
    task_dir: str | None = None
    """Absolute folder that relative paths of this task are relative to; a loader sets it to the
    task file's. `None` = the current folder."""

    @model_validator(mode="before")
    @classmethod
    def _take_the_harness_s_sampling(cls, given: Any) -> Any:  # noqa: ANN401 - not validated yet
        """Fill the task's `sampling` with what its agent's gives beside it."""
        if not isinstance(given, dict):
            return given
        agent = _fields(given.get("agent"))
        default, own = _fields(agent.get("sampling")), _fields(given.get("sampling", {}))
        return given if not default or own is _NONE else {**given, "sampling": {**default, **own}}


_NONE: dict[str, Any] = {}


def _fields(given: Any) -> dict[str, Any]:  # noqa: ANN401 - not validated yet
    """Return the fields that were given; `_NONE` for what has no fields."""
    if isinstance(given, BaseModel):
        return {name: getattr(given, name) for name in given.model_fields_set}
    return given if isinstance(given, dict) else _NONE


MOST_FAULTS: Final = 1000
"""Faults of one value that are reported; to list a million takes seconds."""


def first_fault(error: ValidationError) -> ErrorDetails | None:
    """Return the first of a pydantic error's faults; where a field is missing and an unknown one
    was given, the unknown one, which is most likely a misspelling of it.

    `None` = there are more than `MOST_FAULTS`.
    """
    if error.error_count() > MOST_FAULTS:
        return None
    first, *others = error.errors()
    if first["type"] == "missing":
        beside = (one for one in others if one["loc"][:-1] == first["loc"][:-1])
        return next((one for one in beside if one["type"] == "extra_forbidden"), first)
    return first


def explain(error: ValidationError, where: str) -> ConfigError:
    """Return a pydantic error as a `ConfigError` of one line: where, the first wrong field, what
    was given.
    """
    first = first_fault(error)
    if first is None:
        return ConfigError(f"{where}: {error.error_count()} of its values are wrong")
    path = field_path(first)
    others = [one for one in error.errors() if one != first]
    alike = [first, *(one for one in others if field_path(one) == path)]
    # A list that has a wrong item is also too short for pydantic, because it drops the item.
    more = sum(not f"{path}.".startswith(f"{field_path(one)}.") for one in others)
    given = without_user_info(repr(first["input"]))
    given = given if len(given) <= 80 else given[:77] + "..."
    meant = _meant(error.title, first["loc"]) if first["type"] == "extra_forbidden" else ""
    inside = given if isinstance(first["input"], dict | list) else ""
    hidden = first["type"] == "missing" or SECRET.search(f"{path}{meant}{inside}")
    given = "" if hidden else f"; given: {given}"
    said = "; or ".join(dict.fromkeys(_plain(one) for one in alike if one["type"] != NO_VALUE))
    said = f"{path or '(top level)'}: {said}{meant}{given}{f' (+{more} more)' if more else ''}"
    return ConfigError(f"{where}: {said}")


def _plain(fault: ErrorDetails) -> str:
    said = PLAIN.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    return said.replace("Tuple should", "List should").replace(" after validation", "")


NO_VALUE: Final = "none_required"
"""Type of the fault that a field which may be left out adds to each other one."""

SECRET: Final = re.compile(r"(token|secrets?|passwords?|key)(?![a-z])", re.IGNORECASE)
"""Name of a field whose value no message shows."""

PLAIN: Final = dict.fromkeys(("tuple_type", "list_type"), "Input should be a list") | dict.fromkeys(
    ("model_type", "dict_type"), "Input should be an object with fields"
)
"""Type of a pydantic fault -> message, for those whose own message has words of Python."""

BRANCH: Final = re.compile(r"str|int|float|bool|constrained-\w+|[a-z-]+\[.*\]")
"""A part of a fault's place that is no field: pydantic's name of one type of several."""


def field_path(fault: ErrorDetails) -> str:
    """Return the place of a fault as names joined by dots, without names of types."""
    first, *others = fault["loc"] or ("",)
    parts = (part for part in others if not BRANCH.fullmatch(str(part)))
    return ".".join(map(str, (first, *parts)))


def _meant(title: str, loc: Sequence[int | str]) -> str:
    """Return a question after the field at `loc` that is nearest to the unknown one there, or
    nothing.
    """
    models: list[type[BaseModel]] = [Settings]
    for one in models:
        models += one.__subclasses__()
    model = next((one for one in models if one.__name__ == title), None)
    for part in loc[:-1]:
        if model is not None and part in model.model_fields:
            model = _model_of(model.model_fields[str(part)].annotation)
    close = get_close_matches(str(loc[-1]), model.model_fields if model else (), 1)
    return f", did you mean {close[0]!r}?" if close else ""


def _model_of(annotation: object) -> type[BaseModel] | None:
    """Return the model in a field's type, such as a tuple of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_of, get_args(annotation))), None)


def validated(model: type[ModelT], given: object, where: str) -> ModelT:
    """Return `given` as settings of type `model`. `ConfigError` names `where` and the first wrong
    field.
    """
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise explain(error, where) from None


def with_flags(given: JSON, flags: Mapping[str, Any]) -> JSON:
    """Return settings with the flags that were given (not `None`) in place of their own values,
    also inside tables.

    A value that should be a table and is none stays, for validation to refuse.
    """
    both = dict(given)
    for name, flag in flags.items():
        table = given.get(name, {})
        if isinstance(flag, Mapping):
            both[name] = with_flags(table, flag) if isinstance(table, dict) else table
        elif flag is not None:
            both[name] = flag
    return both


def merged(under: JSON, over: JSON) -> JSON:
    """Return a copy of `under` with the members of `over`, objects merged member by member."""
    both = {**under, **over}
    for name in under.keys() & over.keys():
        if isinstance(under[name], dict) and isinstance(over[name], dict):
            both[name] = merged(under[name], over[name])
    return both


def read_text(path: Path) -> str:
    """Return a file's text without a byte order mark; `ConfigError` names the path of a file that
    cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def load_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; `ConfigError` names the path and the line of a mistake."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def assets_dir() -> Path:
    """Return the folder of the data files in the installed package."""
    return Path(__file__).parent / "assets"


def builtin_tokenizer_dir() -> Path:
    """Return the folder of the small tokenizer in the package (Qwen3's special tokens, Bridle's own
    training text).
    """
    return assets_dir() / "tokenizer"


def cache_dir() -> Path:
    """Return the folder of cached bundles and models: `$BRIDLE_CACHE`, else `~/.cache/bridle`."""
    given = os.environ.get("BRIDLE_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "bridle"

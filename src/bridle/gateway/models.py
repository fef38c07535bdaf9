"""Choice of a call's engine: the policy's, or another by the model's name or the kind of call.

Harnesses send any model name; the policy answers all but those of the `[models]` table. An entry
with an engine of its own serves judges, side calls and sub-agents that are not to be trained:
what it samples is captured and never trains (`other_model`), and no prompt of the policy extends
its tokens. An entry without one is the policy under another sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from bridle.config import ModelSpec, SamplingPolicy
from bridle.engines.base import Engine, EngineInfo, Templating
from bridle.errors import ConfigError
from bridle.gateway.budgets import SamplingPlan
from bridle.gateway.engine_prompts import EngineTemplate
from bridle.gateway.prompts import Prompts
from bridle.gateway.sampling import Sampler
from bridle.prompting.renderer import PromptRenderer
from bridle.types import Kind, ModelRequest

POLICY: Final = "policy"
"""Name of the policy among the engines, in metrics."""

REMEMBERED: Final = 1_000
"""Names whose entry is kept at hand."""


@dataclass(frozen=True, slots=True, eq=False)
class OtherModel:
    """An entry of the `[models]` table with what it names, not started."""

    name: str
    """Its key: a model name or a glob."""
    spec: ModelSpec
    engine: Engine | None = None
    """`None` = the policy's."""
    renderer: PromptRenderer | None = None
    """On the engine's tokenizer; `None` = the policy's, whose counts are then an estimate."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Model names and globs that this entry answers to."""
        return (self.name, *self.spec.match)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """An engine that answers calls, with its renderer."""

    other: str | None
    """Name of the engine that is not the policy; `None` = the policy."""
    engine: Engine
    info: EngineInfo
    renderer: PromptRenderer
    prompts: Prompts
    sampler: Sampler
    plan: SamplingPlan | None = None
    """In place of the session's; `None` = the session's."""
    model: str | None = None
    """The model's name on the engine's side; `None` = its only one."""

    def template_args(self, request: ModelRequest) -> Hashable:
        """Return the settings that shape a prompt besides messages and tools; never equal for two
        engines.
        """
        args = self.renderer.template_args(request)
        return args if self.other is None else (self.other, args)


@dataclass(slots=True)
class _Entry:
    patterns: tuple[str, ...]
    kinds: frozenset[Kind]
    served: Served
    names: list[str] = field(default_factory=list)


class Models:
    """Finds who answers. The policy is known first; `add` makes the others known, in order."""

    def __init__(self, policy: Served) -> None:
        self.policy = policy
        self._entries: list[_Entry] = []
        self._found: dict[tuple[str, Kind], Served] = {}

    def add(self, other: OtherModel, info: EngineInfo) -> None:
        """Add an entry whose engine is started; `info` are that engine's capabilities."""
        policy, spec = self.policy, other.spec
        own = other.engine is not None
        engine = other.engine or policy.engine
        renderer = other.renderer or policy.renderer
        sampler = policy.sampler
        if own:
            sampler = make_sampler(engine, info, renderer, lambda: info.version)
        served = Served(
            other=other.name if own else None,
            engine=engine,
            info=info,
            renderer=renderer,
            prompts=Prompts(renderer, context_length=info.context_length, pictures=info.pictures),
            sampler=sampler,
            plan=_plan(spec, own=own),
            model=spec.model,
        )
        named = [one for one in other.patterns if not _is_glob(one)]
        self._entries.append(_Entry(other.patterns, frozenset(spec.kinds), served, named))
        self._found.clear()

    def find(self, model: str, kind: Kind) -> Served:
        """Return the engine for a model name and a kind of call.

        By exact name, then by glob, then by kind, each in the table's order; else the policy.
        """
        found = self._found.get((model, kind))
        if found is None:
            found = next(self._candidates(model, kind), self.policy)
            if len(self._found) >= REMEMBERED:
                self._found.clear()
            self._found[model, kind] = found
        return found

    def _candidates(self, model: str, kind: Kind) -> Iterator[Served]:
        for entry in self._entries:
            if model in entry.patterns:
                yield entry.served
        for entry in self._entries:
            if any(fnmatchcase(model, pattern) for pattern in entry.patterns):
                yield entry.served
        for entry in self._entries:
            if kind in entry.kinds:
                yield entry.served

    def of(self, other: str | None) -> Served:
        """Return the engine of that name, or the policy's if there is none of it (any more)."""
        named = (entry.served for entry in self._entries if entry.served.other == other)
        return self.policy if other is None else next(named, self.policy)

    def template_args_of(self, other: str | None, request: ModelRequest) -> Hashable:
        """Return the settings that shape a prompt besides messages and tools, for an engine that
        may have been removed.
        """
        args = self.of(other).renderer.template_args(request)
        return args if other is None else (other, args)

    def names(self) -> list[str]:
        """Return the model names for the model list: the policy's, then every exact name of the
        table.
        """
        listed = [
            self.policy.info.model,
            *(name for entry in self._entries for name in entry.names),
        ]
        return list(dict.fromkeys(listed))


def make_policy(
    engine: Engine,
    info: EngineInfo,
    renderer: PromptRenderer,
    version: Callable[[], int],
    *,
    by_engine: bool = False,
) -> Served:
    """Return the engine entry of the policy, which answers every model name without an entry of its
    own.

    `by_engine` = the engine's own template renders the roots; it must be `Templating`.
    """
    sampler = make_sampler(engine, info, renderer, version)
    template = None
    if by_engine and info.token_in and isinstance(engine, Templating):
        template = EngineTemplate(engine, renderer)
    prompts = Prompts(
        renderer, template, context_length=info.context_length, pictures=info.pictures
    )
    return Served(None, engine, info, renderer, prompts, sampler)


def make_sampler(
    engine: Engine, info: EngineInfo, renderer: PromptRenderer, version: Callable[[], int]
) -> Sampler:
    """Return the sampler of an engine; `version` returns that of tokens whose engine
    reports none.
    """
    return Sampler(
        engine,
        mode=info.logprob_mode,
        version=version,
        decode=lambda ids: renderer.tokenizer.decode(ids.tolist(), skip_special_tokens=True),
    )


def check_models(models: Sequence[OtherModel]) -> None:
    """Raise `ConfigError` for a table in which a name occurs twice, or an entry that changes
    nothing.
    """
    seen: dict[str, str] = {}
    for model in models:
        if model.name == POLICY:
            raise ConfigError(
                f"models.{POLICY}: this name is the policy's own in metrics; take another"
            )
        for pattern in model.patterns:
            if pattern in seen:
                raise ConfigError(
                    f"models.{model.name}: {pattern!r} is already a name of {seen[pattern]!r}; "
                    "name each model once"
                )
            seen[pattern] = model.name
        if model.engine is None and model.spec.sampling is None:
            raise ConfigError(
                f"models.{model.name}: give `engines` or `sampling`; without them the entry "
                "changes nothing"
            )


def _plan(spec: ModelSpec, *, own: bool) -> SamplingPlan | None:
    """Return the sampling policy of an engine: one that does not train samples as it is asked
    to.
    """
    if spec.sampling is not None:
        return SamplingPlan(spec.sampling)
    return SamplingPlan(AS_ASKED) if own else None


AS_ASKED: Final = SamplingPolicy.model_validate(
    {
        name: {"mode": "respect"}
        for name in (
            *("temperature", "top_p", "top_k", "seed"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
            *("min_p", "logit_bias"),
        )
    }
)
"""Every field as the harness asks."""


def _is_glob(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")

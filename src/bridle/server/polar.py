"""Polar's `TaskRequest` -> our `Submission`.

Source: Polar's rollout server as its clients use it (fields and defaults noted November 2026). Its
names that mean something of ours are translated; what cannot be done here is refused with the name
of its field. A request that names no builder gets `per_request`, Polar's default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

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
from bridle.server.permits import Permits
from bridle.server.schemas import Submission, Terms
from bridle.types import JSON, Kind

HARNESSES = {"openhands_sdk": "openhands", "shell": "command"}
"""Polar's names of harnesses that have another one here."""

EVALUATORS = {"swebench_harness": "swebench"}

AGENT_S = 600.0
"""Polar's default of `timeout_seconds`."""


class PolarRuntime(Settings):
    """Its `RuntimeSpec`."""

    backend: str = "docker"
    image: str | None = None
    prepare: tuple[Action, ...] = ()
    eval_prepare: tuple[Action, ...] | None = None
    env: dict[str, str] = Field(default_factory=dict)
    network: str | None = None
    """Polar's default is `host`; here, where it is not named, `gateway_only`."""
    workdir: str | None = None
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=0)
    allow_internet: bool | None = None
    """Asks for network `open` where `network` is not named."""
    internet_volumes: tuple[Any, ...] = ()
    import_path: str | None = None
    kwargs: JSON = Field(default_factory=dict)
    direct_exec_init_command: Any = None


class PolarAgent(AgentSpec):
    """Its `AgentSpec`; `version`, `command` and `function` are ours."""

    custom_shell: str | None = None
    """Command line of harness `shell`."""


class PolarEvaluator(EvaluatorSpec):
    """Its `EvaluatorSpec`."""

    refresh_runtime: bool = True
    """Without effect: what is scored here is scored apart from the agent in any case."""


class PolarTask(Terms):
    """Its `TaskRequest`; `sampling`, `limits`, `budgets` and `train` are ours."""

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

    def refused(self, permits: Permits) -> Iterator[tuple[str, str]]:
        """Every field that has no translation here, with the reason."""
        runtime = self.runtime or PolarRuntime()
        if runtime.network == "host" and not permits.host_network:
            yield "runtime.network", "'host' is not permitted; the operator can permit it"
        if runtime.internet_volumes:
            yield "runtime.internet_volumes", "volumes are not permitted"
        if runtime.direct_exec_init_command is not None:
            yield "runtime.direct_exec_init_command", "is not known here; use `prepare`"
        if self.agent.custom_shell is not None and self.agent.harness != "shell":
            yield "agent.custom_shell", "goes with harness 'shell'"

    def submission(self) -> Submission:
        """As we take it; pydantic's `ValidationError` names a field that has a wrong value."""
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
            fields["evaluator"] = EvaluatorSpec.model_validate({**given, "strategy": strategy})
        return Submission.model_validate(fields)

    def _agent(self) -> JSON:
        agent = self.agent
        given = agent.model_dump(exclude_unset=True, exclude={"custom_shell"})
        if agent.custom_shell is not None:
            given["command"] = agent.custom_shell
        if agent.harness is not None:
            given["harness"] = HARNESSES.get(agent.harness, agent.harness)
        return given

    def _budgets(self) -> JSON:
        """`metadata.agent_timeout` is the run's own budget, `timeout_seconds` the session's."""
        own = self.metadata.get("agent_timeout")
        given = self.budgets.model_dump(exclude_unset=True)
        return {"agent_s": self.timeout_seconds if own is None else own} | given

    @staticmethod
    def _runtime(given: PolarRuntime) -> JSON:
        if given.network is not None:
            network = "open" if given.network == "host" else given.network
        else:
            network = "open" if given.allow_internet else "gateway_only"
        same = ("image", "prepare", "env", "workdir", "cpus", "memory_mb", "storage_mb", "kwargs")
        return {
            **{name: getattr(given, name) for name in same},
            "backend": given.import_path or given.backend,
            "eval_prepare": given.eval_prepare or (),
            "network": network,
            "gpus": given.gpus or None,
        }

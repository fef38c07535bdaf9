"""What a request says about the form of its answer, and what is done about it.

A schema for the answer is given to an engine that can sample under a grammar, unless the task wants
free samples: a grammar shapes the distribution, so its tokens train only where their logprobs are
of the constrained one (`trajectory.masks`). Whatever was asked and not enforced is sampled freely
and stands in the exchange's `unenforced`, by these names:

- `response_format`: the answer may not meet its schema;
- `tool_choice`: the tool that had to be called may not be called, or one is called where none may.
  No engine is asked to: their grammars for calls are not in the form of the model's own template.
"""

from __future__ import annotations

from bridle.engines.base import EngineInfo
from bridle.gateway.budgets import SamplingPlan
from bridle.types import JSON, ModelRequest, Reply


def grammar_of(request: ModelRequest, plan: SamplingPlan, info: EngineInfo) -> JSON | None:
    """The grammar to sample under; `None` = freely."""
    if request.response_schema is None or not (plan.enforces and info.grammar):
        return None
    return {"json_schema": request.response_schema}


def unenforced(request: ModelRequest, reply: Reply, *, constrained: bool) -> list[str]:
    """Names of what the request asked of its answer and nobody saw to."""
    found = []
    if request.response_schema is not None and not constrained:
        found.append("response_format")
    called = {call.name for call in reply.tool_calls}
    match request.tool_choice:
        case "auto":
            pass
        case "none":
            found += ["tool_choice"] if called else []
        case "required":
            found += [] if called else ["tool_choice"]
        case name:
            found += [] if called == {name} else ["tool_choice"]
    return found

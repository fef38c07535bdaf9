"""Constraints of a request on the form of its answer, and their enforcement.

A schema for the answer, or a tool that must be called, becomes a grammar for an engine that can
sample under one, unless the task wants free samples: a grammar shapes the distribution, so its
tokens train only where their logprobs are of the constrained one (`trajectory.masks`). Whatever was
asked and not enforced is sampled freely and stands in the exchange's `unenforced`, by these names:

- `response_format`: the answer may not meet its schema;
- `tool_choice`: the tool that had to be called was not called;
- `parallel_tool_calls`: only one call was wanted, and there are more;
- `min_p`, `logit_bias` or a penalty: the task's policy samples otherwise;
- `tool: TYPE`: only the provider can run this tool, so the model is not shown it;
- any other name is that of a field of the request that has no effect (`bridle.dialects.fields`).

Where no call is wanted (`none`, or no tools) none comes back, as no provider's does: the tools are
shown all the same, the sample is free, and what would be a call stays in the text as it was
sampled. The exchange's `calls_as_text` counts them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter

from bridle.dialects.noise import SERVER_TOOLS
from bridle.engines.base import EngineInfo
from bridle.errors import BridleError, EngineError, RequestError
from bridle.gateway.budgets import SamplingPlan
from bridle.prompting.renderer import PromptRenderer
from bridle.types import JSON, ModelRequest, Reply, Sampling

_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0}
_SHAPING = (*_NEUTRAL, "logit_bias")
_values = attrgetter(*_SHAPING)


def grammar_of(
    request: ModelRequest, plan: SamplingPlan, info: EngineInfo, renderer: PromptRenderer
) -> JSON | None:
    """Return the grammar to sample under; `None` = freely."""
    if not (plan.enforces and info.grammar):
        return None
    if request.tool_choice not in ("auto", "none"):
        tag = renderer.call_grammar(request.tools, request.tool_choice)
        return None if tag is None else {"structural_tag": tag}
    if request.response_schema is None:
        return None
    return {"json_schema": request.response_schema}


def is_for_calls(grammar: JSON | None) -> bool:
    """Return whether a grammar is the gateway's own, for calls: an engine may refuse it."""
    return grammar is not None and "structural_tag" in grammar


def takes_calls(request: ModelRequest) -> bool:
    """Return whether the reply may hold calls."""
    return bool(request.tools) and request.tool_choice != "none"


def without_calls(reply: Reply) -> Reply:
    """Return the reply of an engine that parsed calls where none was wanted: each is a line of
    text.
    """
    calls = [
        f'{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}' for c in reply.tool_calls
    ]
    text = "\n".join([reply.content, *calls] if reply.content else calls)
    return replace(reply, content=text, tool_calls=(), calls_as_text=len(calls))


def unenforced(
    request: ModelRequest, reply: Reply, effective: Sampling, *, constrained: bool
) -> list[str]:
    """Return names of what the request asked of its answer and nobody saw to."""
    extra, found = request.extra, []
    if "unenforced" in extra:
        found += extra["unenforced"]
    if extra.get("removed"):
        found += [f"tool: {kind}" for kind in extra["removed"].get(SERVER_TOOLS.name, ())]
    values = zip(_SHAPING, _values(request.sampling), _values(effective), strict=True)
    for name, asked, used in values:
        if asked is not None and asked not in (_NEUTRAL.get(name), used):
            found.append(name)
    if request.parallel_tool_calls is False and len(reply.tool_calls) > 1:
        found.append("parallel_tool_calls")
    calls = request.tool_choice not in ("auto", "none")
    if request.response_schema is not None and (calls or not constrained):
        found.append("response_format")
    if not calls:
        return found
    called = {call.name for call in reply.tool_calls}
    match request.tool_choice:
        case "required":
            found += [] if called else ["tool_choice"]
        case name:
            found += [] if called == {name} else ["tool_choice"]
    return found


def refusal(error: EngineError, request: ModelRequest) -> BridleError:
    """Return the engine's error; a grammar that it cannot use is reported as a mistake of the
    request.
    """
    if error.status == 400 and request.response_schema is not None:
        return RequestError("this model cannot answer in a given format", param="response_format")
    return error

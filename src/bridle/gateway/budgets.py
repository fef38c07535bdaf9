"""Sampling and budget of a call: the task's policy, the session's limits, the context left.

What was asked and what is set go in, effective values come out. Only a session's tokens are shared
between its calls: `TokenAccount` reserves them before each call and takes back what was not used.

A schema for the answer, or a tool that must be called, becomes a grammar for an engine that can
sample under one, unless the task wants free samples: a grammar shapes the distribution, so its
tokens train only where their logprobs are of the constrained one (`trajectory.builders`). Whatever
was asked and not enforced is sampled freely and stands in the exchange's `unenforced`, by these
names:

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

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

from bridle.config import FieldPolicy, Limits, SamplingPolicy
from bridle.dialects.fields import SERVER_TOOLS
from bridle.engines.base import EngineInfo
from bridle.errors import BridleError, EngineError, RequestError
from bridle.gateway import faults
from bridle.prompting.renderer import PromptRenderer
from bridle.types import JSON, SHAPING, ModelRequest, Reply, Sampling

FIELDS: Final = (*SHAPING, "seed")
"""The sampling fields that a policy decides one by one."""


class SamplingPlan:
    """A task's sampling policy, made ready once per session."""

    def __init__(self, policy: SamplingPolicy) -> None:
        self.max_output_tokens = policy.max_output_tokens
        self.enforces = policy.constraints == "enforce"
        """True if a request's schema constrains the samples, where the engine can."""
        self.refuses_orphans = policy.orphans == "refuse"
        """True if a tool result without a call is refused."""
        self.shows_reasoning = policy.reasoning == "show"
        """True if the harness is sent the model's reasoning."""
        self._fields: tuple[tuple[str, FieldPolicy], ...] = tuple(
            (name, getattr(policy, name)) for name in FIELDS
        )
        self._decided: tuple[Sampling | None, tuple[int, ...], dict[str, Any]] = (None, (), {})
        """The last request's sampling, the model's stop ids, and what follows from them alone."""
        self._effective: Sampling | None = None
        """The result of the last call under `_decided`; `None` = it has a seed of its own."""

    def effective(
        self, asked: Sampling, *, budget: int, stop_token_ids: tuple[int, ...], salt: str
    ) -> Sampling:
        """Return the sampling parameters for the engine: per field the policy's, its default, or
        the request's.

        `budget` becomes `max_tokens`; stop strings stay as asked; `stop_token_ids` (the model's
        own) are added to those asked for. `salt` (session and call) changes the policy's seed for
        each call, so that a group is not copies of one run.
        """
        known, stops, decided = self._decided
        if known is not asked or stops is not stop_token_ids:
            decided = {name: _decide(field, getattr(asked, name)) for name, field in self._fields}
            both = tuple(dict.fromkeys((*stop_token_ids, *asked.stop_token_ids)))
            decided |= {"stop": asked.stop, "stop_token_ids": both}
            self._decided, self._effective = (asked, stop_token_ids, decided), None
        if (last := self._effective) is not None and last.max_tokens == budget:
            return last
        seed = decided["seed"]
        if seed is not None and seed != asked.seed:
            seed = derived_seed(int(seed), salt)
        least = None if asked.min_tokens is None else min(asked.min_tokens, budget)
        made = Sampling(**{**decided, "seed": seed}, max_tokens=budget, min_tokens=least)
        self._effective = made if seed is None or seed == asked.seed else None
        return made


def _decide(field: FieldPolicy, asked: Any) -> Any:  # noqa: ANN401 - the field's own type
    match field.mode:
        case "override":
            return field.value
        case "default":
            return field.value if asked is None else asked
        case "respect":
            return asked


def derived_seed(seed: int, salt: str) -> int:
    """Return a seed of 31 bits that is a fixed function of `seed` and `salt`."""
    digest = hashlib.sha256(f"{seed}:{salt}".encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def output_budget(
    *,
    prompt_tokens: int,
    context_length: int,
    asked: int | None,
    task: int | None,
    minimum: int,
) -> int:
    """Return the most tokens that a call may sample: the least of what each party allows.

    What the session has left is reserved later (`TokenAccount`). Raises the context overflow when
    fewer than `minimum` tokens of the context are left.
    """
    left = context_length - prompt_tokens
    if left < minimum:
        raise faults.overflow(prompt_tokens, context_length)
    for amount in (asked, task):
        if amount is not None and amount < left:
            left = amount
    return left


def reached_limit(limits: Limits, *, turns: int, tokens: int, seconds: float) -> str | None:
    """Return the limit that a further call would exceed: `turns`, `tokens`, `seconds` or `None`.

    `turns` counts committed and running calls; `tokens` those of committed ones; `seconds` is the
    time since the first call.
    """
    if limits.max_turns is not None and turns >= limits.max_turns:
        return "turns"
    if limits.max_tokens is not None and tokens >= limits.max_tokens:
        return "tokens"
    if limits.max_seconds is not None and seconds >= limits.max_seconds:
        return "seconds"
    return None


def too_many_in_flight(limits: Limits, in_flight: int) -> RequestError | None:
    """Return the error for a call beyond `max_calls_in_flight`, which a client may retry; `None` =
    there is room.
    """
    if limits.max_calls_in_flight is None or in_flight < limits.max_calls_in_flight:
        return None
    return RequestError(
        f"the session already has {in_flight} calls in flight",
        status=429,
        code="session_busy",
        retry_after_s=faults.RETRY_AFTER_S,
    )


class TokenAccount:
    """The sampled tokens that one session may still have, over all its calls in flight.

    Without it each of several calls could sample all that is left. `limit` `None` = no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._freed: asyncio.Event | None = None
        """Set, and dropped, when a call ends; made by the first who waits."""
        self.reserved = 0
        """Tokens that calls in flight may still sample."""

    async def reserve(self, most: int, spent: Callable[[], int]) -> int:
        """Reserve `most` tokens, or all that are left if no other call holds any; at least 1.

        Waits while other calls hold the tokens that this one needs: they may not use all of them.
        `spent` returns the tokens of committed calls. Raises the error of a spent session when
        nothing is left.
        """
        while (taken := self.take(most, spent)) is None:
            self._freed = self._freed or asyncio.Event()
            await self._freed.wait()
        return taken

    def take(self, most: int, spent: Callable[[], int]) -> int | None:
        """Reserve tokens as `reserve` does, or raise its error; `None` = it would wait."""
        if self._limit is not None:
            left = self._limit - spent() - self.reserved
            if left <= 0 and not self.reserved:
                raise faults.spent("tokens")
            if left < most and self.reserved:
                return None
            most = min(most, left)
        self.reserved += most
        return most

    def release(self, reserved: int) -> None:
        """Release the tokens reserved for a call that ended, and wake the calls that wait for
        tokens. Those that it sampled are counted as spent before, at its commit.
        """
        self.reserved -= reserved
        if self._freed is not None:
            self._freed.set()
            self._freed = None


# ---- constraints on the form of the answer


_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0}
_SHAPING = (*_NEUTRAL, "logit_bias")
_values = attrgetter(*_SHAPING)
_UNASKED = (None,) * len(_SHAPING)


def grammar_of(
    request: ModelRequest, plan: SamplingPlan, info: EngineInfo, renderer: PromptRenderer
) -> JSON | None:
    """Return the grammar that constrains the reply; `None` = there is none."""
    if not (plan.enforces and info.grammar):
        return None
    if request.tool_choice not in ("auto", "none"):
        tag = renderer.call_grammar(request.tools, request.tool_choice)
        return None if tag is None else {"structural_tag": tag}
    if request.response_schema is None:
        return None
    return {"json_schema": request.response_schema}


def is_for_calls(grammar: JSON | None) -> bool:
    """Return whether a grammar was made by the gateway to force a tool call: an engine may refuse
    it.
    """
    return grammar is not None and "structural_tag" in grammar


def takes_calls(request: ModelRequest) -> bool:
    """Return whether the reply to a request may contain tool calls."""
    return bool(request.tools) and request.tool_choice != "none"


def without_calls(reply: Reply) -> Reply:
    """Return a reply whose tool calls, which the request did not allow, are lines of its text."""
    calls = [
        f'{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}' for c in reply.tool_calls
    ]
    text = "\n".join([reply.content, *calls] if reply.content else calls)
    return replace(reply, content=text, tool_calls=(), calls_as_text=len(calls))


def unenforced(
    request: ModelRequest, reply: Reply, effective: Sampling, *, constrained: bool
) -> list[str]:
    """Return the names of the request's demands on its reply that were not enforced."""
    extra, found = request.extra, []
    if "unenforced" in extra:
        found += extra["unenforced"]
    if extra.get("removed"):
        found += [f"tool: {kind}" for kind in extra["removed"].get(SERVER_TOOLS.name, ())]
    wanted = _values(request.sampling)
    if wanted != _UNASKED:
        for name, asked, used in zip(_SHAPING, wanted, _values(effective), strict=True):
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
    """Return the engine's error; a grammar that it cannot use is reported as the request's
    mistake.
    """
    if error.status == 400 and request.response_schema is not None:
        return RequestError("this model cannot answer in a given format", param="response_format")
    return error

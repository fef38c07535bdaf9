"""Sampling and budget of a call: the task's policy, the session's limits, the context left.

What was asked and what is set go in, effective values come out. Only a session's tokens are shared
between its calls: `TokenAccount` reserves them before each call and takes back what was not used.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, Final

from bridle.config import FieldPolicy, Limits, SamplingPolicy
from bridle.errors import RequestError
from bridle.gateway import faults
from bridle.types import SHAPING, Sampling

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

    def effective(
        self, asked: Sampling, *, budget: int, stop_token_ids: tuple[int, ...], salt: str
    ) -> Sampling:
        """Return the engine's parameters: per field the policy's, its default, or the request's.

        `budget` becomes `max_tokens`; stop strings stay as asked; `stop_token_ids` (the model's
        own) are added to those asked for. `salt` (session and call) makes a seed of ours another
        one for each call, so that a group is not copies of one run.
        """
        known, stops, decided = self._decided
        if known is not asked or stops is not stop_token_ids:
            decided = {name: _decide(field, getattr(asked, name)) for name, field in self._fields}
            both = tuple(dict.fromkeys((*stop_token_ids, *asked.stop_token_ids)))
            decided |= {"stop": asked.stop, "stop_token_ids": both}
            self._decided = asked, stop_token_ids, decided
        seed = decided["seed"]
        if seed is not None and seed != asked.seed:
            seed = derived_seed(int(seed), salt)
        least = None if asked.min_tokens is None else min(asked.min_tokens, budget)
        return Sampling(**{**decided, "seed": seed}, max_tokens=budget, min_tokens=least)


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

    What the session has left is reserved after this (`TokenAccount`).

    Raises the context overflow when fewer than `minimum` tokens of the context are left.
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

    `turns` counts committed calls and those in flight; `tokens` counts committed ones; `seconds`
    is the time since the first call.
    """
    if limits.max_turns is not None and turns >= limits.max_turns:
        return "turns"
    if limits.max_tokens is not None and tokens >= limits.max_tokens:
        return "tokens"
    if limits.max_seconds is not None and seconds >= limits.max_seconds:
        return "seconds"
    return None


def too_many_in_flight(limits: Limits, in_flight: int) -> RequestError | None:
    """Return the refusal of a call beyond `max_calls_in_flight`; it passes by itself."""
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
        """Reserve `most` tokens, or all that are left if nobody else holds any; at least 1.

        Waits while others hold what this call would need: they may not use all of it. `spent` tells
        the tokens of committed calls. Raises the refusal when nothing is left.
        """
        while (taken := self.take(most, spent)) is None:
            self._freed = self._freed or asyncio.Event()
            await self._freed.wait()
        return taken

    def take(self, most: int, spent: Callable[[], int]) -> int | None:
        """Reserve without waiting; `None` = `reserve` would wait."""
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
        """Release the reservation of a call that ended; `spent` counts its tokens from here on."""
        self.reserved -= reserved
        if self._freed is not None:
            self._freed.set()
            self._freed = None

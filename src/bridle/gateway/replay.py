"""Captured replies that are given again: the beginning of a fork.

A fork of a session starts its harness anew. A call whose prompt is, id for id, one of the captured
prompts gets the captured reply without the engine. When all replies before the fork point have been
given, the engine samples under exactly the prompt that was captured there. A prompt that differs in
nothing but named texts, which the harness writes anew in each run, stands for the captured one: its
exchange has the captured ids and those names. Any other is refused with its first different token.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bridle.capture.records import no_ids, no_logprobs
from bridle.engines.base import GenerateChunk
from bridle.errors import ConfigError, RequestError
from bridle.experts import KEY, unpack
from bridle.gateway.sampling import SampledReply
from bridle.harness_rules import VARYING, differing, likely_cause
from bridle.trajectory.graph import ExchangeNode, first_ids, grow
from bridle.trajectory.transcript import Transcript
from bridle.types import (
    JSON,
    DeliveryState,
    FinishReason,
    Kind,
    LogprobMode,
    first_difference,
)

if TYPE_CHECKING:
    from bridle.capture.records import Exchange, SessionCapture
    from bridle.gateway.recording import Prompted
    from bridle.harness_rules import Varying
    from bridle.prompting.prompt import PromptIds
    from bridle.types import Ids

DIFFERS: Final = "replay_differs"
"""Kind of the refusal of a prompt that is not the captured one."""

CONVERSATIONS: Final = frozenset({Kind.AGENT, Kind.SUBAGENT, Kind.COMPACTION})
"""Kinds of call that a harness must repeat; others (titles, probes) may come at any time."""

BEFORE, AFTER = 24, 8
"""Ids around the first difference that an error shows."""

AROUND: Final = 64
"""Ids before the first difference in which a named text may begin."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One call of the session that is forked."""

    node: ExchangeNode
    call_ids: tuple[str, ...]
    """Ids of the calls in its reply, which the harness sends back."""

    @property
    def exchange(self) -> Exchange:
        """Exchange with the captured reply."""
        return self.node.exchange

    def sample(self, decode: Callable[[Ids], str]) -> SampledReply:
        """Return the captured reply as if it had been sampled now."""
        exchange = self.exchange
        last = GenerateChunk(
            no_ids(),
            no_logprobs(),
            exchange.finish_reason,
            stop_text=stop_text_of(exchange, decode),
            cached_tokens=exchange.extra.get("cached_tokens", 0),
        )
        return SampledReply(
            output_ids=exchange.output_ids,
            logprobs=exchange.logprobs,
            finish=exchange.finish_reason,
            versions=exchange.versions,
            last=last,
            engine_prompt=None,
            break_position=None,
            resumed=0,
            extra=exchange.extra.get("engine", {}) | _experts(exchange),
            replayed=exchange.exchange_id,
            call_ids=self.call_ids,
        )


def stop_text_of(exchange: Exchange, decode: Callable[[Ids], str]) -> str | None:
    """Return the stop string that ended a captured reply; `None` = none did."""
    stops = exchange.sampling.stop
    text = decode(exchange.output_ids) if stops else ""
    return next((stop for stop in stops if stop in text), None)


def _experts(exchange: Exchange) -> JSON:
    return {} if exchange.experts is None else {KEY: unpack(exchange.experts)}


class Replay:
    """The captured beginning of one session; lives as long as the session that repeats it."""

    def __init__(
        self,
        session_id: str,
        replies: Sequence[Captured],
        following: Sequence[ExchangeNode],
        noise: Sequence[Varying] = (),
    ) -> None:
        """`replies` of session `session_id` are given again; `following` came after them, in order
        of commit.
        """
        self._origin: JSON = {"session": session_id, "at": len(replies)}
        self._left = list(replies)
        self._noise = (*noise, *VARYING)
        self._names: set[str] = set()
        """Of the texts that prompts differed in."""
        self._following = tuple(following)
        self._given = 0
        self._forked = False
        """True if a call came at the fork point."""

    def take(
        self, prompted: Prompted, kind: Kind, decode: Callable[[Ids], str]
    ) -> tuple[Prompted, Captured | None]:
        """Return the captured reply to a prompt, and the prompt; `None` = the engine is to sample.

        The prompt is the captured one where they differ only in texts that are known to vary.
        `RequestError` for a prompt that was not captured, at the fork point or before.
        """
        prompt = prompted.prompt
        for place, one in enumerate(self._left):
            if one.exchange.prompt_digest == prompt.digest:
                del self._left[place]
                self._given += 1
                return prompted, one
        if self._forked or kind not in CONVERSATIONS:
            return prompted, None
        replies = [one for one in self._left if one.exchange.kind in CONVERSATIONS]
        if not replies:
            known = {node.exchange.prompt_digest for node in self._following}
            self._forked = not known or prompt.digest in known
            if self._forked:
                return prompted, None
        expected = {one.node: one for one in replies} or dict.fromkeys(self._following)
        for node, captured in expected.items():
            if (same := self._equivalent(prompted, node, decode)) is not None:
                self._names.update(same.noise)
                if captured is None:
                    self._forked = True
                else:
                    self._left.remove(captured)
                    self._given += 1
                return same, captured
        raise _differs(prompt, next(iter(expected)), self._given, decode)

    def _equivalent(
        self, prompted: Prompted, node: ExchangeNode, decode: Callable[[Ids], str]
    ) -> Prompted | None:
        """Return the captured prompt of `node`, if `prompted` differs from it in named texts
        only.
        """
        old, new = first_ids(node, node.prompt_length), prompted.prompt.array()
        kept, at = prompted.prompt.kept, first_difference(old, new)
        if at < kept or prompted.shown is not None or prompted.images:
            return None
        begin = max(0, at - AROUND)
        names = differing(decode(old[begin:]), decode(new[begin:]), self._noise)
        if names is None:
            return None
        return replace(prompted, prompt=prompted.prompt.instead(old[kept:]), noise=names)

    def put_back(self, captured: Captured) -> None:
        """Put back a captured reply whose call failed before its commit: the harness may
        ask again.
        """
        insort(self._left, captured, key=lambda one: one.exchange.index)
        self._given -= 1

    def facts(self) -> JSON:
        """Return the session and reply that the fork begins at, how many replies were replayed and
        how many not asked for, and how exactly the fork repeats the session.
        """
        left = sum(one.exchange.kind in CONVERSATIONS for one in self._left)
        met = not left and (self._forked or not self._following)
        verdict = ("equivalent" if self._names else "exact") if met else "refused"
        noise = sorted(self._names)
        given = {"replayed": self._given, "left": left, "verdict": verdict, "noise": noise}
        return self._origin | given


def replay_of(capture: SessionCapture, at: int, noise: Sequence[Varying] = ()) -> Replay:
    """Return a replay of the policy's first `at` delivered replies in a captured session.

    `ConfigError` if it has fewer, or if one of them cannot be given again.
    """
    session_id = capture.session.session_id
    transcript = Transcript(capture.exchanges, capture.bodies)
    shown = _received(capture)
    if at > len(shown):
        raise ConfigError(
            f"fork: session {session_id} has {len(shown)} replies, fewer than at = {at}; give a "
            "smaller `at`"
        )
    for node in shown[:at]:
        if (reason := _unfit(node)) is not None:
            message = f"fork: call {node.exchange.index} of session {session_id}: {reason}"
            raise ConfigError(message)
    return Replay(
        session_id,
        [Captured(node, _call_ids(transcript, node.exchange)) for node in shown[:at]],
        [node for node in shown[at:] if node.exchange.kind in CONVERSATIONS and _is_exact(node)],
        noise,
    )


def replies_of(capture: SessionCapture) -> tuple[int, int]:
    """Return after how many of a session's replies a fork can begin at most, and how many of its
    replies were themselves replayed.
    """
    shown = _received(capture)
    return len(fork_points(capture)), sum("replayed" in node.exchange.extra for node in shown)


def fork_points(capture: SessionCapture) -> dict[str, int]:
    """Return the exchanges after which a fork can begin, each with the number of replies to
    replay.
    """
    shown = itertools.takewhile(lambda node: not _unfit(node), _received(capture))
    return {node.exchange.exchange_id: at for at, node in enumerate(shown, 1)}


def _received(capture: SessionCapture) -> list[ExchangeNode]:
    """Return the exchanges of the policy whose replies the harness received, in order of
    capture.
    """
    graph = grow(capture.session.session_id, capture.exchanges)
    nodes = sorted(graph.nodes.values(), key=lambda node: node.exchange.index)
    of_policy = [node for node in nodes if not node.exchange.extra.get("other_model")]
    return [node for node in of_policy if _was_received(capture, node.exchange)]


def _was_received(capture: SessionCapture, exchange: Exchange) -> bool:
    delivery = capture.deliveries.get(exchange.exchange_id)
    return delivery is not None and delivery.state is DeliveryState.DELIVERED


def _is_exact(node: ExchangeNode) -> bool:
    """Return whether its prompt is known id for id."""
    return node.sound and not node.exchange.extra.get("break")


def _unfit(node: ExchangeNode) -> str | None:
    """Return the reason why a reply cannot be given again; `None` = it can."""
    if not _is_exact(node):
        return "its prompt is not known exactly"
    if node.exchange.finish_reason is FinishReason.ABORT:
        return "its reply broke off"
    if node.exchange.logprob_mode is LogprobMode.NONE:
        return "it was captured without logprobs"
    return None


def _call_ids(transcript: Transcript, exchange: Exchange) -> tuple[str, ...]:
    messages = transcript.reply(exchange)
    return tuple(call.id or "" for message in messages for call in message.tool_calls)


def _differs(
    prompt: PromptIds, node: ExchangeNode, given: int, decode: Callable[[Ids], str]
) -> RequestError:
    old, new = first_ids(node, node.prompt_length), prompt.array()
    at = first_difference(old, new)
    around, behind = slice(max(0, at - BEFORE), at + AFTER), slice(max(0, at - AROUND), None)
    cause = likely_cause(decode(old[behind]), decode(new[behind]))
    return RequestError(
        f"the fork's call {given + 1} is not the captured call {node.exchange.index}: its prompt "
        f"differs from token {at} of {len(old)} on: captured {decode(old[around])!r}, "
        f"now {decode(new[around])!r}" + (f"; likely cause: {cause}" if cause else ""),
        code=DIFFERS,
    )

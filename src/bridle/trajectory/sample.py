"""Traces and trajectories: what a trainer receives.

All arrays of a trace are aligned; the lengths are checked once, here. `prompt_ids + response_ids`
are exactly ids that the engine was given and sampled (law 1). Images on a trace are bytes for
trainers that take them, and refused for those that do not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from bridle.errors import TrainingError
from bridle.types import JSON, Ids, Logprobs

if TYPE_CHECKING:
    import numpy.typing as npt


class MaskReason(IntEnum):
    """Reasons why a token of a trace trains or does not; one `uint8` per response token."""

    TRAINED = 0
    """Sampled by the policy and delivered to the harness; trains here."""
    PROMPT = 1
    """Given to the model: user text, tool results, template scaffolding."""
    CONTEXT = 2
    """Sampled, but trains in another trace."""
    KIND = 3
    """Sampled by a call of a kind that the task does not train (side calls)."""
    ABANDONED = 4
    """Sampled, but no harness received it."""
    CUT = 5
    """Sampled, but the harness received only a part of the reply."""
    SUPERSEDED = 6
    """Lost on its way to the harness, which asked for it again."""
    CONSTRAINED = 7
    """Sampled under a grammar, without logprobs of the constrained distribution."""
    ABORTED = 8
    """The engine gave the call up."""
    TRUNCATED = 9
    """Removed by a length limit of the builder."""
    UNPAIRED = 10
    """No usable logprob belongs to it."""
    BROKEN = 11
    """The context that it was sampled under is not known: a check of token identity failed."""
    UNRESOLVED = 12
    """Nothing shows whether a harness received it: no delivery record, no later request."""
    OTHER_MODEL = 13
    """Sampled by an engine that is not the policy (the gateway's `[models]` table)."""
    REJECTED = 14
    """Read by the harness, which asked the same again or continued from another answer; only where
    the task says `rejected = "mask"`."""
    REPLAYED = 15
    """Sampled for another session, of which this one is a fork; trains there."""

    @property
    def key(self) -> str:
        """Name of the mask reason in JSON: lower case."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One training sequence."""

    trace_id: str
    """Stable: session id, builder and position."""
    prompt_ids: Ids
    """Ids before the first sampled token, shape (P,), int32."""
    response_ids: Ids
    """Ids from the first sampled token on, shape (R,), int32; not all are sampled."""
    loss_mask: npt.NDArray[np.uint8]
    """1 = trains; shape (R,)."""
    response_logprobs: Logprobs
    """Logprob of each token that trains, 0.0 elsewhere; shape (R,), float32."""
    versions: npt.NDArray[np.int32]
    """Policy version that sampled each token, -1 elsewhere; shape (R,)."""
    reasons: npt.NDArray[np.uint8]
    """`MaskReason` of each response token; shape (R,)."""
    exchange_ids: tuple[str, ...]
    """The exchanges along the path, root first."""
    turn_ends: tuple[int, ...]
    """For each exchange, the end of its sampled tokens in `response_ids`."""
    finish_reason: str
    logprob_mode: str
    prompt_messages: Sequence[JSON] = field(default_factory=list)
    """In the form of OpenAI Chat; `bridle.trajectory.transcript.Messages` are read when used."""
    response_messages: Sequence[JSON] = field(default_factory=list)
    turn_messages: Sequence[int] = ()
    """For each exchange, the place of its reply in `response_messages`; read when used. Empty in a
    trace that was read from a file."""
    tools: Sequence[JSON] | None = None
    """`None` = none were sent."""
    reward: float | None = None
    metadata: JSON = field(default_factory=dict)
    routed_experts: npt.NDArray[np.int16] | None = None
    """Experts that each token went to in each layer, of all ids; shape (P + R, layers, top_k), -1
    where not known, as at the last token; `None` = a model without, or an engine that reported none
    (`bridle.experts`)."""
    token_rewards: npt.NDArray[np.float32] | None = None
    """Reward of each response token, where an evaluator gave them; shape (R,)."""
    media: Sequence[JSON] = ()
    """Images and other media on the path, in order: `digest`, `media_type`, and, if the engine
    reported them, the placeholder's `start` (in `prompt_ids + response_ids`) and `length`, its
    `grid`, and whatever else it said. Read when used, as messages are."""

    def __post_init__(self) -> None:
        """Check that all response arrays have the same length."""
        lengths = {
            len(self.response_ids),
            len(self.loss_mask),
            len(self.response_logprobs),
            len(self.versions),
            len(self.reasons),
            len(self.reasons if self.token_rewards is None else self.token_rewards),
        }
        if len(lengths) != 1:
            message = f"trace {self.trace_id}: response arrays of different lengths {lengths}"
            raise ValueError(message)
        if self.routed_experts is not None and len(self.routed_experts) != self.size:
            rows = len(self.routed_experts)
            raise ValueError(
                f"trace {self.trace_id} has {rows} rows of experts, but {self.size} token ids"
            )

    @classmethod
    def plain(
        cls, trace_id: str, prompt_ids: Ids, response_ids: Ids, loss_mask: npt.NDArray[np.uint8]
    ) -> Trace:
        """Return a trace of ids and a loss mask alone, without logprobs, versions and turns.

        Its other arrays are read-only, and take no memory.
        """
        size = len(response_ids)
        return cls(
            trace_id,
            prompt_ids,
            response_ids,
            loss_mask,
            response_logprobs=np.broadcast_to(np.float32(0), size),
            versions=np.broadcast_to(np.int32(-1), size),
            reasons=np.broadcast_to(np.uint8(MaskReason.PROMPT), size),
            exchange_ids=(),
            turn_ends=(),
            finish_reason="stop",
            logprob_mode="none",
        )

    @property
    def ids(self) -> Ids:
        """Prompt and response in one array, shape (P + R,), int32."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def size(self) -> int:
        """Number of ids of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    def trained_turns(self) -> dict[int, int]:
        """Return the turns that train: their index in `exchange_ids`, mapped to the position (in
        the response) of their last token that trains.
        """
        found, start = {}, 0
        for turn, end in enumerate(self.turn_ends):
            (trained,) = self.loss_mask[start:end].nonzero()
            if len(trained):
                found[turn] = start + int(trained[-1])
            start = max(start, end)
        return found

    def cut(self, end: int, begin: int = 0) -> Trace:
        """Return the trace with the first `end` tokens of its response, and without the first
        `begin` of its prompt. Turns that end later end at the cut.
        """
        rewards, rows = self.token_rewards, self.routed_experts
        return replace(
            self,
            prompt_ids=self.prompt_ids[begin:],
            response_ids=self.response_ids[:end],
            loss_mask=self.loss_mask[:end],
            response_logprobs=self.response_logprobs[:end],
            versions=self.versions[:end],
            reasons=self.reasons[:end],
            turn_ends=tuple(min(at, end) for at in self.turn_ends),
            routed_experts=None if rows is None else rows[begin : len(self.prompt_ids) + end],
            token_rewards=None if rewards is None else rewards[:end],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """All traces of a session, with its reward and its build statistics."""

    session_id: str
    status: str
    """COMPLETED, TIMEOUT, ERROR or CANCELLED; RUNNING if the session has no outcome yet."""
    traces: tuple[Trace, ...]
    reward: float | None
    error: str | None
    metadata: JSON
    """`metadata["stats"]` holds the law numbers (see `docs/reference/trajectory.md`)."""


def nothing_trains(groups: int, sessions: Sequence[Trajectory]) -> str:
    """Return an error text: `groups` groups in a row train nothing, with the sessions' statuses,
    rewards and most frequent error.
    """
    status = Counter(str(session.status) for session in sessions)
    rewards = Counter("unknown" if s.reward is None else f"{s.reward:g}" for s in sessions)
    errors = Counter(session.error for session in sessions if session.error)
    example = f"; most often: {errors.most_common(1)[0][0]}" if errors else ""
    return (
        f"{groups} groups in a row train nothing: of {len(sessions)} sessions "
        f"{dict(status)}, rewards {dict(rewards.most_common(5))}{example}"
    )


# ---- images


def refuse_images(trainer: str, session: Trajectory) -> None:
    """Raise `TrainingError` if a session has images, whose pixels `trainer` would not get."""
    if any(trace.media for trace in session.traces):
        raise TrainingError(
            f"session {session.session_id} has images, whose pixels {trainer} would not get: use "
            "tasks without images, or a trainer that takes them from Bridle, such as verl"
        )


def images_of(trace: Trace) -> list[bytes]:
    """Return the image files of a trace, in the order of their placeholders in the prompt.

    They are read from the data URLs of its messages. `TrainingError` for one that is missing.
    """
    if not trace.media:
        return []
    files = {hashlib.sha256(file).hexdigest(): file for file in _files(trace)}
    missing = [one for one in trace.media if one["digest"] not in files]
    if missing:
        raise TrainingError(
            f"trace {trace.trace_id}: {len(missing)} of {len(trace.media)} images are not in its "
            f"messages (the first is {missing[0]})"
        )
    media = list(trace.media)
    if all("start" in one for one in media):  # a prompt may have results in another order
        media.sort(key=itemgetter("start"))
    return [files[one["digest"]] for one in media]


def _files(trace: Trace) -> Iterator[bytes]:
    for message in (*trace.prompt_messages, *trace.response_messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            url = (part.get("image_url") or {}).get("url") or ""
            head, _, data = url.partition(",")
            if head.startswith("data:") and head.endswith(";base64"):
                try:
                    yield base64.b64decode(data, validate=True)
                except binascii.Error:
                    continue  # it stays missing

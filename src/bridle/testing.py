"""Shipped fakes: small real implementations for tests and benchmarks, ours and yours.

Nothing in Bridle imports this file.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from bridle.bridges.base import SessionGroup
from bridle.scripted.engine import ScriptedEngine
from bridle.scripted.script import make_script
from bridle.scripted.tokenizer import load_tokenizer
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.types import JSON

T = TypeVar("T")


def scripted_engine(
    turns: Sequence[JSON] = (),
    *,
    conversations: Sequence[JSON] = (),
    tokenizer: str | None = None,
    **fields: object,
) -> ScriptedEngine:
    """Return a scripted engine from Python values in place of a file.

    `turns` play for every request that none of `conversations` fits; `fields` are the script's
    other fields (`model`, `context_length`). Raises `ConfigError` as a file would.
    """
    rest = [{"turns": list(turns)}] if turns else []
    script = make_script({"conversations": [*conversations, *rest], **fields}, "script")
    return ScriptedEngine(script, tokenizer=load_tokenizer(tokenizer))


# ---- conformance of trainers' bridges

Part = tuple[str, Sequence[int], MaskReason, int | Sequence[int]]
"""Call, ids, reason, and the policy version of all or of each; no call for ids that were given."""

_PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGM4oaEBAALUARkFUI+kAAAAAElFTkSuQmCC"
)
"""A picture of one pixel, base64."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRow:
    """One training sequence, read out of a trainer's own tensors. All sequences are aligned."""

    session_id: str
    input_ids: Sequence[int]
    mask: Sequence[int | bool]
    """1 = the loss is computed on it."""
    logprobs: Sequence[float]
    versions: Sequence[int] | None = None
    """`None` = this trainer has none per token."""
    weight: float | None = None
    """`None` = this trainer has none per row."""


@dataclass(frozen=True, slots=True)
class Conformance:
    """Differences between the tokens that a trainer trains and those that it should."""

    captured: int
    """Sampled tokens of all sessions, each counted once."""
    excluded: dict[str, int]
    """Tokens that must not train, by reason; `unknown` = the session has no reward."""
    trained: int
    """Tokens that the trainer trains."""
    missing: dict[str, int]
    """Session -> tokens that should train and do not."""
    extra: dict[str, int]
    """Session -> tokens that train and should not, or under another context."""
    wrong: list[str]
    """Sessions with a wrong logprob, version or sum of weights, and which."""

    def check(self, missing: dict[str, int] | None = None) -> None:
        """Raise `AssertionError` unless exactly the tokens `missing` are left out, and all others
        are right.
        """
        if (self.missing, self.extra, self.wrong) != (missing or {}, {}, []):
            raise AssertionError(self)
        left = sum(self.excluded.values()) + sum(self.missing.values())
        if self.trained != self.captured - left:
            raise AssertionError(self)


def trainer_conformance(groups: Sequence[SessionGroup], rows: Iterable[TrainedRow]) -> Conformance:
    """Compare a trainer's rows with the sessions that they were made from, token by token.

    A token is the same only if all ids before it are, so its context is compared as well.
    """
    sampled: dict[tuple[str, bytes], tuple[float, int]] = {}
    excluded: dict[tuple[str, bytes], str] = {}
    for session in (one for group in groups for one in group.sessions):
        for trace in session.traces:
            ids = trace.ids.astype(np.int64)
            for at in np.flatnonzero(trace.reasons != MaskReason.PROMPT).tolist():
                key = session.session_id, ids[: len(trace.prompt_ids) + at + 1].tobytes()
                if trace.loss_mask[at] and session.reward is not None:
                    sampled[key] = float(trace.response_logprobs[at]), int(trace.versions[at])
                else:
                    unknown = session.reward is None
                    excluded[key] = "unknown" if unknown else MaskReason(trace.reasons[at]).key
    excluded = {key: reason for key, reason in excluded.items() if key not in sampled}
    trained: Counter[tuple[str, bytes]] = Counter()
    wrong: list[str] = []
    weights: dict[str, float] = {}
    for row in rows:
        ids = np.asarray(row.input_ids, np.int64)
        mask = np.asarray(row.mask, bool)
        if row.weight is not None and mask.any():
            weights[row.session_id] = weights.get(row.session_id, 0.0) + row.weight
        for at in np.flatnonzero(mask).tolist():
            key = row.session_id, ids[: at + 1].tobytes()
            trained[key] += 1
            logprob, version = sampled.get(key, (row.logprobs[at], -1))
            if not abs(logprob - row.logprobs[at]) <= 1e-6:  # NaN is wrong too
                wrong.append(f"{row.session_id}: logprob {row.logprobs[at]}, not {logprob}")
            if key in sampled and row.versions is not None and row.versions[at] != version:
                wrong.append(f"{row.session_id}: version {row.versions[at]}, not {version}")
    wrong += [f"{one}: weights sum to {w}" for one, w in weights.items() if not abs(w - 1) <= 1e-6]
    should = Counter(sampled.keys())
    return Conformance(
        captured=len(sampled) + len(excluded),
        excluded=dict(Counter(excluded.values())),
        trained=trained.total(),
        missing=dict(Counter(key[0] for key in (should - trained).elements())),
        extra=dict(Counter(key[0] for key in (trained - should).elements())),
        wrong=wrong,
    )


def trainer_sessions() -> list[SessionGroup]:
    """Return three groups of four sessions, one of each shape that a trainer's bridge meets."""
    yes, given, context = MaskReason.TRAINED, MaskReason.PROMPT, MaskReason.CONTEXT
    first: Part = ("first", [10, 11, 12], yes, 3)
    tool: Part = ("", [20, 21], given, -1)
    last: Part = ("last", [30, 31, 32, 33], yes, 3)
    whole = _trace("main", [1, 2, 3], first, tool, last)
    fork = _trace("fork", [1, 2, 3], ("first", [10, 11, 12], context, 3), ("", [22], given, -1),
                  ("other", [34, 35], yes, 3))  # fmt: skip
    helpers = [
        _trace(f"helper{n}", [5, 6 + n], (f"sub{n}", [40, 41 + n], yes, 3),
               metadata={"kind": "subagent", "agent": "helper"})
        for n in range(2)
    ]  # fmt: skip
    cut = _trace("main", [1, 2, 3], first, tool, ("last", [30, 31], MaskReason.CUT, 3))
    digest = hashlib.sha256(base64.b64decode(_PNG)).hexdigest()
    image: JSON = {"digest": digest, "media_type": "image/png", "start": 1, "length": 1}
    picture = _trace("main", [1, 2, 3], first, media=(image,))
    shown: JSON = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PNG}"}}
    picture = replace(picture, prompt_messages=[{"role": "user", "content": [shown]}])
    drift = _trace("main", [1, 2, 3], ("first", [10, 11, 12], MaskReason.BROKEN, 3), tool, last)
    mixed = _trace("main", [1, 2, 3], first, tool, ("last", [30, 31, 32, 33], yes, [3, 3, 4, 4]))
    refused = _trace("again", [1, 2, 3], ("refused", [13, 14], MaskReason.REJECTED, 3))
    compacted = _trace("compacted", [1, 7, 8], ("third", [36, 37, 38], yes, 4))
    groups = {
        "a": (_session("plain", 1.0, whole), _session("branches", 0.0, whole, fork),
              _session("compaction", 1.0, whole, compacted),
              _session("subagents", 0.5, whole, *helpers)),
        "b": (_session("partial", 1.0, cut, status="TIMEOUT"),
              _session("truncated", 0.0, _trace("main", [1, 2, 3], first, finish="length")),
              _session("images", 1.0, picture),
              _session("drift", 0.0, drift)),
        "c": (_session("versions", 1.0, mixed), _session("rejected", 0.0, whole, refused),
              _session("unscored", None, whole), _session("failed", None, status="ERROR")),
    }  # fmt: skip
    return [SessionGroup(task_id, sessions) for task_id, sessions in groups.items()]


def _session(
    name: str, reward: float | None, *traces: Trace, status: str = "COMPLETED"
) -> Trajectory:
    error = None if status == "COMPLETED" else "it ended early"
    return Trajectory(name, status, traces, reward, error, {"task_id": "t", "train": ["agent"]})


def _trace(
    name: str,
    prompt: Sequence[int],
    *parts: Part,
    finish: str = "stop",
    metadata: JSON | None = None,
    media: Sequence[JSON] = (),
) -> Trace:
    ids = np.array([one for _, of, _, _ in parts for one in of], np.int32)
    reasons = np.repeat([part[2] for part in parts], [len(part[1]) for part in parts])
    mask = (reasons == MaskReason.TRAINED).astype(np.uint8)
    versions = [np.broadcast_to(version, len(of)) for _, of, _, version in parts]
    ends = np.cumsum([len(part[1]) for part in parts]).tolist()
    said = [{"role": "assistant", "content": "hm"} if part[0] else
            {"role": "tool", "tool_call_id": "c", "content": "ok"} for part in parts]  # fmt: skip
    return Trace(
        trace_id=name,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=ids,
        loss_mask=mask,
        response_logprobs=np.where(mask, -(ids % 16) / 16 - 0.125, 0).astype(np.float32),
        versions=np.concatenate(versions).astype(np.int32),
        reasons=reasons.astype(np.uint8),
        exchange_ids=tuple(part[0] for part in parts if part[0]),
        turn_ends=tuple(end for part, end in zip(parts, ends, strict=True) if part[0]),
        finish_reason=finish,
        logprob_mode="processed",
        prompt_messages=[{"role": "user", "content": "go"}],
        response_messages=said,
        metadata=metadata or {},
        media=media,
    )

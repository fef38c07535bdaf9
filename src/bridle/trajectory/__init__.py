"""Trajectories: pure functions of what capture holds.

`rebuild(capture)` is the one way from facts to a trajectory, live and offline: `graph` grows the
conversation and checks token identity, `masks` says why each sampled token trains or not,
`builders` choose paths and put the arrays together, `transcript` adds the messages, `stats` counts.
`packing` lays traces out as one tree, `sample` holds the values that come out, `result` their JSON,
`credit` turns rewards into advantages, `tree` draws a conversation for people.

Nothing here does I/O or knows the time. The same facts give the same bytes, in whatever order the
exchanges were captured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from pydantic import Field, ValidationError

from bridle.capture.records import Delivery, Exchange, Outcome, SessionCapture, SessionRecord
from bridle.config import BuilderSpec, Settings, Task, explain
from bridle.errors import ConfigError
from bridle.plugins import load
from bridle.trajectory.builders import BUILDERS, Builder, Plan, assemble, masked, shorten
from bridle.trajectory.builders import tree as tree_paths
from bridle.trajectory.graph import Graph, grow, order_of
from bridle.trajectory.masks import Marks, mark
from bridle.trajectory.packing import pack
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.trajectory.stats import measure
from bridle.trajectory.transcript import Transcript
from bridle.types import JSON, Kind, SessionStatus

__all__ = ["BUILDERS", "MaskReason", "Trace", "Trajectory", "build", "rebuild", "with_outcome"]

DEFAULT_TRAIN: tuple[Kind, ...] = Task.model_fields["train"].default


class BuilderConfig(Settings):
    """`BuilderSpec.config` of the builders that come with Bridle."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest trace, prompt and response together; `None` = any length."""
    overlong: Literal["truncate", "mask", "drop"] = "truncate"
    """What becomes of a longer one: its last turns go, nothing in it trains, or it goes."""
    end_of_turn_token_id: int | None = None
    """Taken from clients of Polar, whose builder needs it; ids here are exact without it."""


def rebuild(
    capture: SessionCapture,
    *,
    builder: BuilderSpec | None = None,
    train: Collection[Kind] | None = None,
) -> Trajectory:
    """A session's trajectory from everything that capture holds of it.

    `builder` and `train` are those of the session's own metadata where they are `None` (the
    defaults of a task if it has none either). Raises `ConfigError` for an unknown builder or
    setting; faults in the exchanges become exclusions and `breaks`, never an error.
    """
    session = capture.session
    if builder is None:
        try:
            builder = BuilderSpec.model_validate(session.metadata.get("builder") or {})
        except ValidationError as error:
            raise explain(error, f"session {session.session_id}: builder") from None
    if train is None:
        train = _kinds(session)
    return build(
        capture.session,
        capture.exchanges,
        capture.deliveries,
        capture.outcome,
        builder=builder,
        train=train,
        bodies=capture.bodies,
    )


def _kinds(session: SessionRecord) -> Collection[Kind]:
    """Which kinds of call train, as the session's metadata says."""
    named = session.metadata.get("train")
    if named is None:
        return DEFAULT_TRAIN
    try:
        return [Kind(kind) for kind in named]
    except ValueError as error:
        message = f"session {session.session_id}: train: {error}; known: {', '.join(Kind)}"
        raise ConfigError(message) from None


def build(
    session: SessionRecord,
    exchanges: Sequence[Exchange],
    deliveries: Mapping[str, Delivery],
    outcome: Outcome | None,
    *,
    builder: BuilderSpec,
    train: Collection[Kind],
    bodies: Mapping[bytes, bytes] | None = None,
) -> Trajectory:
    """A session's trajectory. `bodies` give the traces their messages; without them, none.

    Linear in the new tokens of the session plus the length of its traces. Raises `ConfigError`.
    """
    choose: Builder = load(builder.strategy, BUILDERS, what="builder")
    try:
        config = BuilderConfig.model_validate(builder.config)
    except ValidationError as error:
        raise explain(error, f"builder {builder.strategy}: config") from None
    graph = grow(session.session_id, exchanges)
    marks = mark(graph, exchanges, deliveries, train)
    plans = sorted(choose(graph, marks), key=_place)
    transcript = None if bodies is None else Transcript(exchanges, bodies)
    traces, truncated = _traces(session, builder.strategy, config, graph, marks, plans, transcript)
    stats = measure(graph, marks, exchanges, traces, truncated)
    metadata = _metadata(session, builder, train, stats, plans)
    if choose is tree_paths:
        metadata["tree"] = _tree(traces)
    trajectory = Trajectory(
        session.session_id, SessionStatus.RUNNING, tuple(traces), None, None, metadata
    )
    return trajectory if outcome is None else with_outcome(trajectory, outcome)


def with_outcome(trajectory: Trajectory, outcome: Outcome) -> Trajectory:
    """The trajectory of a session that has ended: status, error and rewards are the outcome's.

    The same as building it with the outcome. Rewards per trace are used if there is one for each
    trace; else every trace gets the session's reward and the metadata says so.
    """
    rewards: Sequence[float | None] | None = outcome.trace_rewards
    metadata = trajectory.metadata
    if rewards is not None and len(rewards) != len(trajectory.traces):
        note = f"{len(rewards)} rewards for {len(trajectory.traces)} traces"
        metadata = metadata | {"trace_rewards_ignored": note}
        rewards = None
    if rewards is None:
        rewards = [outcome.reward] * len(trajectory.traces)
    return dataclasses.replace(
        trajectory,
        status=outcome.status,
        reward=outcome.reward,
        error=outcome.error,
        metadata=metadata,
        traces=tuple(
            dataclasses.replace(trace, reward=reward)
            for trace, reward in zip(trajectory.traces, rewards, strict=True)
        ),
    )


def _place(plan: Plan) -> tuple[tuple[float, str], tuple[float, str]]:
    """Sort key of a trajectory's traces: by the start of their conversation, then of their end."""
    root = plan.leaf
    while root.parent is not None:
        root = root.parent
    return order_of(root.exchange), order_of(plan.leaf.exchange)


def _traces(
    session: SessionRecord,
    strategy: str,
    config: BuilderConfig,
    graph: Graph,
    marks: Marks,
    plans: Sequence[Plan],
    transcript: Transcript | None,
) -> tuple[list[Trace], int]:
    """The traces of all plans, and how many tokens train nowhere because of a length limit."""
    traces: list[Trace] = []
    truncated = 0
    for number, plan in enumerate(plans):
        whole = assemble(plan, marks, f"{session.session_id}/{strategy}/{number}")
        trace = _within(whole, config)
        kept = 0 if trace is None else int(trace.loss_mask.sum())
        truncated += int(whole.loss_mask.sum()) - kept
        if trace is not None:
            traces.append(_described(trace, graph, transcript))
    return traces, truncated


def _within(trace: Trace, config: BuilderConfig) -> Trace | None:
    """The trace as the length limit leaves it; `None` = not at all."""
    size = len(trace.prompt_ids) + len(trace.response_ids)
    if config.max_tokens is None or size <= config.max_tokens:
        return trace
    if config.overlong == "truncate":
        return shorten(trace, config.max_tokens)
    return masked(trace, MaskReason.TRUNCATED) if config.overlong == "mask" else None


def _described(trace: Trace, graph: Graph, transcript: Transcript | None) -> Trace:
    """The trace with its messages, tools and metadata."""
    path = [graph.nodes[exchange_id].exchange for exchange_id in trace.exchange_ids]
    sampled = trace.versions[trace.versions >= 0]
    metadata: JSON = {
        "kind": str(path[-1].kind),
        "root_reason": path[0].root_reason,
        "tokens_trained": int(trace.loss_mask.sum()),
        "policy_versions": [int(sampled.min()), int(sampled.max())] if len(sampled) else None,
    }
    if transcript is None:
        return dataclasses.replace(trace, metadata=metadata)
    before, after, tools = transcript.trace(path)
    return dataclasses.replace(
        trace,
        prompt_messages=before,
        response_messages=after,
        tools=tools,
        metadata=metadata,
    )


def _tree(traces: list[Trace]) -> JSON:
    """What packing a session's own traces saves."""
    alone = Trajectory("", "", tuple(traces), None, None, {})
    size = sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)
    return {"tokens": len(pack([alone]).ids), "path_tokens": size}


def _metadata(
    session: SessionRecord,
    builder: BuilderSpec,
    train: Collection[Kind],
    stats: JSON,
    plans: Sequence[Plan],
) -> JSON:
    """What a trajectory says of itself; `reconstruction_stats` in Polar's words for its clients."""
    merged = {exchange_id for plan in plans for exchange_id in plan.train}
    leaves = stats["roots"] + stats["branches"]
    return {
        "task_id": session.task_id,
        "builder": {"strategy": builder.strategy, "config": builder.config},
        "train": [str(kind) for kind in Kind if kind in train],
        "trace_count": stats["traces"],
        "record_count": stats["exchanges"],
        "reconstruction_stats": {
            "chains_total": leaves,
            "chains_reconstructed_full": leaves,
            "chains_reconstructed_truncated": 0,
            "completions_total": stats["exchanges"],
            "completions_merged": len(merged),
        },
        "stats": stats,
    }

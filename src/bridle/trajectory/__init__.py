"""Trajectories: pure functions of what capture holds.

`rebuild(capture)` is the one way from facts to a trajectory, live and offline: `graph` grows the
conversation and checks token identity, `builders` say why each sampled token trains or not, choose
paths and put the arrays together, `transcript` adds the messages and draws a conversation for
people, `stats` counts, and joins what a template wrote anew. `packing` lays traces out as one tree,
`sample` holds the values that come out, `result` their JSON, `scores` sums up a batch, `credit`
turns rewards into advantages, `fidelity` compares a trainer's logprobs with those of the traces,
and `causes` says why they differ.

Nothing here does I/O or knows the time. The same facts give the same bytes, in whatever order the
exchanges were captured.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import orjson
from pydantic import Field

from bridle.capture.records import Exchange, Outcome, SessionCapture, SessionRecord
from bridle.config import BuilderSpec, Settings, Task, validated
from bridle.errors import ConfigError
from bridle.plugins import load
from bridle.trajectory.builders import (
    BUILDERS,
    Builder,
    Marks,
    Plan,
    assemble,
    mark,
    mask_all,
    per_request,
    shorten,
)
from bridle.trajectory.builders import tree as tree_paths
from bridle.trajectory.graph import ExchangeNode, grow, order_of
from bridle.trajectory.packing import pack
from bridle.trajectory.sample import MaskReason, Trace, Trajectory
from bridle.trajectory.stats import Built, Joined, Splice, join, measure, with_texts
from bridle.trajectory.transcript import Messages, Transcript
from bridle.types import JSON, SHAPING, Cause, FinishReason, Ids, Kind, Sampling, SessionStatus

__all__ = ["BUILDERS", "MaskReason", "Trace", "Trajectory", "rebuild", "with_outcome"]

DEFAULT_TRAIN: tuple[Kind, ...] = Task.model_fields["train"].default


class BuilderConfig(Settings):
    """`BuilderSpec.config` of the builders that come with Bridle."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Longest trace, prompt and response together; `None` = any length."""
    overlong: Literal["truncate", "keep", "mask", "drop"] = "truncate"
    """Treatment of a longer one: its last turns go, it stays, nothing in it trains, or it
    goes."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """Treatment of the traces of a session that was cut: by its time, by a limit, or its last
    reply by its length."""
    on_drift: Literal["fork", "splice"] = "fork"
    """Treatment of a turn that an engine's template rewrote: fork, or keep the sampled tokens and
    flag what later turns saw as others (`bridle.trajectory.stats`). `per_request` never splices."""
    close_token_ids: tuple[int, ...] = ()
    """Tokens that end a turn, as sampled or in the template; for `splice`."""
    end_of_turn_token_id: int | None = None
    """One more of `close_token_ids`, by the name that Polar's clients use."""

    @property
    def closes(self) -> tuple[int, ...]:
        """Ids of all tokens that end a turn."""
        one = self.end_of_turn_token_id
        return self.close_token_ids if one is None else (*self.close_token_ids, one)


def rebuild(
    capture: SessionCapture,
    *,
    builder: BuilderSpec | None = None,
    train: Collection[Kind] | None = None,
    decode: Callable[[Ids], str] | None = None,
) -> Trajectory:
    """Return a session's trajectory, built from its captured records.

    `builder` and `train` are those of the session's own metadata where they are `None` (the
    defaults of a task if it has none either). `decode` turns ids into text: the breaks then have
    both texts beside their ids. Raises `ConfigError` for an unknown builder or setting; faults in
    the exchanges become exclusions and `breaks`, never an error.
    """
    session = capture.session
    if builder is None:
        given = session.metadata.get("builder") or {}
        builder = validated(BuilderSpec, given, f"session {session.session_id}: builder")
    if train is None:
        train = _kinds(session)
    built = _built(capture, builder, train)
    if decode is None:
        return built
    stats = with_texts(built.metadata["stats"], decode)
    return dataclasses.replace(built, metadata=built.metadata | {"stats": stats})


def _kinds(session: SessionRecord) -> Collection[Kind]:
    """Return the kinds of call that the session's metadata selects for training."""
    named = session.metadata.get("train")
    if named is None:
        return DEFAULT_TRAIN
    try:
        return [Kind(kind) for kind in named]
    except ValueError as error:
        message = f"session {session.session_id}: train: {error}; known: {', '.join(Kind)}"
        raise ConfigError(message) from None


def _masks_rejected(session: SessionRecord) -> bool:
    """Return whether the session's metadata exclude rejected replies from training."""
    setting = session.metadata.get("rejected", "train")
    if setting not in ("train", "mask"):
        message = f"session {session.session_id}: rejected: {setting!r}; known: train, mask"
        raise ConfigError(message)
    return bool(setting == "mask")


def _built(capture: SessionCapture, builder: BuilderSpec, train: Collection[Kind]) -> Trajectory:
    """Return a session's trajectory; damaged rows are counted as excluded.

    Linear in the new tokens of the session plus the length of its traces. Raises `ConfigError`.
    """
    session, deliveries = capture.session, capture.deliveries
    choose: Builder = load(builder.strategy, BUILDERS, what="builder")
    config = validated(BuilderConfig, builder.config, f"builder {builder.strategy}: config")
    exchanges = _with_a_conversation(capture.exchanges)
    grown = grow(session.session_id, exchanges)
    splice = config.on_drift == "splice" and choose is not per_request
    joined = join(grown, splice=splice, close_token_ids=config.closes)
    graph = joined.graph
    marks = mark(graph, exchanges, deliveries, train, mask_rejected=_masks_rejected(session))
    plans = sorted(choose(graph, marks), key=_place)
    transcript = Transcript(exchanges, capture.bodies)
    name = f"{session.session_id}/{builder.strategy}"
    whole = [assemble(plan, marks, f"{name}/{number}") for number, plan in enumerate(plans)]
    built = _limited(whole, config, _last_cut(exchanges, train))
    traces = [_described(trace, joined, marks, transcript) for trace in built.traces]
    stats = measure(joined, marks, exchanges, built, damaged=capture.damaged)
    metadata = _metadata(session, builder, train, stats, plans)
    if choose is tree_paths:
        metadata["tree"] = _tree(traces)
    if origin := session.metadata.get("fork"):
        given = [one.extra["replayed"] for one in exchanges if one.extra.get("replayed")]
        metadata["fork"] = {"session": origin["session"], "replayed": given}
    trajectory = Trajectory(
        session.session_id, SessionStatus.RUNNING, tuple(traces), None, None, metadata
    )
    return trajectory if capture.outcome is None else with_outcome(trajectory, capture.outcome)


def _with_a_conversation(exchanges: Sequence[Exchange]) -> Sequence[Exchange]:
    """Return the exchanges; where a rule made all of them side calls, they are the agent's.

    A rule may tell calls apart, but it never takes a session's only conversation.
    """
    if any(exchange.kind is not Kind.SIDE for exchange in exchanges):
        return exchanges
    return [
        dataclasses.replace(exchange, kind=Kind.AGENT)
        if exchange.extra.get("kind_rule")
        else exchange
        for exchange in exchanges
    ]


def with_outcome(trajectory: Trajectory, outcome: Outcome) -> Trajectory:
    """Return the trajectory of an ended session, with status, error and rewards of `outcome`.

    The same as building it with the outcome. Rewards per trace are used if there is one for each
    trace; else every trace gets the session's reward (that of a rejected reply the session's
    `rejected_reward`, if there is one) and the metadata says so. Rewards per token
    (`outcome.metadata["token_rewards"]`, one list per trace) must fit each trace's response.
    Rewards per turn (`outcome.metadata["turn_rewards"]`, by exchange) are rewards of the turn's
    last token that trains.
    """
    metadata, traces = trajectory.metadata, trajectory.traces
    rewards: Sequence[float | None] | None = outcome.trace_rewards
    if rewards is not None and len(rewards) != len(traces):
        note = f"{len(rewards)} rewards for {len(traces)} traces"
        metadata = metadata | {"trace_rewards_ignored": note}
        rewards = None
    if rewards is None:
        own = metadata.get("rejected_reward")
        own = outcome.reward if own is None or outcome.reward is None else own
        rewards = [own if t.metadata.get("rejected") else outcome.reward for t in traces]
    tokens: Sequence[Sequence[float] | None] = outcome.metadata.get("token_rewards") or ()
    if tokens and [len(own or ()) for own in tokens] != [len(t.response_ids) for t in traces]:
        metadata = metadata | {"token_rewards_ignored": "they do not fit the traces' responses"}
        tokens = ()
    if turns := outcome.metadata.get("turn_rewards"):
        tokens = [_token_rewards(trace, turns) for trace in traces]
    ended = dataclasses.replace(
        trajectory,
        status=outcome.status,
        reward=outcome.reward,
        error=outcome.error,
        metadata=metadata,
        traces=tuple(
            dataclasses.replace(
                trace,
                reward=reward,
                token_rewards=None if own is None else np.asarray(own, dtype=np.float32),
            )
            for trace, reward, own in zip(
                traces, rewards, tokens or [None] * len(traces), strict=True
            )
        ),
    )
    return _cut_by(ended, outcome)


def _token_rewards(trace: Trace, turns: Mapping[str, float]) -> list[float]:
    rewards = [0.0] * len(trace.response_ids)
    for turn, last in trace.trained_turns().items():
        rewards[last] = turns.get(trace.exchange_ids[turn], 0.0)
    return rewards


def _cut_by(trajectory: Trajectory, outcome: Outcome) -> Trajectory:
    """Apply the `truncated` setting to a session that a timeout or limit ended."""
    cut = outcome.cause if outcome.cause in (Cause.TIMEOUT, Cause.LIMIT) else None
    if cut is None and outcome.status == SessionStatus.TIMEOUT:
        cut = Cause.TIMEOUT
    stats = trajectory.metadata.get("stats")
    if cut is None or stats is None:
        return trajectory
    setting = trajectory.metadata["builder"]["config"].get("truncated", "keep")
    stats = stats | {"truncated": str(cut)}
    traces: Sequence[Trace] = trajectory.traces
    if setting != "keep":
        lost = stats["tokens_trained"]
        excluded = Counter(stats["tokens_excluded"])
        excluded[MaskReason.TRUNCATED.key] += lost
        traces = _without_training(traces) if setting == "mask" else ()
        stats |= {
            "tokens_trained": 0,
            "traces": len(traces),
            "tokens_excluded": {name: n for name, n in sorted(excluded.items()) if n},
        }
    metadata = trajectory.metadata | {"stats": stats, "trace_count": stats["traces"]}
    return dataclasses.replace(trajectory, traces=tuple(traces), metadata=metadata)


def _without_training(traces: Iterable[Trace]) -> list[Trace]:
    """Return the traces with nothing left to train; their metadata says so."""
    return [
        dataclasses.replace(
            mask_all(trace, MaskReason.TRUNCATED), metadata=trace.metadata | {"tokens_trained": 0}
        )
        for trace in traces
    ]


def _place(plan: Plan) -> tuple[tuple[float, str], tuple[float, str]]:
    """Return the sort key of traces: the start of their conversation, then that of their end."""
    root = plan.leaf
    while root.parent is not None:
        root = root.parent
    return order_of(root.exchange), order_of(plan.leaf.exchange)


def _last_cut(exchanges: Sequence[Exchange], train: Collection[Kind]) -> str | None:
    """Return `length` if the last reply that may train was cut by its length, else `None`."""
    replies = [exchange for exchange in exchanges if exchange.kind in train]
    last = max(replies, key=order_of, default=None)
    cut = last is not None and last.finish_reason is FinishReason.LENGTH
    return str(FinishReason.LENGTH) if cut else None


def _limited(whole: Sequence[Trace], config: BuilderConfig, cut: str | None) -> Built:
    """Apply the length settings to the traces and count the tokens they cost."""
    limit = config.max_tokens
    overlong = 0 if limit is None else sum(trace.size > limit for trace in whole)
    kept = [short for trace in whole if (short := _within(trace, config)) is not None]
    if cut is not None and config.truncated != "keep":
        mask = config.truncated == "mask"
        kept = [mask_all(trace, MaskReason.TRUNCATED) for trace in kept] if mask else []
    return Built(kept, _trained(whole) - _trained(kept), overlong, cut)


def _trained(traces: Sequence[Trace]) -> int:
    return sum(int(np.count_nonzero(trace.loss_mask)) for trace in traces)


def _within(trace: Trace, config: BuilderConfig) -> Trace | None:
    """Return the trace as the length limit leaves it; `None` = not at all."""
    if config.max_tokens is None or trace.size <= config.max_tokens or config.overlong == "keep":
        return trace
    if config.overlong == "truncate":
        return shorten(trace, config.max_tokens)
    return mask_all(trace, MaskReason.TRUNCATED) if config.overlong == "mask" else None


def _described(trace: Trace, joined: Joined, marks: Marks, transcript: Transcript) -> Trace:
    """Return the trace with its messages, tools, media and metadata."""
    nodes = [joined.graph.nodes[exchange_id] for exchange_id in trace.exchange_ids]
    path = [node.exchange for node in nodes]
    # As unsigned numbers -1 is the largest, so the least is the first version that sampled.
    newest = int(trace.versions.max(initial=-1))
    oldest = int(trace.versions.view(np.uint32).min(initial=2**32 - 1))
    metadata: JSON = {
        "kind": str(path[-1].kind),
        "agent": orjson.loads(path[-1].request.head or b"{}").get("model"),
        "root_reason": path[0].root_reason,
        "tokens_trained": int(np.count_nonzero(trace.loss_mask)),
        "policy_versions": None if newest < 0 else [oldest, newest],
        "temperatures": [exchange.sampling.temperature for exchange in path],
        "seeds": [exchange.sampling.seed for exchange in path],
        "cached_tokens": [exchange.extra.get("cached_tokens", 0) for exchange in path],
        "sampling": _sampling(trace, path),
    }
    if trace.exchange_ids[-1] in marks.rejected:
        metadata["rejected"] = True
    if joined.splices and (spans := _spliced(nodes[-1], joined, len(trace.prompt_ids))):
        metadata["spliced"] = spans
    placeholders = [place for node in nodes for place in _placeholders(node)]
    media = Messages(lambda: _media(transcript.media(path), placeholders))
    return dataclasses.replace(trace, metadata=metadata, media=media, **transcript.trace(path))


def _sampling(trace: Trace, path: Sequence[Exchange]) -> JSON:
    """Return each field that shapes a distribution with its values in the turns that train."""
    found: list[Sampling] = []
    start = 0
    for exchange, end in zip(path, trace.turn_ends, strict=True):
        # A file's turns share one object while their sampling stays the same.
        again = bool(found) and found[-1] is exchange.sampling
        if not again and trace.loss_mask[start:end].any():
            found.append(exchange.sampling)
        start = end
    values: JSON = {field: [] for field in SHAPING}
    for field, among in values.items():
        for sampling in found:
            if (value := getattr(sampling, field)) not in among:
                among.append(value)
    return values


def _spliced(last: ExchangeNode, joined: Joined, start: int) -> list[JSON]:
    """Return the spans of a trace's response that later turns saw as other tokens, in order."""
    found: list[tuple[ExchangeNode, Splice | None]] = []
    at: ExchangeNode | None = last
    while at is not None:
        found.append((at, joined.splices.get(at.exchange.exchange_id)))
        at = at.parent
    return [
        {
            "exchange": splice.exchange,
            "start": node.kept - splice.tokens - start,
            "end": node.kept - start,
            "class": str(splice.kind),
        }
        for node, splice in reversed(found)
        if splice is not None
    ]


def _placeholders(node: ExchangeNode) -> list[JSON]:
    """Return the engine's media placeholders that are new with this prompt, at their offsets in the
    path.
    """
    extra = node.exchange.extra
    media = extra.get("media") or (extra.get("engine") or {}).get("media") or []
    shift = node.prompt_length - node.exchange.prompt_length
    moved = [
        place | {"start": place["start"] + shift} if "start" in place else place for place in media
    ]
    return [place for place in moved if place.get("start", node.kept) >= node.kept]


def _media(parts: list[JSON], placeholders: Sequence[JSON]) -> list[JSON]:
    """Return the media of the messages, in order, each with the next placeholder of its digest."""
    waiting = [*placeholders]
    found = []
    for part in parts:
        own = next((p for p in waiting if p.get("digest", part["digest"]) == part["digest"]), {})
        if own:
            waiting.remove(own)
        found.append(part | own)
    return found


def _tree(traces: list[Trace]) -> JSON:
    """Count the tokens of a session's traces with and without tree packing."""
    alone = Trajectory("", "", tuple(traces), None, None, {})
    return {"tokens": len(pack([alone]).ids), "path_tokens": sum(trace.size for trace in traces)}


def _metadata(
    session: SessionRecord,
    builder: BuilderSpec,
    train: Collection[Kind],
    stats: JSON,
    plans: Sequence[Plan],
) -> JSON:
    """Build the metadata; `reconstruction_stats` keeps Polar's keys for its clients."""
    merged = {exchange_id for plan in plans for exchange_id in plan.train}
    leaves = stats["roots"] + stats["branches"]
    return {
        "task_id": session.task_id,
        "builder": {"strategy": builder.strategy, "config": builder.config},
        "train": [str(kind) for kind in Kind if kind in train],
        "rejected_reward": session.metadata.get("rejected_reward"),
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

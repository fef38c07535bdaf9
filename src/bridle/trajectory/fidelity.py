"""Fidelity: do the trainer's logprobs of our ids agree with those of the rollout, and if not, why?

A trainer that scores the tokens of a trace under the weights that sampled them computes the same
numbers as the engine, twice. `certify` compares the two: first the facts that each side declares
(`Facts`), then the logprobs (`Recomputed`). It returns a `Certificate` with the disagreement per
turn and, for each mismatch, the causes that fit, best first, with their evidence
(`bridle.trajectory.causes`).

Only numbers and ids make a mismatch. A fact that differs without any effect on the logprobs (an
engine and a trainer rarely share an attention kernel) is shown and accuses nobody.

The divergence is estimated by the sampled tokens: `exp(d) - 1 - d` per token, where `d` is the
trainer's logprob less the rollout's; its mean is KL(rollout || trainer) in nats per token.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bridle.errors import ConfigError
from bridle.trajectory.causes import Mismatch, Scored, diagnose
from bridle.trajectory.sample import Trace
from bridle.types import JSON, SHAPING, Ids, LogprobMode, Logprobs

TOLERANCES = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 0.1, "float8": 0.2}
"""Root mean square of the differences, in nats, that two correct computations may show.

Measured: 2e-5 at most between the embedded engine and the reference trainer in float32; with
weights, activations and logits in bfloat16 0.03 to 0.06, for logits of standard deviation 2.5 to 8.
"""

LARGEST_DIFFERENCE = 10.0
"""A difference is cut to this many nats before it is summed: one token must not be the sum."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that one side declares about how it computes logprobs; `None` = not declared."""

    weights: str | None = None
    """Digest of the weights, by whatever rule both sides share."""
    version: int | None = None
    """Policy version of the weights."""
    ids: str | None = None
    """Digest of all ids (`digest_of_ids`)."""
    template: str | None = None
    """Digest of the chat template."""
    logprob_mode: str | None = None
    """`processed` or `raw`, see `bridle.types.LogprobMode`."""
    dtype: str | None = None
    """A key of `TOLERANCES`."""
    temperature: float | None = None
    """By which the logits were divided."""
    processors: str | None = None
    """Other changes of the distribution, e.g. `top_k=20`; `none` = there are none."""
    cache: str | None = None
    """State of the prefix cache, e.g. `kept over updates`."""
    experts: str | None = None
    """`dense`, or the routing of experts: `routed` (each side its own) or `replayed`."""
    padding: str | None = None
    """`left`, `right` or `none`."""
    attention: str | None = None
    """Attention backend, e.g. `flash_attention_2`, and its window if it has one."""
    positions: str | None = None
    """Rule of the position ids and of their scaling."""

    @classmethod
    def of(cls, given: Mapping[str, Any], source: str) -> Facts:
        """Return the declared facts of a JSON object.

        Raises `ConfigError`, which names `source`, for a fact that is unknown.
        """
        known = [one.name for one in dataclasses.fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(f"{source}: unknown fact {unknown[0]!r}; known: {', '.join(known)}")
        dtype = given.get("dtype")
        if dtype is not None and dtype not in TOLERANCES:
            raise ConfigError(f"{source}: unknown dtype {dtype!r}; known: {', '.join(TOLERANCES)}")
        return cls(**given)

    def json(self) -> JSON:
        """Return the declared facts as a JSON object."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """Logprobs of one trace as a trainer computed them."""

    trace_id: str
    positions: Ids
    """Places of the scored tokens in `prompt_ids + response_ids`, shape (N,), int32."""
    logprobs: Logprobs
    """Of the tokens at `positions`, shape (N,), float32; -inf = impossible."""
    ids: Ids | None = None
    """The whole row of ids as the trainer had it, without padding; shows the first other id."""
    entropies: Logprobs | None = None
    """Entropy of the trainer's distribution at each of `positions`, nats; a temperature shows
    exactly with it, and roughly without."""
    padding: int | None = None
    """Tokens of padding in its row of the trainer's batch."""

    @classmethod
    def of(cls, trace: Trace, logprobs: Logprobs, **more: Any) -> Recomputed:  # noqa: ANN401
        """Return the logprobs of a trace's trained tokens, given one for each of `response_ids`.

        This is the shape in which trainers have them; `more` are other fields.
        """
        if len(logprobs) != len(trace.response_ids):
            message = f"logprobs of trace {trace.trace_id}: {len(logprobs)}, and its response has "
            raise ConfigError(f"{message}{len(trace.response_ids)} ids")
        trained = np.flatnonzero(trace.loss_mask)
        positions = (trained + len(trace.prompt_ids)).astype(np.int32)
        return cls(trace.trace_id, positions, np.asarray(logprobs, np.float32)[trained], **more)

    def __post_init__(self) -> None:
        """Check that the arrays are aligned and hold numbers."""
        lengths = {len(self.positions), len(self.logprobs)}
        lengths |= set() if self.entropies is None else {len(self.entropies)}
        if len(lengths) != 1:
            message = f"logprobs of trace {self.trace_id}: arrays of different lengths {lengths}"
            raise ConfigError(message)
        if np.isnan(self.logprobs).any() or (self.logprobs > 1e-3).any():
            message = f"logprobs of trace {self.trace_id}: a logprob is positive or not a number"
            raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class TurnAgreement:
    """Agreement of both sides on one turn."""

    trace_id: str
    exchange_id: str
    tokens: int
    token_share: float
    kl: float
    """Nats per token."""
    kl_share: float
    """Share of the whole divergence."""
    largest: float
    """Largest difference, nats."""
    causes: tuple[str, ...]
    """First cause of each mismatch that has tokens of this turn."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Result of a comparison."""

    trainer: Facts
    rollout: Facts
    tokens: int
    """Tokens that both sides have a logprob of."""
    missing: int
    """Tokens that train and that the trainer sent no logprob of."""
    kl: float
    """Nats per token."""
    rms: float
    """Root mean square of the differences, nats."""
    tolerance: float
    """Of `rms`, for the dtypes of both sides."""
    mismatches: tuple[Mismatch, ...]
    turns: tuple[TurnAgreement, ...] = field(repr=False)

    @property
    def faithful(self) -> bool:
        """Return whether the trainer's logprobs agree with the rollout's: there is no mismatch."""
        return not self.mismatches

    def facts(self) -> list[tuple[str, Any, Any, bool | None]]:
        """Return each declared fact, as (name, rollout's value, trainer's value, whether they are
        equal).

        The last is `None` where one side did not declare the fact.
        """
        ours, theirs = dataclasses.asdict(self.rollout), dataclasses.asdict(self.trainer)
        return [
            (name, ours[name], theirs[name], _same(ours[name], theirs[name]))
            for name in ours
            if (ours[name], theirs[name]) != (None, None)
        ]

    def json(self) -> JSON:
        """Return the object that `bridle certify --json` prints."""
        names = ("tokens", "missing", "kl", "rms", "tolerance")
        keys = ("name", "rollout", "trainer", "same")
        return {
            "faithful": self.faithful,
            **{name: getattr(self, name) for name in names},
            "facts": [dict(zip(keys, fact, strict=True)) for fact in self.facts()],
            "mismatches": [mismatch.json() for mismatch in self.mismatches],
            "turns": [dataclasses.asdict(turn) for turn in self.turns],
        }

    def summary(self) -> str:
        """Return one line on the comparison: the verdict, and for each mismatch its causes and
        first evidence.
        """
        size = f"KL {self.kl:.3g} nats per token over {self.tokens} tokens"
        if self.faithful:
            return f"trainer and rollout agree: {size}"
        causes = "; ".join(
            f"{' or '.join(m.names)} ({m.causes[0].evidence})" for m in self.mismatches
        )
        return f"trainer and rollout disagree: {size}; {causes}"


def _same(ours: object, theirs: object) -> bool | None:
    return None if ours is None or theirs is None else ours == theirs


def digest_of_ids(rows: Iterable[tuple[str, Ids]]) -> str:
    """Return one sha256 hex digest of several traces' token ids, whatever the order of the rows.

    A row is a trace's name and its ids.
    """
    digest = hashlib.sha256()
    for name, ids in sorted(rows, key=lambda row: row[0]):
        digest.update(name.encode() + b"\0" + np.asarray(ids, dtype="<i4").tobytes())
    return digest.hexdigest()


def certify(
    traces: Iterable[Trace],
    recomputed: Iterable[Recomputed],
    trainer: Facts,
    rollout: Facts | None = None,
) -> Certificate:
    """Compare the logprobs of traces with those that a trainer computed for the same tokens.

    `rollout` adds to the facts that the traces hold themselves. Traces of which the trainer sent
    nothing count as missing. `ConfigError` if nothing can be compared, and for a logprob of a trace
    or position that does not train.
    """
    known = {trace.trace_id: trace for trace in traces if trace.loss_mask.any()}
    answers: dict[str, Recomputed] = {}
    for answer in recomputed:
        if answer.trace_id not in known or answer.trace_id in answers:
            times = "twice" if answer.trace_id in answers else "but no such trace trains"
            raise ConfigError(f"the trainer sent logprobs of trace {answer.trace_id!r} {times}")
        answers[answer.trace_id] = answer
    pairs = [(known[name], answer) for name, answer in answers.items()]
    if not any(len(answer.positions) for _, answer in pairs):
        raise ConfigError("nothing to compare: the trainer sent no logprob of any trace")
    scored = _scored(pairs)
    trainer, rollout = _all_facts(pairs, trainer, rollout or Facts())
    declared = [TOLERANCES[one] for one in (trainer.dtype, rollout.dtype) if one is not None]
    # Half precision's if one side is silent.
    tolerance = min(declared) if len(declared) == 2 else TOLERANCES["bfloat16"]
    mismatches = diagnose(
        scored, dataclasses.asdict(trainer), dataclasses.asdict(rollout), tolerance
    )
    divergence = np.expm1(scored.differences) - scored.differences
    total = sum(int(trace.loss_mask.sum()) for trace in known.values())
    return Certificate(
        trainer,
        rollout,
        tokens=len(divergence),
        missing=total - len(divergence),
        kl=float(divergence.mean()),
        rms=float(np.sqrt((scored.differences**2).mean())),
        tolerance=tolerance,
        mismatches=tuple(mismatches),
        turns=tuple(_turns(scored, divergence, mismatches)),
    )


def _all_facts(
    pairs: Sequence[tuple[Trace, Recomputed]], trainer: Facts, rollout: Facts
) -> tuple[Facts, Facts]:
    """Return the facts of both sides, with those that the traces and the sent ids show."""
    traces = [trace for trace, _ in pairs]
    modes = {str(trace.logprob_mode) for trace in traces}
    raw = modes == {LogprobMode.RAW.value}
    seen: dict[str, set[object]] = {name: set() for name in SHAPING}
    for trace in traces:
        for name, values in (trace.metadata.get("sampling") or {}).items():
            seen[name] |= {str(value) if isinstance(value, dict) else value for value in values}
    temperatures = {1.0 if raw else one for one in seen["temperature"] - {None}}
    neutral = {None, 0, 1, -1}
    changed = [
        f"{name}={value}" for name in SHAPING[1:] for value in sorted(seen[name] - neutral, key=str)
    ]
    versions = {int(one) for trace in traces for one in np.unique(trace.versions)} - {-1}
    ours: JSON = {
        "logprob_mode": modes.pop() if len(modes) == 1 else "mixed",
        "temperature": temperatures.pop() if len(temperatures) == 1 else None,
        "processors": "none" if raw or not changed else ", ".join(changed),
        "version": versions.pop() if len(versions) == 1 else None,
    }
    theirs: JSON = {}
    if all(answer.ids is not None for _, answer in pairs):
        ours["ids"] = digest_of_ids((trace.trace_id, trace.ids) for trace in traces)
        theirs["ids"] = digest_of_ids((a.trace_id, a.ids) for _, a in pairs if a.ids is not None)
    elif trainer.ids is not None:
        ours["ids"] = digest_of_ids((trace.trace_id, trace.ids) for trace in traces)
    return Facts(**theirs | trainer.json()), Facts(**ours | rollout.json())


def _scored(pairs: Sequence[tuple[Trace, Recomputed]]) -> Scored:
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    for number, (trace, answer) in enumerate(pairs):
        for name, values in _columns(number, trace, answer).items():
            columns.setdefault(name, []).append(values)
    whole: dict[str, Any] = {name: np.concatenate(parts) for name, parts in columns.items()}
    return Scored(
        traces=tuple(trace for trace, _ in pairs),
        answers=tuple((answer.ids, answer.padding) for _, answer in pairs),
        **whole,
    )


def _columns(number: int, trace: Trace, answer: Recomputed) -> dict[str, npt.NDArray[Any]]:
    start = len(trace.prompt_ids)
    places = answer.positions.astype(np.int64) - start
    wrong = (places < 0) | (places >= len(trace.response_ids))
    wrong |= trace.loss_mask[np.where(wrong, 0, places)] == 0
    if wrong.any():
        position = int(answer.positions[int(wrong.argmax())])
        message = f"trace {trace.trace_id}: no token that trains stands at position {position}"
        raise ConfigError(message)
    ends = np.array([*trace.turn_ends] or [len(trace.response_ids)])
    turns = np.searchsorted(ends, places, side="right")
    cached = np.array(trace.metadata.get("cached_tokens") or [0] * len(ends))
    ids = trace.ids
    first = np.zeros(len(ids), dtype=np.bool_)
    first[np.unique(ids, return_index=True)[1]] = True
    ours = trace.response_logprobs[places].astype(np.float64)
    theirs = answer.logprobs.astype(np.float64)
    apart = np.clip(theirs - ours, -LARGEST_DIFFERENCE, LARGEST_DIFFERENCE)
    size = len(places)
    return {
        "trace": np.full(size, number),
        "positions": answer.positions.astype(np.int64),
        "turns": turns,
        "ids": trace.response_ids[places],
        "repeated": ~first[answer.positions],
        "versions": trace.versions[places],
        "cached": cached[np.minimum(turns, len(cached) - 1)],
        "padding": np.full(size, -1 if answer.padding is None else answer.padding),
        "ours": ours,
        "theirs": theirs,
        "entropies": np.full(size, np.nan) if answer.entropies is None else answer.entropies,
        "differences": apart,
    }


def _turns(
    scored: Scored, divergence: npt.NDArray[np.float64], mismatches: Sequence[Mismatch]
) -> Iterable[TurnAgreement]:
    """Yield the turns with scored tokens, in order."""
    keys, place = np.unique(np.stack([scored.trace, scored.turns], 1), axis=0, return_inverse=True)
    whole = max(float(divergence.sum()), 1e-12)
    for number, (trace_number, turn) in enumerate(keys.tolist()):
        own = place.ravel() == number
        trace = scored.traces[trace_number]
        exchange = trace.exchange_ids[turn] if turn < len(trace.exchange_ids) else f"turn {turn}"
        yield TurnAgreement(
            trace.trace_id,
            exchange,
            tokens=int(own.sum()),
            token_share=float(own.mean()),
            kl=float(divergence[own].mean()),
            kl_share=float(divergence[own].sum()) / whole,
            largest=float(abs(scored.differences[own]).max()),
            causes=tuple(m.names[0] for m in mismatches if (m.tokens & own).any()),
        )

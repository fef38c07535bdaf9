"""Causes of a mismatch between trainer and rollout logprobs, found by the pattern that it makes.

Each cause leaves its own mark on the differences, whatever the two sides declare:

- other ids, another template: the first id that differs, and on which side of a turn it stands;
- weights of another version: the tokens that it sampled;
- a stale prefix cache, unmasked padding, position ids that restart, a window of attention:
  a part of the tokens is off (those behind a cache hit, in padded rows, from the
  second turn on, from one position on) and all others are clean. The part that tells most about
  which tokens are off, in nats of information, is the cause;
- another temperature: differences in proportion to logprob + entropy, which is the derivative of a
  logprob by the inverse temperature;
- a logits processor: all differences of one sign (a truncated distribution is renormalised), tokens
  that are impossible on one side, or differences that follow a token's id or its repetition;
- experts: most tokens agree and a few, anywhere, are far off (a routing that flipped);
- position ids and their scaling: differences that grow with the position;
- dtype and attention backend: small symmetrical noise;
- other weights: large differences anywhere, without any of these marks. Wrong position ids that
  change short distances too can look the same, and are named second.

Declared facts raise or lower a cause. What the data cannot tell apart is reported together, best
first; a mismatch that fits nothing is `unknown`. Pure numpy; called by `bridle.trajectory.fidelity`
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from bridle.trajectory.sample import MaskReason, Trace
from bridle.types import JSON, Ids

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]

SMALLEST_PART = 8
"""A part of fewer tokens proves nothing."""
LEAST_INFORMATION = 10.0
"""Nats that a part must tell about which tokens are off: chance gives it once in 20,000."""
NOISE = 0.1
"""Root mean square, nats, up to which symmetrical differences may be those of half precision."""


class MismatchCause(StrEnum):
    """Reasons for which a trainer computes other logprobs than the rollout had."""

    WEIGHTS = "weights"
    IDS = "ids"
    TEMPLATE = "template"
    DTYPE = "dtype"
    TEMPERATURE = "temperature"
    PROCESSOR = "processor"
    CACHE = "cache"
    EXPERTS = "experts"
    PADDING = "padding"
    ATTENTION = "attention"
    POSITIONS = "positions"
    UNKNOWN = "unknown"


FACTS_OF = {
    MismatchCause.WEIGHTS: ("weights", "version"),
    MismatchCause.IDS: ("ids",),
    MismatchCause.TEMPLATE: ("template",),
    MismatchCause.DTYPE: ("dtype",),
    MismatchCause.TEMPERATURE: ("temperature", "logprob_mode"),
    MismatchCause.PROCESSOR: ("processors",),
    MismatchCause.CACHE: ("cache",),
    MismatchCause.EXPERTS: ("experts",),
    MismatchCause.PADDING: ("padding",),
    MismatchCause.ATTENTION: ("attention",),
    MismatchCause.POSITIONS: ("positions",),
}
"""Declared facts (`bridle.trajectory.fidelity.Facts`) that speak for or against a cause."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cause that fits a mismatch."""

    cause: MismatchCause
    score: float
    """Strength of the evidence, 0 to 1, and half a point for or against it by declared facts."""
    evidence: str


@dataclass(frozen=True, slots=True, eq=False)
class Mismatch:
    """Tokens on which both sides disagree for one reason."""

    causes: tuple[Suspect, ...]
    """Best first; never empty."""
    tokens: Flags = field(repr=False)
    """Of the scored tokens, those that it is about."""
    token_share: float
    kl_share: float

    @property
    def names(self) -> list[str]:
        """Names of the causes that fit the mismatch, the likeliest first."""
        return [suspect.cause.value for suspect in self.causes]

    def json(self) -> JSON:
        """Return the causes with their evidence, and the mismatch's shares of the tokens and of the
        KL.
        """
        causes = [
            {"cause": s.cause.value, "score": round(s.score, 3), "evidence": s.evidence}
            for s in self.causes
        ]
        return {"causes": causes, "token_share": self.token_share, "kl_share": self.kl_share}


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The tokens that both sides scored, as columns of shape (N,)."""

    traces: tuple[Trace, ...]
    answers: tuple[tuple[Ids | None, int | None], ...]
    """Ids and padding of each trace's row at the trainer."""
    trace: npt.NDArray[np.int64]
    """Place in `traces`."""
    positions: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int64]
    """Number of the turn in its trace."""
    ids: Ids
    repeated: Flags
    """True if the id stood in the trace before."""
    versions: npt.NDArray[np.int32]
    cached: npt.NDArray[np.int64]
    """Prompt tokens of the turn that the engine took from its cache; 0 = none, or not reported."""
    padding: npt.NDArray[np.int64]
    """Of the row; -1 = not reported."""
    ours: Numbers
    theirs: Numbers
    entropies: Numbers
    """NaN = not reported."""
    differences: Numbers
    """The trainer's logprob less the rollout's, nats, cut to what can be summed."""


DeclaredFacts = Mapping[str, Any]
"""Declared facts of one side by name; `None` = not declared."""


def diagnose(
    scored: Scored, trainer: DeclaredFacts, rollout: DeclaredFacts, tolerance: float
) -> list[Mismatch]:
    """Return the mismatches between a trainer's and the rollout's logprobs, with their likely
    causes.

    None if both sides agree. `tolerance` is the root mean square of the differences, in nats, that
    is no mismatch.
    """
    divergence = np.expm1(scored.differences) - scored.differences
    left = np.ones(len(divergence), dtype=np.bool_)
    found: list[Mismatch] = []

    def add(suspects: Sequence[Suspect], tokens: Flags) -> None:
        ranked = _ranked(suspects, trainer, rollout)
        share = float(divergence[tokens].sum() / max(divergence.sum(), 1e-12))
        found.append(Mismatch(tuple(ranked), tokens, float(tokens.mean()), share))

    for suspects, tokens in (*_other_ids(scored), *_stale(scored, trainer, tolerance)):
        add(suspects, tokens & left)
        left = left & ~tokens
    while (part := _part(scored, left, tolerance)) is not None:
        add(*part)
        left = left & ~part[1]
    if left.any() and _rms(scored.differences[left]) > tolerance:
        add(_patterns(scored, left, trainer, rollout), left)
    return found


def _rms(values: Numbers) -> float:
    return float(np.sqrt((values**2).mean())) if len(values) else 0.0


def _ranked(
    suspects: Sequence[Suspect], trainer: DeclaredFacts, rollout: DeclaredFacts
) -> list[Suspect]:
    """Return the suspects with what the facts say about them, best first; those that remain
    likely.
    """
    weighed = []
    for suspect in suspects:
        score, evidence = suspect.score, suspect.evidence
        for name in FACTS_OF[suspect.cause]:
            ours, theirs = rollout[name], trainer[name]
            differs = ours != theirs
            if None in (ours, theirs) or (name == "ids" and differs):
                continue
            if name == "version" and not differs:
                continue  # an engine may hold other weights than the version that it reports
            score += 0.5 if differs else -0.5
            if differs:
                evidence += f"; {name}: the rollout says {ours}, the trainer {theirs}"
        weighed.append(Suspect(suspect.cause, score, evidence))
    weighed.sort(key=lambda one: -one.score)
    likely = [one for one in weighed if one.score >= max(0.2, weighed[0].score - 0.5)]
    excluded = "; ".join(f"{one.cause}: {one.evidence}" for one in weighed)
    return likely or [Suspect(MismatchCause.UNKNOWN, 0.0, f"the facts exclude {excluded}")]


# ---- ids


def _other_ids(scored: Scored) -> Iterator[tuple[list[Suspect], Flags]]:
    """Yield mismatches of ids: in given tokens a template's, in sampled ones of tokenization."""
    found: dict[bool, list[tuple[int, int, str]]] = {True: [], False: []}
    for number, (trace, (theirs, _)) in enumerate(zip(scored.traces, scored.answers, strict=True)):
        ids = trace.ids
        if theirs is None or np.array_equal(ids, theirs):
            continue
        size = min(len(ids), len(theirs))
        other = ids[:size] != theirs[:size]
        at = int(other.argmax()) if other.any() else size
        place = at - len(trace.prompt_ids)
        given = place < 0 or at >= len(ids) or trace.reasons[place] == MaskReason.PROMPT
        there = [int(row[at]) if at < len(row) else "the end" for row in (ids, theirs)]
        say = f"trace {trace.trace_id} position {at}: {there[0]} here, {there[1]} at the trainer"
        found[given].append((number, at, say))
    causes = (MismatchCause.TEMPLATE, MismatchCause.IDS)
    for given, of in found.items():
        if not of:
            continue
        what = "given (template)" if given else "sampled"
        evidence = f"{len(of)} traces have other ids, first at a {what} token: {of[0][2]}"
        first, second = causes if given else causes[::-1]
        tokens = np.zeros(len(scored.trace), dtype=np.bool_)
        for number, at, _ in of:
            tokens |= (scored.trace == number) & (scored.positions >= at)
        yield [Suspect(first, 1.0, evidence), Suspect(second, 0.7, evidence)], tokens


# ---- parts


def _stale(
    scored: Scored, trainer: DeclaredFacts, tolerance: float
) -> Iterator[tuple[list[Suspect], Flags]]:
    """Yield the tokens that other versions than the trainer's sampled, where some are of its
    own.
    """
    stale = (scored.versions >= 0) & (scored.versions != trainer["version"])
    if trainer["version"] is None or stale.all() or _rms(scored.differences[stale]) <= tolerance:
        return
    among = ", ".join(map(str, np.unique(scored.versions[stale]).tolist()))
    said = f"version {among} sampled these tokens, and the trainer has {trainer['version']}"
    yield [Suspect(MismatchCause.WEIGHTS, 1.0, said)], stale


def _part(scored: Scored, left: Flags, tolerance: float) -> tuple[list[Suspect], Flags] | None:
    """Return the part of the tokens that holds all that is off, with its causes; `None` = there is
    none.

    Of several parts the one that tells most about which tokens are off.
    """
    off = abs(scored.differences) > 3 * tolerance
    best: tuple[float, list[Suspect], Flags] | None = None
    for causes, part, evidence, price in _parts(scored, left, off):
        inside, outside = left & part, left & ~part
        if min(inside.sum(), outside.sum()) < SMALLEST_PART:
            continue
        if off[outside].mean() > 0.01 or _rms(scored.differences[outside]) > tolerance:
            continue
        gain = _information(off[inside], off[outside]) - price
        if gain < LEAST_INFORMATION or _rms(scored.differences[inside]) <= tolerance:
            continue
        if best is None or gain > best[0]:
            text = (
                f"{evidence}: {off[inside].mean():.0%} of {inside.sum()} tokens are off, of the "
                f"{outside.sum()} others {off[outside].mean():.0%}"
            )
            suspects = [Suspect(c, 1.0 - 0.3 * n, text) for n, c in enumerate(causes)]
            best = gain, suspects, inside
    return None if best is None else best[1:]


def _parts(
    scored: Scored, left: Flags, off: Flags
) -> Iterator[tuple[tuple[MismatchCause, ...], Flags, str, float]]:
    """Yield parts that causes would spoil: the causes, the part, its name, nats of its choice."""
    if (scored.padding >= 0).all():
        yield (MismatchCause.PADDING,), scored.padding > 0, "tokens of padded rows", 0.0
    else:
        lengths = [trace.size for trace in scored.traces]
        shorter = np.array(lengths)[scored.trace] < max(lengths)
        yield (MismatchCause.PADDING,), shorter, "tokens of traces shorter than the longest", 0.0
    later = scored.turns > 0
    if (scored.cached > 0).any():
        hit = scored.cached > 0
        yield (MismatchCause.CACHE,), hit, "tokens of turns behind a prefix cache hit", 0.0
        said = "tokens from the second turn on, with a prefix cache hit or not"
        yield (MismatchCause.POSITIONS,), later, said, 0.0
    else:
        yield _wrong_turns(scored, left & later, off)
    if not (left & off).any():
        return
    places, choices = scored.positions, np.log(len(np.unique(scored.positions[left])))
    at = int(places[left & off].min())
    causes = (MismatchCause.ATTENTION, MismatchCause.POSITIONS)
    yield causes, places >= at, f"tokens from position {at} on, in any trace", float(choices)
    if any(ids is None for ids, _ in scored.answers):
        first = np.full(len(scored.traces), np.iinfo(np.int64).max)
        np.minimum.at(first, scored.trace[left & off], places[left & off])
        begun = first[first < np.iinfo(np.int64).max]
        said = f"tokens of {len(begun)} traces from a position of its own in each, ids not sent"
        causes = (MismatchCause.IDS, MismatchCause.TEMPLATE)
        yield causes, places >= first[scored.trace], said, float(choices * len(begun))


def _wrong_turns(
    scored: Scored, later: Flags, off: Flags
) -> tuple[tuple[MismatchCause, ...], Flags, str, float]:
    """Return the later turns that are off, where the engine did not tell its cache hits.

    Wrong positions spoil all of them; a stale cache those that hit it, which any of them may be.
    """
    turns = scored.trace * (int(scored.turns.max()) + 1) + scored.turns
    sizes = np.bincount(turns[later], minlength=int(turns.max()) + 1)
    wrong = np.bincount(turns[later], off[later], len(sizes)) > 0.25 * sizes
    part = later & wrong[turns]
    count, among = int(wrong.sum()), int((sizes > 0).sum())
    said = f"tokens of {count} of {among} turns behind another turn"
    causes = (MismatchCause.POSITIONS, MismatchCause.CACHE)
    if count == among:
        return causes, part, said, 0.0
    return causes[::-1], part, said, float(np.log(2) * among)


def _information(inside: Flags, outside: Flags) -> float:
    """Return the nats that knowing the part tells about which tokens are off."""
    whole = np.concatenate([inside, outside])
    return _surprise(whole) - _surprise(inside) - _surprise(outside)


def _surprise(flags: Flags) -> float:
    count, set_ = len(flags), int(flags.sum())
    both = np.array([set_, count - set_], dtype=np.float64)
    both = both[both > 0]
    return float(-(both * np.log(both / count)).sum())


# ---- patterns


def _patterns(
    scored: Scored, left: Flags, trainer: DeclaredFacts, rollout: DeclaredFacts
) -> list[Suspect]:
    """Return the causes of differences that are anywhere; never none."""
    apart, size = scored.differences[left], _rms(scored.differences[left])
    found = [*_temperature(scored, left), *_processor(scored, left), *_growth(scored, left)]
    if any(suspect.score > 0.8 for suspect in found):
        return found
    symmetrical = abs(apart.mean()) < max(0.3 * size, 3 * size / np.sqrt(len(apart)))
    if size <= NOISE and symmetrical:
        say = f"symmetrical noise of {size:.1g} nats anywhere, the size of half precision"
        same = 0.5 * (None is not rollout["dtype"] == trainer["dtype"])
        found.append(Suspect(MismatchCause.DTYPE, 0.9 + same, say))
        found.append(Suspect(MismatchCause.ATTENTION, 0.7, say))
    likely = np.exp(np.minimum(np.maximum(scored.ours, scored.theirs)[left], 0.0))
    scaled = abs(apart) / (1.02 - likely)
    middle = float(np.median(scaled))
    tail = float(np.sqrt((scaled**2).mean()) / max(middle, 1e-9))
    if (
        middle < NOISE
        and tail > 4
        and rollout["experts"] != "dense"
        and trainer["experts"] not in {"dense", "replayed"}
    ):
        few = abs(apart) > 2 * size
        say = (
            f"{few.mean():.0%} of the tokens hold {(apart[few] ** 2).sum() / (apart**2).sum():.0%}"
        )
        found.append(Suspect(MismatchCause.EXPERTS, 0.9, f"{say} of the squared differences"))
    say = f"differences of {size:.2g} nats (root mean square) anywhere, without a pattern"
    found.append(Suspect(MismatchCause.WEIGHTS, 0.6, say))
    if size > NOISE:
        found.append(Suspect(MismatchCause.POSITIONS, 0.3, say))
    if any(ids is None for ids, _ in scored.answers):
        say = "the trainer sent no ids to compare"
        causes = (MismatchCause.IDS, MismatchCause.TEMPLATE)
        found += [Suspect(cause, 0.4, say) for cause in causes]
    declared = {
        cause
        for cause, names in FACTS_OF.items()
        for name in names
        if None not in (rollout[name], trainer[name]) and rollout[name] != trainer[name]
    }
    others = declared - {suspect.cause for suspect in found} - {MismatchCause.IDS}
    found += [Suspect(cause, 0.05, "only the facts differ") for cause in sorted(others)]
    return found


def _temperature(scored: Scored, left: Flags) -> list[Suspect]:
    apart = scored.differences[left]
    exact = bool(np.isfinite(scored.entropies[left]).all())
    theirs = np.maximum(scored.theirs[left], -1e3)
    terms = [theirs + scored.entropies[left]] if exact else [theirs, theirs**2, theirs**3]
    explained, slope = _fit(terms, apart)
    if explained < 0.88:
        return []
    by = "logprob + entropy" if exact else "a curve of the logprob"
    say = f"{by} explains {explained:.1%} of the differences"
    if exact and abs(slope) < 1:
        say += f": the trainer's temperature is {1 - slope:.3g} times the rollout's"
    return [Suspect(MismatchCause.TEMPERATURE, explained, say)]


def _fit(terms: Sequence[Numbers], values: Numbers) -> tuple[float, float]:
    """Return the share of the variance that a linear fit explains, and the first term's slope."""
    design = np.stack([np.ones_like(values), *terms], 1)
    found = np.linalg.lstsq(design, values, rcond=None)[0]
    rest = ((values - design @ found) ** 2).sum()
    return float(1 - rest / max(((values - values.mean()) ** 2).sum(), 1e-12)), float(found[1])


def _processor(scored: Scored, left: Flags) -> list[Suspect]:
    apart = scored.differences[left]
    impossible = int((~np.isfinite(scored.theirs[left])).sum())
    if impossible:
        say = f"{impossible} sampled tokens are impossible at the trainer, which truncates"
        return [Suspect(MismatchCause.PROCESSOR, 1.0, say)]
    off = abs(apart) > 0.1 * _rms(apart)
    higher = float((apart[off] > 0).mean())
    if off.sum() >= SMALLEST_PART and not 0.02 < higher < 0.98:
        side = "trainer" if higher > 0.5 else "rollout"
        say = (
            f"the {side}'s logprob is the higher one in {max(higher, 1 - higher):.0%} of the tokens"
        )
        say += " that differ: its distribution is truncated and renormalised"
        return [Suspect(MismatchCause.PROCESSOR, 0.95, say)]
    repeated = scored.repeated[left]
    if min(repeated.sum(), (~repeated).sum()) >= SMALLEST_PART:
        gap = apart[repeated].mean() - apart[~repeated].mean()
        error = np.sqrt(sum(apart[r].var() / r.sum() for r in (repeated, ~repeated)))
        if abs(gap) > 8 * error:
            say = f"tokens that stood there before differ by {gap:+.2g} nats more than new ones"
            return [Suspect(MismatchCause.PROCESSOR, 0.9, say)]
    return _biased(scored.ids[left], apart)


def _biased(ids: Ids, apart: Numbers) -> list[Suspect]:
    """Return a processor as the cause, if the tokens' ids alone explain the differences."""
    _, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    free = len(apart) - len(counts)
    if free < SMALLEST_PART:
        return []
    means = np.bincount(place, apart) / counts
    rest = ((apart - means[place]) ** 2).sum() / free
    explained = 1 - rest / max(apart.var(), 1e-12)
    if explained < 0.6:
        return []
    say = f"the token's id alone explains {explained:.0%} of the differences"
    return [Suspect(MismatchCause.PROCESSOR, float(explained), say)]


def _growth(scored: Scored, left: Flags) -> list[Suspect]:
    """Return the causes of differences that grow with the position, judged by ranks."""
    sizes, places = (_ranks(x[left]) for x in (abs(scored.differences), scored.positions))
    grows = float((sizes * places).mean())
    if grows < max(0.25, 5 / np.sqrt(len(sizes))):
        return []
    say = f"differences grow with the position (rank correlation {grows:.2f})"
    return [Suspect(MismatchCause.POSITIONS, 0.9, say), Suspect(MismatchCause.ATTENTION, 0.6, say)]


def _ranks(values: npt.NDArray[Any]) -> Numbers:
    """Return the ranks of the values, with mean 0 and variance 1; equal values share theirs."""
    _, place = np.unique(values, return_inverse=True)
    ranks: Numbers = place - place.mean()
    ranks /= max(float(ranks.std()), 1e-12)
    return ranks

"""Is my data right? One page over a batch, from the law numbers of its sessions.

Pure: `report_of` adds up `metadata.stats` of many trajectories, `lines` writes the page, `as_json`
the same numbers. What a reader should act on begins with `!`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from bridle.types import JSON

IDENTITY = frozenset(
    {"digest_mismatch", "unknown_parent", "parent_lost", "no_parent", "cycle", "duplicate",
     "kept_beyond_parent", "foreign_session", "missing_exchange", "damaged_row"}
)  # fmt: skip
"""Breaks that mean an exchange could not be proved to be what the engine was given."""

LINES_OF_FORKS = 12
"""Kinds of fork that the page shows; the rest are one line."""

LOW_MERGE_RATIO = 0.9
"""Below this a batch costs its trainer many times its tokens."""

TURNS = ("shown", "verbatim", "rerendered", "foreign", "given")
"""Counts of assistant turns, as `metadata.stats` has them behind `turns_`."""


@dataclass(slots=True)
class Report:
    """A batch in numbers; all tokens are sampled ones."""

    sessions: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    exchanges: int = 0
    traces: int = 0
    captured: int = 0
    trained: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    """Tokens by reason."""
    unequal: list[str] = field(default_factory=list)
    """Sessions in which captured is not trained + excluded."""
    unproved: Counter[str] = field(default_factory=Counter)
    """Failed checks of token identity, by name."""
    forks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Places where a conversation continued and its ids did not, by harness and reason."""
    showing: int = 0
    """Agent exchanges that show a turn that was sampled."""
    extending: int = 0
    """Those of them whose prompt extends its parent's ids."""
    turns: Counter[str] = field(default_factory=Counter)
    """Assistant turns that requests showed, by `TURNS`."""
    rerendered: int = 0
    """Sampled tokens that a prompt showed as other ids."""
    uncounted: int = 0
    """Sessions whose statistics do not say how turns were shown: of older versions."""
    drift: Counter[str] = field(default_factory=Counter)
    spliced: int = 0
    """Tokens in spliced spans: the exceptions to law 1 that were asked for."""
    overlong: int = 0
    cut: Counter[str] = field(default_factory=Counter)
    """Sessions that count as truncated, by why."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Fields, betas and blocks of requests that the gateway did not know, by name."""
    unenforced: Counter[str] = field(default_factory=Counter)
    """Fields of requests that were not complied with, by name."""
    rejected: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Harness and status -> sampled tokens of rejected replies, and of all; statuses without
    rejected ones too."""
    malformed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls whose arguments are no JSON object, by harness and status."""
    untrained: list[str] = field(default_factory=list)
    """Sessions of which nothing trains."""

    @property
    def merge_ratio(self) -> float | None:
        """Agent exchanges that extend a parent / those that show a turn of ours; `None` = none."""
        return self.extending / self.showing if self.showing else None

    def add(self, session_id: str, harness: str, status: str, stats: JSON) -> None:
        self.sessions += 1
        self.statuses[status] += 1
        captured, trained = stats["tokens_captured"], stats["tokens_trained"]
        excluded = stats["tokens_excluded"]
        self.exchanges += stats["exchanges"]
        self.traces += stats["traces"]
        self.captured += captured
        self.trained += trained
        self.excluded.update(excluded)
        if captured != trained + sum(excluded.values()):
            self.unequal.append(session_id)
        if not trained:
            self.untrained.append(session_id)
        passed_over, of = self.rejected.get((harness, status), (0, 0))
        passed_over += stats.get("rejected", {}).get("tokens", 0)
        self.rejected[harness, status] = passed_over, of + captured
        if malformed := stats.get("malformed_calls", 0):
            self.malformed[harness, status] += malformed
        for found in stats["breaks"]:
            if found["reason"] in IDENTITY:
                self.unproved[found["reason"]] += 1
            else:
                self.forks[harness, found["reason"]] += 1
        self._add_lineage(stats)
        self.drift.update(stats["drift"])
        self.spliced += stats.get("spliced", {}).get("tokens", 0)
        self.unknown.update(stats.get("unknown", {}))
        self.unenforced.update(stats.get("unenforced", {}))
        self.overlong += stats.get("overlong", 0)
        if (cut := stats.get("truncated")) is not None:
            self.cut[cut] += 1

    def _add_lineage(self, stats: JSON) -> None:
        if (merging := stats.get("merging")) is not None:
            self.showing += merging["showing"]
            self.extending += merging["extending"]
        if stats.get("turns_shown") is None:
            self.uncounted += 1
            return
        self.turns.update({name: stats[f"turns_{name}"] for name in TURNS})
        self.rerendered += stats["tokens_rerendered"]

    @property
    def counted(self) -> bool:
        """Return whether any session recorded how its turns came back in later prompts."""
        return self.uncounted < self.sessions

    def as_json(self) -> JSON:
        """Return the numbers as plain JSON values."""
        return {
            "sessions": self.sessions,
            "statuses": dict(sorted(self.statuses.items())),
            "exchanges": self.exchanges,
            "traces": self.traces,
            "tokens_captured": self.captured,
            "tokens_trained": self.trained,
            "tokens_excluded": dict(sorted(self.excluded.items())),
            "law_1_unproved": dict(sorted(self.unproved.items())),
            "law_2_unequal": self.unequal,
            **{f"turns_{name}": self.turns[name] if self.counted else None for name in TURNS},
            "tokens_rerendered": self.rerendered if self.counted else None,
            "sessions_uncounted": self.uncounted,
            "merge_ratio": self.merge_ratio,
            "forks": [
                {"harness": harness, "reason": reason, "count": count}
                for (harness, reason), count in _ranked(self.forks)
            ],
            "drift": dict(sorted(self.drift.items())),
            "tokens_spliced": self.spliced,
            "overlong_traces": self.overlong,
            "truncated_sessions": dict(sorted(self.cut.items())),
            "unknown": dict(sorted(self.unknown.items())),
            "unenforced": dict(sorted(self.unenforced.items())),
            "rejected": [
                {"harness": harness, "status": status, "tokens": passed_over, "of": of}
                for (harness, status), (passed_over, of) in sorted(self.rejected.items())
            ],
            "malformed_calls": [
                {"harness": harness, "status": status, "calls": count}
                for (harness, status), count in sorted(self.malformed.items())
            ],
            "untrained_sessions": self.untrained,
        }

    def lines(self) -> Iterator[str]:
        yield f"sessions  {self.sessions} ({_listed(self.statuses)})"
        yield f"calls     {self.exchanges} in {self.traces} traces"
        yield from self._lineage()
        yield ""
        yield from self._laws()
        yield ""
        yield f"excluded  {_share(sum(self.excluded.values()), self.captured)} of sampled tokens"
        for reason, count in self.excluded.most_common():
            yield f"  {reason:<14} {count:>10}  {_share(count, self.captured)}"
        for (harness, status), (passed_over, of) in sorted(self.rejected.items()):
            if passed_over:
                share = _share(passed_over, of)
                yield f"rejected  {share} of what {harness} sampled in {status} sessions"
        for (harness, status), count in sorted(self.malformed.items()):
            yield f"malformed {count} tool calls of {harness} in {status} sessions"
        yield ""
        yield f"drift     {_listed(self.drift)}"
        yield f"forks     {sum(self.forks.values())}"
        ranked = _ranked(self.forks)
        for (harness, reason), count in ranked[:LINES_OF_FORKS]:
            yield f"  {harness:<18} {reason:<22} {count:>6}"
        if rest := ranked[LINES_OF_FORKS:]:
            yield f"  {len(rest)} other kinds {sum(count for _, count in rest):>33}"
        yield from self._limits()

    def _lineage(self) -> Iterator[str]:
        """Write the lineage of the assistant turns that requests showed."""
        turns = self.turns
        if self.counted:
            shown = turns["shown"]
            bad = "! " if turns["verbatim"] < LOW_MERGE_RATIO * shown else ""
            yield (
                f"{bad}turns     {shown} shown: {turns['verbatim']} verbatim"
                f" ({_share(turns['verbatim'], shown)}), {turns['rerendered']} rerendered"
                f" ({self.rerendered} tokens), {turns['foreign']} foreign"
                f"; {turns['given']} given"
            )
        if self.uncounted:
            yield f"turns     - in {self.uncounted} sessions, which were not counted when captured"
        ratio = self.merge_ratio
        if ratio is None:
            yield "merge ratio  - (no call of an agent is known to show a turn that was sampled)"
            return
        low = "! " if ratio < LOW_MERGE_RATIO else ""
        yield (
            f"{low}merge ratio  {ratio:.3f} ({self.extending} of {self.showing} agent calls"
            " that show a sampled turn extend its ids)"
        )

    def _laws(self) -> Iterator[str]:
        failed = sum(self.unproved.values())
        if failed:
            yield f"! law 1   {failed} calls are not proved: {_listed(self.unproved)}"
        else:
            yield "law 1     holds: every trace is what the engine was given and sampled"
        if self.spliced:
            yield f"          but for {self.spliced} tokens in spans that were spliced on demand"
        held = f"captured {self.captured} = trained {self.trained} + excluded "
        held += str(sum(self.excluded.values()))
        if self.unequal:
            yield f"! law 2   DOES NOT HOLD in {', '.join(self.unequal[:3])}: {held}"
        else:
            yield f"law 2     holds: {held}"

    def _limits(self) -> Iterator[str]:
        yield from without_effect(self.unknown, self.unenforced)
        if self.overlong:
            yield f"overlong  {self.overlong} traces"
        if self.cut:
            yield f"cut       {sum(self.cut.values())} sessions ({_listed(self.cut)})"
        if self.untrained:
            shown = ", ".join(self.untrained[:3]) + (", ..." if len(self.untrained) > 3 else "")
            yield f"! nothing trains in {len(self.untrained)} sessions: {shown}"


def without_effect(unknown: Counter[str], unenforced: Counter[str]) -> Iterator[str]:
    """Name the parts of requests that had no effect, unknown and known ones."""
    if unknown:
        yield f"! unknown to the gateway, not acted on: {_listed(unknown)}"
    if unenforced:
        yield f"asked for and not enforced: {_listed(unenforced)}"


def report_of(sessions: Iterable[tuple[str, str, str, JSON]]) -> Report:
    """Return a batch's report from `(session id, harness, status, stats)` of each session."""
    report = Report()
    for session_id, harness, status, stats in sessions:
        report.add(session_id, harness, status, stats)
    return report


def _ranked(forks: Counter[tuple[str, str]]) -> list[tuple[tuple[str, str], int]]:
    return sorted(forks.items(), key=lambda item: (-item[1], item[0]))


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"

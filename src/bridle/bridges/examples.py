"""Training examples from a session: one per trace, or per conversation of text.

Every export begins here, so that a filter means the same in each of them. An example has its
messages in the form of OpenAI Chat and, where the engine gave ids, its exact tokens.

An engine that gives text only leaves no traces. Each conversation that it had is an example then,
without ids: every turn of the model in it is what it said.

`write_sft` writes them as lines of JSON for supervised training. Each line holds the exact tokens
(`input_ids`, and `loss_mask` of the same length: 1 = the policy sampled it and it trains) and, for
people and for trainers that tokenise themselves, `messages` in the form of OpenAI Chat with their
tool calls. `tools` is the tool list as JSON text, as trainers of this field take it: a column whose
rows have parameters of different types has no type of its own. A line of an engine that gives text
only has `null` for ids and mask.

`write_pairs` writes preference pairs from groups: a better and a worse session of one task. Both
begin with the same prompt, so that what is compared is what the model did. A task's sessions are
ordered by reward; the best is paired with the worst, the second with the last but one, as long as
their rewards differ by the margin. A session stands for itself by its largest example. Inside a
session, an answer that the harness continued from is better than one to the same question that it
rejected (`sibling_pairs`).

`survey` selects examples by quality, in two steps: every example is judged by itself (`Rules`),
then the examples of a task against each other: what says the same as an earlier one goes, and of
the rest the best `keep` stay. Nothing is dropped without a reason that the statistics count.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from pydantic import Field

from bridle.capture.records import Exchange, SessionCapture
from bridle.config import Settings
from bridle.errors import BridleError, boundary
from bridle.trajectory.builders import rejected, shown_whole
from bridle.trajectory.result import encode
from bridle.trajectory.sample import Trace, Trajectory
from bridle.trajectory.transcript import Transcript
from bridle.types import JSON, DeliveryState, FinishReason, LogprobMode, SessionStatus, one_line

RUN = 8
"""Length of the runs that `repetition` counts: longer than what a template repeats."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One conversation of a session; made by `examples_of`."""

    trajectory: Trajectory
    trace_id: str
    trace: Trace | None
    """`None` = text only."""
    prompt_messages: Sequence[JSON]
    """Before the model's first turn."""
    response_messages: Sequence[JSON]
    """From the model's first turn on."""
    tools: Sequence[JSON] | None
    reward: float | None
    """The trace's own where it has one, else the session's; `None` = not known."""
    finish_reason: str
    """Of the last turn."""
    turns: int
    """Turns of the model."""
    rejected: bool = False
    """True if it ends in a reply that the harness read and did not continue from."""

    @property
    def task_id(self) -> str:
        """Id of the task; empty if it is not known."""
        return str(self.trajectory.metadata.get("task_id") or "")

    @property
    def messages(self) -> list[JSON]:
        """All messages of the conversation, the prompt's and the response's."""
        return [*self.prompt_messages, *self.response_messages]

    @property
    def tokens(self) -> int | None:
        """Number of tokens of prompt and response together; `None` = not known."""
        trace = self.trace
        return None if trace is None else trace.size

    @property
    def trained(self) -> int:
        """Number of tokens that train."""
        return 0 if self.trace is None else int(np.count_nonzero(self.trace.loss_mask))

    @property
    def digest(self) -> bytes:
        """Digest that is equal for two examples of one task in which the model sampled, or said,
        the same.
        """
        said = self.trace.response_ids[self.trace.loss_mask == 1].tobytes() if self.trace else b""
        text = said or orjson.dumps([_said(m) for m in self.response_messages if _is_model(m)])
        return hashlib.sha256(self.task_id.encode() + b"\0" + text).digest()

    @property
    def repetition(self) -> float:
        """Share of the runs of 8 sampled tokens (or words) that occurred in the example before.

        0 where nothing repeats and for what is too short; near 1 for a loop.
        """
        if self.trace is not None:
            return _repeated(self.trace.response_ids[self.trace.loss_mask == 1].tolist())
        words = [_said(message) for message in self.response_messages if _is_model(message)]
        return _repeated(" ".join("\n".join(one) for one in words).split())


def examples_of(trajectory: Trajectory, capture: SessionCapture | None = None) -> list[Example]:
    """Return the training examples of a session: one per conversation.

    `capture` gives the texts of conversations without token ids; without it, these are left out.
    """
    if trajectory.traces or capture is None:
        return [
            Example(
                trajectory,
                trace.trace_id,
                trace,
                trace.prompt_messages,
                trace.response_messages,
                trace.tools,
                trajectory.reward if trace.reward is None else trace.reward,
                str(trace.finish_reason),
                len(trace.turn_ends),
                bool(trace.metadata.get("rejected")),
            )
            for trace in trajectory.traces
        ]
    return list(_texts(trajectory, capture))


def _texts(trajectory: Trajectory, capture: SessionCapture) -> Iterator[Example]:
    """Yield one example for each conversation whose turns an engine gave as text."""
    kinds = trajectory.metadata["train"]
    said = [one for one in capture.exchanges if _was_said(one, capture) and one.kind in kinds]
    by_id = {one.exchange_id: one for one in said}
    continued = {one.continues for one in said}
    transcript = Transcript(capture.exchanges, capture.bodies)
    shown = shown_whole(capture.exchanges)
    passed_over = rejected(capture.exchanges, capture.deliveries, shown)
    for last in said:
        if last.exchange_id in continued:
            continue
        path = [last]
        while (before := by_id.get(path[0].continues or "")) is not None:
            path.insert(0, before)
        whole = [*transcript.prompt_messages(last), *transcript.response_messages([last])]
        start = min(len(transcript.prompt_messages(path[0])), len(whole) - 1)
        yield Example(
            trajectory,
            f"{trajectory.session_id}/text/{last.exchange_id}",
            None,
            whole[:start],
            whole[start:],
            transcript.tools(last),
            trajectory.reward,
            str(last.finish_reason),
            len(path),
            last.exchange_id in passed_over,
        )


def _was_said(exchange: Exchange, capture: SessionCapture) -> bool:
    """Return whether the policy's engine returned the whole reply as text and the harness received
    it.
    """
    delivery = capture.deliveries.get(exchange.exchange_id)
    return (
        exchange.logprob_mode is LogprobMode.NONE
        and exchange.finish_reason is not FinishReason.ABORT
        and not exchange.extra.get("other_model")
        and delivery is not None
        and delivery.state is DeliveryState.DELIVERED
    )


def _is_model(message: JSON) -> bool:
    return bool(message["role"] == "assistant")


def _said(message: JSON) -> list[str]:
    """Return the model's output in a message: its text, then each call."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    text = content if isinstance(content, str) else orjson.dumps(content).decode()
    return [text, *(f"{call['name']} {call['arguments']}" for call in calls)]


def _repeated(items: Sequence[Hashable]) -> float:
    runs = [tuple(items[at : at + RUN]) for at in range(len(items) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


@dataclass(slots=True)
class SftCounts:
    """Counts of what an export wrote."""

    examples: int = 0
    tokens: int = 0
    """Tokens that train."""
    texts: int = 0
    """Examples without ids, which an engine without ids left; counted as `examples` too."""


def write_sft(path: str | Path, examples: Iterable[Example]) -> SftCounts:
    """Write each example as a line of JSON for supervised fine-tuning.

    The file is written whole or not at all. `BridleError` has the path.
    """
    counts = SftCounts()

    def lines() -> Iterable[JSON]:
        for one in examples:
            counts.examples += 1
            counts.tokens += one.trained
            counts.texts += one.trace is None
            yield line(one)

    write_lines(path, lines())
    return counts


def write_lines(path: str | Path, lines: Iterable[JSON]) -> int:
    """Write JSON lines, the file whole or not at all, and return how many. `BridleError` has the
    path.
    """
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path
    part = path.with_name(path.name + ".part")
    count = 0
    with boundary(BridleError, f"{path}: cannot write examples"):
        try:
            with part.open("wb") as file:
                for one in lines:
                    file.write(one_line(encode(one)) + b"\n")
                    count += 1
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return count


def line(example: Example) -> JSON:
    """Return an example as one line of a data set: exact tokens beside readable messages."""
    ids = mask = None
    if (trace := example.trace) is not None:
        ids = trace.ids.tolist()
        mask = [0] * len(trace.prompt_ids) + trace.loss_mask.tolist()
    return {
        "messages": [chat(message) for message in example.messages],
        "tools": tools_text(example),
        "input_ids": ids,
        "loss_mask": mask,
        "reward": example.reward,
        "task_id": example.trajectory.metadata.get("task_id"),
        "session_id": example.trajectory.session_id,
        "trace_id": example.trace_id,
    }


def tools_text(example: Example) -> str | None:
    """Return the example's tool list as JSON text; `None` = the requests had no tools."""
    return None if example.tools is None else encode([*example.tools]).decode()


def chat(message: JSON) -> JSON:
    """Return a chat message whose `content` is never null, so that every line of a data set has the
    same types.
    """
    return {**message, "content": message.get("content") or ""}


# ---- preference pairs


@dataclass(slots=True)
class PairCounts:
    """Counts of the pairs built and of the tasks left out."""

    pairs: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> tasks (`flat`: no two rewards differ enough) or pairs (`prompt_differs`)."""


def write_pairs(
    path: str | Path,
    examples: Iterable[Example],
    *,
    margin: float = 1e-6,
    per_task: int = 1,
    siblings: Iterable[JSON] = (),
) -> PairCounts:
    """Write preference pairs as JSON lines: at most `per_task` pairs of each task, whose rewards
    differ by at least `margin`, then the lines of `siblings`. `BridleError` has the path.

    A line has `prompt`, `chosen`, `rejected` (messages), `tools`, `chosen_reward`,
    `rejected_reward`, `task_id`, `chosen_session`, `rejected_session`, and, where ids are known,
    `prompt_ids`, `chosen_ids`, `rejected_ids` with `chosen_mask`, `rejected_mask`. Examples of
    unknown reward are passed over.
    """
    by_task: dict[str, dict[str, Example]] = {}
    for one in examples:
        if one.reward is None:
            continue
        of = by_task.setdefault(one.task_id, {})
        session_id = one.trajectory.session_id
        if session_id not in of or _size(one) > _size(of[session_id]):
            of[session_id] = one
    counts = PairCounts()
    lines = _lines(by_task, margin, per_task, counts)
    counts.pairs = write_lines(path, itertools.chain(lines, siblings))
    return counts


def sibling_pairs(capture: SessionCapture) -> Iterator[JSON]:
    """Yield a preference pair for each rejected answer of a session to a question whose other
    answer the harness went on with.

    Each is a line as `write_pairs` writes it, without rewards and ids of tokens.
    """
    exchanges = {one.exchange_id: one for one in capture.exchanges}
    shown = shown_whole(capture.exchanges)
    transcript = Transcript(capture.exchanges, capture.bodies)
    for worse, better in rejected(capture.exchanges, capture.deliveries, shown).items():
        bad, good = exchanges[worse], exchanges[better]
        if better not in shown or bad.extra.get("other_model") or good.extra.get("other_model"):
            continue
        tools = transcript.tools(good)
        yield {
            "prompt": [chat(message) for message in transcript.prompt_messages(good)],
            "chosen": [chat(message) for message in transcript.response_messages([good])],
            "rejected": [chat(message) for message in transcript.response_messages([bad])],
            "tools": None if tools is None else encode([*tools]).decode(),
            "chosen_reward": None,
            "rejected_reward": None,
            "task_id": capture.session.task_id or "",
            "chosen_session": capture.session.session_id,
            "rejected_session": capture.session.session_id,
        }


def _size(example: Example) -> tuple[int, int]:
    return example.trained, example.turns


def _lines(
    by_task: dict[str, dict[str, Example]], margin: float, per_task: int, counts: PairCounts
) -> Iterator[JSON]:
    for of in by_task.values():
        ranked = sorted(of.values(), key=lambda e: -(e.reward or 0.0))
        found = 0
        flat = True
        for good, bad in zip(ranked, reversed(ranked), strict=True):
            if found == per_task or (good.reward or 0.0) - (bad.reward or 0.0) < margin:
                break
            flat = False
            if _prompt(good) != _prompt(bad):
                counts.left_out["prompt_differs"] += 1
                continue
            found += 1
            yield _pair(good, bad)
        counts.left_out["flat"] += flat
    counts.left_out = +counts.left_out


def _prompt(example: Example) -> bytes:
    return orjson.dumps([*example.prompt_messages]) + (tools_text(example) or "").encode()


def _pair(good: Example, bad: Example) -> JSON:
    line: JSON = {
        "prompt": [chat(message) for message in good.prompt_messages],
        "chosen": [chat(message) for message in good.response_messages],
        "rejected": [chat(message) for message in bad.response_messages],
        "tools": tools_text(good),
        "chosen_reward": good.reward,
        "rejected_reward": bad.reward,
        "task_id": good.task_id,
        "chosen_session": good.trajectory.session_id,
        "rejected_session": bad.trajectory.session_id,
    }
    if good.trace is not None and bad.trace is not None:
        line |= {
            "prompt_ids": good.trace.prompt_ids.tolist(),
            "chosen_ids": good.trace.response_ids.tolist(),
            "chosen_mask": good.trace.loss_mask.tolist(),
            "rejected_ids": bad.trace.response_ids.tolist(),
            "rejected_mask": bad.trace.loss_mask.tolist(),
        }
    return line


# ---- selection


class Rules(Settings):
    """Conditions that an example must meet. A rule that is not given accepts everything."""

    statuses: tuple[SessionStatus, ...] = (SessionStatus.COMPLETED,)
    """The end that its session must have had."""
    min_reward: float | None = None
    """Least reward; an unknown reward does not do."""
    max_reward: float | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens, prompt and response together; says nothing about text without ids."""
    min_turns: int | None = Field(default=None, ge=1)
    """Least number of turns of the model."""
    max_turns: int | None = Field(default=None, ge=1)
    rejected: bool = False
    """True if replies are taken that the harness read and did not continue from."""
    finish: tuple[str, ...] = ()
    """Finish reasons of the last turn that will do, e.g. `stop`."""
    max_repetition: float | None = Field(default=None, ge=0, le=1)
    """Most repetition: the share of runs of 8 sampled tokens that stood there before."""
    unique: bool = False
    """Of a task's examples in which the model said the same, take one."""
    keep: int | None = Field(default=None, ge=1)
    """Most sessions of a task, those with the highest reward first, then those with fewer
    tokens."""

    def against(self, example: Example) -> str | None:
        """Return the first reason why the rules refuse an example; `None` = it is accepted."""
        return next((reason for reason, fails in self._checks(example) if fails), None)

    def _checks(self, example: Example) -> Iterator[tuple[str, bool]]:
        """Yield every rule that an example can fail."""
        reward = example.reward
        judged = self.min_reward is not None or self.max_reward is not None
        yield "status", example.trajectory.status not in self.statuses
        yield "reward_unknown", judged and reward is None
        yield "reward", not _within(reward, self.min_reward, self.max_reward)
        yield "length", not _within(example.tokens, None, self.max_tokens)
        yield "turns", not _within(example.turns, self.min_turns, self.max_turns)
        yield "rejected", example.rejected and not self.rejected
        yield "finish", bool(self.finish) and example.finish_reason not in self.finish
        most = self.max_repetition
        yield "repetition", most is not None and example.repetition > most


def _within(value: float | None, least: float | None, most: float | None) -> bool:
    return value is None or not (
        (least is not None and value < least) or (most is not None and value > most)
    )


@dataclass(slots=True)
class SourceCounts:
    """The sessions of one source (repository or task set, and harness)."""

    attempted: int = 0
    accepted: int = 0
    turns: int = 0
    """Of accepted sessions."""
    tokens: int = 0
    """Tokens that train, in accepted examples."""
    hours: float = 0.0
    """Of all sessions, one after the other."""
    engine_s: float = 0.0
    """Seconds of model calls of all sessions, one after the other."""

    def json(self) -> JSON:
        """Return the counts as JSON, with shares computed from them."""
        return {
            "attempted": self.attempted,
            "accepted": self.accepted,
            "acceptance": self.accepted / self.attempted if self.attempted else None,
            "turns": self.turns,
            "turns_mean": self.turns / self.accepted if self.accepted else None,
            "tokens": self.tokens,
            "hours": round(self.hours, 4),
            "engine_s": round(self.engine_s, 2),
        }


@dataclass(slots=True)
class Survey:
    """Accepted and rejected examples of many sessions."""

    accepted: dict[str, frozenset[str]] = field(default_factory=dict)
    """Session id -> its examples (`trace_id`) that were taken."""
    sources: dict[str, SourceCounts] = field(default_factory=dict)
    """`repository / harness` -> counts, sorted; a task of none counts under its task set."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Reason -> sessions of which nothing was taken; the reason of the first example."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> examples that were not taken, of all sessions."""
    tasks: int = 0
    solved: int = 0
    """Tasks of which something was taken."""
    wall_hours: float = 0.0
    """In which at least one session ran."""
    examples: int = 0

    def json(self) -> JSON:
        """Return the accepted and rejected counts as the JSON of `statistics.json` and `--json`."""
        whole = SourceCounts()
        for tally in self.sources.values():
            for name in SourceCounts.__dataclass_fields__:
                setattr(whole, name, getattr(whole, name) + getattr(tally, name))
        return {
            **whole.json(),
            "wall_hours": round(self.wall_hours, 4),
            "examples": self.examples,
            "tasks": self.tasks,
            "tasks_accepted": self.solved,
            "rejected": dict(sorted(self.rejected.items())),
            "examples_left_out": dict(sorted(self.left_out.items())),
            "sources": {name: tally.json() for name, tally in self.sources.items()},
        }


@dataclass(frozen=True, slots=True)
class _Light:
    """Facts about an example that are kept between the two steps."""

    session_id: str
    trace_id: str
    reward: float
    tokens: int
    trained: int
    turns: int
    digest: bytes


def survey(sessions: Iterable[tuple[SessionCapture, Trajectory]], rules: Rules) -> Survey:
    """Apply the rules to all sessions and return the accepted examples, with counts of the
    rejected.

    Sessions are read one at a time; memory grows with their number, not with their tokens.
    """
    found = Survey()
    by_task: defaultdict[str, list[_Light]] = defaultdict(list)
    why: dict[str, str] = {}
    source_of: dict[str, str] = {}
    spans: list[tuple[float, float]] = []
    for capture, trajectory in sessions:
        record, outcome = capture.session, capture.outcome
        source = source_of[record.session_id] = _source(capture)
        tally = found.sources.setdefault(source, SourceCounts())
        tally.attempted += 1
        tally.engine_s += sum(exchange.duration_s for exchange in capture.exchanges)
        by_task[record.task_id or ""] += []
        if outcome is not None:
            tally.hours += max(0.0, outcome.ended_at - record.opened_at) / 3600
            spans.append((record.opened_at, outcome.ended_at))
        for example in (offered := examples_of(trajectory, capture)):
            if (reason := rules.against(example)) is not None:
                found.left_out[reason] += 1
                why.setdefault(record.session_id, reason)
            else:
                by_task[record.task_id or ""].append(_light(example, record.session_id, rules))
        if not offered:
            good = trajectory.status in rules.statuses
            why[record.session_id] = "nothing_sampled" if good else "status"
    for offers in by_task.values():
        _choose(offers, rules, found, why, source_of)
    found.tasks = len(by_task)
    found.rejected = Counter(why[name] for name in why if name not in found.accepted)
    found.sources = dict(sorted(found.sources.items()))
    found.wall_hours = _covered(spans) / 3600
    return found


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return seconds that at least one of the spans covers: a pause before a resume is not
    counted.
    """
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _source(capture: SessionCapture) -> str:
    kept = capture.session.metadata
    facts = kept.get("task_metadata") or {}
    origin = next((facts[key] for key in ("repo", "package", "task_set") if facts.get(key)), None)
    return " / ".join(str(name) for name in (origin, kept.get("harness")) if name) or "unnamed"


def _light(example: Example, session_id: str, rules: Rules) -> _Light:
    return _Light(
        session_id,
        example.trace_id,
        float("-inf") if example.reward is None else example.reward,
        example.tokens or 0,
        example.trained,
        example.turns,
        example.digest if rules.unique else b"",
    )


def _choose(
    offers: list[_Light],
    rules: Rules,
    found: Survey,
    why: dict[str, str],
    source_of: Mapping[str, str],
) -> None:
    """Take of one task's examples what `unique` and `keep` leave."""
    best: dict[str, tuple[float, int]] = {}
    for offer in offers:
        reward, tokens = best.get(offer.session_id, (-offer.reward, offer.tokens))
        best[offer.session_id] = min(reward, -offer.reward), min(tokens, offer.tokens)
    kept: set[str] = set()
    seen: set[bytes] = set()
    taken: dict[str, list[_Light]] = {}
    for offer in sorted(offers, key=lambda o: best[o.session_id]):
        if rules.unique and offer.digest in seen:
            reason = "duplicate"
        elif rules.keep is not None and offer.session_id not in kept and len(kept) == rules.keep:
            reason = "surplus"
        else:
            seen.add(offer.digest)
            kept.add(offer.session_id)
            taken.setdefault(offer.session_id, []).append(offer)
            continue
        found.left_out[reason] += 1
        why.setdefault(offer.session_id, reason)
    found.solved += bool(taken)
    for session_id, of in taken.items():
        tally = found.sources[source_of[session_id]]
        tally.accepted += 1
        tally.turns += sum(offer.turns for offer in of)
        tally.tokens += sum(offer.trained for offer in of)
        found.examples += len(of)
        found.accepted[session_id] = frozenset(offer.trace_id for offer in of)


def select_examples(
    sessions: Iterable[tuple[SessionCapture, Trajectory]],
    accepted: Mapping[str, Collection[str]],
) -> Iterator[tuple[SessionCapture, Trajectory, list[Example]]]:
    """Yield the accepted sessions with their accepted examples, in order."""
    for capture, trajectory in sessions:
        names = accepted.get(capture.session.session_id)
        if names is not None:
            of = [e for e in examples_of(trajectory, capture) if e.trace_id in names]
            yield capture, trajectory, of

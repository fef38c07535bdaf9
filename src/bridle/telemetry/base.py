"""The `Tracker` interface, and `Telemetry`, which passes a run's events to trackers."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import orjson
import structlog

from bridle.bridges.base import turns_of
from bridle.capture.records import SessionCapture
from bridle.node.base import Event, SessionChanged, SessionEnded
from bridle.node.results import SessionResult
from bridle.types import JSON

log = structlog.get_logger(__name__)

SAMPLES_EVERY: Final = 50
"""Sessions per table of samples."""

TEXT: Final = 2_000
"""Characters of a message in a table of samples."""

CLOSE_S: Final = 60.0
"""Time that trackers may take for queued events when a run ends."""

SESSIONS_BEHIND: Final = 200
"""Calls that may wait for trackers when a whole session, with its capture, is added to them."""

MOST_BEHIND: Final = 50_000
"""Calls that may wait: a tracker whose service hangs must not take the run's memory."""


@dataclass(frozen=True, slots=True)
class TrackedCall:
    """A model call with Unix times."""

    model: str
    start: float
    end: float
    attributes: JSON
    """Named by the semantic conventions for generative AI, without `gen_ai.`."""
    tools: Sequence[tuple[str, float]]
    """Name of each tool that the reply calls, and the time of the request that continues it."""


@dataclass(frozen=True, slots=True, eq=False)
class TrackedSession:
    """A session that has ended, as trackers get it."""

    result: SessionResult
    capture: SessionCapture | None
    """`None` = its calls were captured on another node."""
    stages: Sequence[tuple[str, float]]
    """Each status that it entered, with the Unix time."""

    def calls(self) -> Iterator[TrackedCall]:
        """Yield the session's model calls in the order of their commits."""
        calls = self.capture.exchanges if self.capture is not None else ()
        turns = (turn for trace in self.result.trajectory.traces for turn in turns_of(trace))
        replies = {turn.exchange_id: turn.said for turn in turns}
        next_at = {call.continues: call.started_at for call in reversed(calls)}
        for call in calls:
            model = str(orjson.loads(call.request.head).get("model"))
            end = call.started_at + call.duration_s
            attributes = {
                "request.model": model,
                "response.finish_reasons": [call.finish_reason],
                "usage.input_tokens": call.prompt_length,
                "usage.output_tokens": len(call.output_ids),
            }
            until = next_at.get(call.exchange_id, end)
            messages = replies.get(call.exchange_id, ())
            tools = [tool for one in messages for tool in one.get("tool_calls") or ()]
            named = [(tool["function"]["name"], until) for tool in tools]
            yield TrackedCall(model, call.started_at, end, attributes, named)


class Tracker:
    """Base of trackers, which export a run's numbers; each method does nothing by default.

    Methods are called by one thread and may raise.
    """

    def numbers(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        """Log values of one step. `axis` begins their names: `rollout`, `train` or `eval`."""

    def samples(self, rows: Sequence[JSON]) -> None:
        """Log a table of sessions; all rows have the same keys."""

    def session(self, ended: TrackedSession) -> None:
        """Log one whole session."""

    def close(self) -> None:
        """Send what is pending, and close the tracker."""


class Telemetry:
    """Passes events to trackers, in a thread of its own.

    A tracker that raises is logged and gets no further events; the run continues.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._stages: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
        self._sessions = 0
        self._rewards: list[float] = []
        self._rows: list[JSON] = []
        self._logged: defaultdict[str, int] = defaultdict(int)
        self._queue: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._lost = 0
        """Calls that trackers did not get, because they were too far behind."""
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)
        if trackers:
            self._thread.start()

    def on_event(self, event: Event) -> None:
        """Queue an event of a node for the trackers."""
        if not self._trackers:
            return
        if isinstance(event, SessionChanged):
            self._stages[event.session_id].append((str(event.status), event.at))
        elif isinstance(event, SessionEnded):
            stages = self._stages.pop(event.result.session_id, [])
            self._session(TrackedSession(event.result, event.capture, stages or _stages(event)))

    def training(self, steps: Sequence[JSON], evaluations: Sequence[JSON]) -> None:
        """Log all steps and evaluations of a training so far; each is logged once."""
        for axis, rows in (("train", steps), ("eval", evaluations)):
            for row in rows[self._logged[axis] :]:
                values = flatten({name: value for name, value in row.items() if name != "step"})
                self._numbers(axis, row["step"], values)
            self._logged[axis] = len(rows)

    def close(self) -> None:
        """Send all queued values to the trackers and close them, within a time limit."""
        if not self._thread.is_alive():
            return
        self._samples()
        self._queue.put(lambda tracker: tracker.close())
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._lost:
            log.warning("telemetry_behind", lost_calls=self._lost)
        if self._thread.is_alive():
            log.warning("telemetry_incomplete", waited_s=CLOSE_S, trackers=sorted(self._trackers))

    def _session(self, ended: TrackedSession) -> None:
        summary = ended.result.summary()
        self._sessions += 1
        if summary["reward"] is not None:
            self._rewards.append(summary["reward"])
            summary["reward_mean"] = sum(self._rewards) / len(self._rewards)
        summary["completed"] = float(summary["status"] == "COMPLETED")
        del summary["sample_index"], summary["fork"]
        # Requests choose the names inside: a tracker refuses some, and keeps each for ever.
        summary["unknown"] = sum((summary["unknown"] or {}).values())
        self._put(lambda tracker: tracker.session(ended), SESSIONS_BEHIND)
        self._numbers("rollout", self._sessions, flatten(summary))
        self._rows.append(sample(ended.result))
        if len(self._rows) == SAMPLES_EVERY:
            self._samples()

    def _numbers(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        named = {f"{axis}/{name}": value for name, value in values.items()}
        self._put(lambda tracker: tracker.numbers(axis, step, named))

    def _samples(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._put(lambda tracker: tracker.samples(rows))

    def _put(self, call: Callable[[Tracker], None], most: int = MOST_BEHIND) -> None:
        if self._queue.qsize() < most:
            self._queue.put(call)
        else:
            self._lost += 1

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            for name, tracker in tuple(self._trackers.items()):
                try:
                    call(tracker)
                except Exception as error:  # noqa: BLE001 - of a third-party package
                    del self._trackers[name]
                    log.warning("tracker_failed", tracker=name, error=repr(error))


def _stages(event: SessionEnded) -> list[tuple[str, float]]:
    """Return the stages of a session without status events; there is always one."""
    capture = event.capture
    if capture is None or capture.outcome is None:
        return [(str(event.result.status), time.time())]
    outcome = capture.outcome
    return [("RUNNING", capture.session.opened_at), (outcome.status, outcome.ended_at)]


def flatten(values: JSON, above: str = "") -> dict[str, float]:
    """Return the numbers of nested objects under names like `update/loss`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{above}{name}/")
        elif isinstance(value, (int, float)):
            found[f"{above}{name}"] = float(value)
    return found


def sample(result: SessionResult) -> JSON:
    """Return a session as a row of a tracker's table: its first and last message, and its
    outcome.
    """
    traces = result.trajectory.traces
    first = traces[0].prompt_messages if traces else ()
    last = traces[-1].response_messages if traces else ()
    question = next((one for one in first if one["role"] == "user"), {})
    reply = next((one for one in reversed(last) if one["role"] == "assistant"), {})
    return {
        "session_id": result.session_id,
        "task_id": result.task_id,
        "harness": result.harness,
        "status": str(result.status),
        "cause": str(result.cause or ""),
        "reward": result.reward,
        "prompt": str(question.get("content") or "")[:TEXT],
        "reply": str(reply.get("content") or reply.get("tool_calls") or "")[:TEXT],
    }

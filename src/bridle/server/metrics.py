"""The server's metrics in Prometheus text form (version 0.0.4).

Counters count events of this process. Gauges of tasks, sessions and callbacks are read from the
database at each scrape, so all servers on one database report the same. Metrics of model calls come
from the nodes' gateways (`bridle.gateway.metrics`), with the label `node`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from bridle.errors import StateError
from bridle.server.schemas import CallbackState, EndedRun, SessionState, TaskState
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Cause

if TYPE_CHECKING:
    from bridle.server.service import Service

SECONDS: Final = (0.1, 0.5, 1, 5, 15, 60, 180, 600, 1800, 3600, 7200)
"""Buckets of stage durations: from a sandbox's start to an agent's whole day."""


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self._counted = CollectorRegistry()
        ProcessCollector(registry=self._counted)
        self._runs = Counter(
            "bridle_server_runs",
            "Runs that ended, by status, cause, and what came of it: final, again, lost.",
            ("status", "cause", "became"),
            registry=self._counted,
        )
        self._stages = Histogram(
            "bridle_server_stage_seconds",
            "Seconds of the stages of runs that ended.",
            ("stage",),
            buckets=SECONDS,
            registry=self._counted,
        )
        self._tokens = Counter(
            "bridle_server_tokens",
            "Sampled tokens of final sessions: trained, or the reason for which they are excluded.",
            ("fate",),
            registry=self._counted,
        )
        self._tries = Counter(
            "bridle_server_callback_tries",
            "Tries to deliver a callback: taken, failed, dead (failed, and not retried any more).",
            ("became",),
            registry=self._counted,
        )
        for became in ("taken", "failed", "dead"):  # a series that begins at 1 is not an increase
            self._tries.labels(became)
        self._requests = Counter(
            "bridle_server_requests",
            "Answered requests by route and status.",
            ("method", "route", "status"),
            registry=self._counted,
        )

    def run_ended(self, ended: EndedRun, became: str) -> None:
        """Count a run that ended or could not start; `became` says what its session became:
        `final`, `again` (queued) or `lost`.
        """
        self._runs.labels(ended.status, "" if ended.cause is None else ended.cause, became).inc()
        for stage, seconds in ended.result["timing"].items():
            self._stages.labels(stage).observe(seconds)

    def run_lost(self, became: str) -> None:
        """Count a run that was lost with its node; `became` says what its session became."""
        self._runs.labels("LOST", str(Cause.INFRASTRUCTURE), became).inc()

    def kept(self, trajectory: Trajectory) -> None:
        """Count the trained tokens of a session whose result is final, and its excluded ones by
        reason.
        """
        stats = trajectory.metadata.get("stats", {})
        self._tokens.labels("trained").inc(stats.get("tokens_trained", 0))
        for reason, count in stats.get("tokens_excluded", {}).items():
            self._tokens.labels(reason).inc(count)

    def callback_tried(self, *, taken: bool, dead: bool) -> None:
        """Count an attempt to send a callback: acknowledged (`taken`), failed, or failed for the
        last time.
        """
        self._tries.labels("taken" if taken else "dead" if dead else "failed").inc()

    def answered(self, method: str, route: str, status: int) -> None:
        """Count an answered HTTP request."""
        self._requests.labels(method, route, status).inc()

    async def render(self, service: Service) -> bytes:
        """Return all metrics as Prometheus text, also if the database cannot be used."""
        try:
            status: JSON | None = await service.status()
        except StateError:
            status = None
        nodes, texts = service.workers.nodes(), await service.workers.metrics()
        families = _Families([*_server(service, status), *_nodes(nodes), *_with_nodes(texts)])
        return generate_latest(self._counted) + generate_latest(families)


class _Families(Collector):
    """Metric families that were read already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _server(service: Service, status: JSON | None) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"bridle_server_{name}", text, value=value)

    yield gauge("database_up", "Whether the database can be used.", status is not None)
    yield gauge("healthy", "Whether no part of the server has failed.", service.failure is None)
    yield gauge("slots", "Runs that may be under way at once.", service.workers.capacity)
    yield gauge("runs_under_way", "Runs now.", len(service.scheduler.running))
    if status is None:
        return
    yield gauge("paused", "Whether no session is started until `resume`.", status["paused"])
    yield gauge(
        "policy_version", "Version under which sessions start.", status["policy"]["version"]
    )
    yield gauge("sessions_waiting", "Sessions still to be started.", status["sessions_waiting"])
    yield gauge("groups_unacked", "Groups that ended and nobody acked.", status["groups_unacked"])
    for what in ("waiting", "running"):
        text = f"Sessions {what}, by the owner of their task."
        family = GaugeMetricFamily(f"bridle_server_owner_{what}", text, labels=("owner",))
        for owner, counts in status["owners"].items():
            family.add_metric([owner], counts[what])
        yield family
    for name, text, states in (
        ("tasks", "Tasks by state.", TaskState),
        ("sessions", "Started sessions by state.", SessionState),
        ("callbacks", "Callbacks by state.", CallbackState),
    ):
        family = GaugeMetricFamily(f"bridle_server_{name}", text, labels=("state",))
        for state in states:
            family.add_metric([str(state)], status[name].get(state, 0))
        yield family


def _nodes(nodes: Iterable[JSON]) -> Iterator[Metric]:
    texts = {
        "up": "Whether a node takes part: it is live or draining.",
        "slots": "Runs it has room for.",
        "free": "Of those, free ones.",
    }
    seen = [node | {"up": node["state"] in ("live", "draining")} for node in nodes]
    for name, text in texts.items():
        family = GaugeMetricFamily(f"bridle_node_{name}", text, labels=("node",))
        for node in seen:
            family.add_metric([node["name"]], node[name])
        yield family


def _with_nodes(texts: Mapping[str, str]) -> Iterable[Metric]:
    """Return the metric families of all nodes' gateways, each sample with its `node`."""
    families: dict[str, Metric] = {}
    for node, text in texts.items():
        for read in text_string_to_metric_families(text):
            family = families.setdefault(
                read.name, Metric(read.name, read.documentation, read.type)
            )
            for sample in read.samples:
                family.add_sample(sample.name, {"node": node, **sample.labels}, sample.value)
    return families.values()

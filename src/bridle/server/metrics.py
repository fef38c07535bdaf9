"""A server's numbers for operators, in Prometheus text form (version 0.0.4).

What happened is counted in this process since it began. How much there is of what is read from the
database whenever somebody asks, so several servers on one database tell the same there. The model
calls are the nodes' gateways' own numbers (`bridle.gateway.metrics`), each with its `node`.
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
from bridle.server.tables import CallbackState, EndedRun, SessionState, TaskState
from bridle.trajectory.sample import Trajectory
from bridle.types import JSON, Cause

if TYPE_CHECKING:
    from bridle.server.service import Service

SECONDS: Final = (0.1, 0.5, 1, 5, 15, 60, 180, 600, 1800, 3600, 7200)
"""Bounds of what a stage takes: a sandbox's start to an agent's whole day."""


class ServerMetrics:
    """The numbers of one server."""

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
            "Tries to deliver a callback: taken, failed, dead (failed, and given up).",
            ("became",),
            registry=self._counted,
        )
        for became in ("taken", "failed", "dead"):  # what begins at 1 is no increase
            self._tries.labels(became)
        self._requests = Counter(
            "bridle_server_requests",
            "Answered requests by route and status.",
            ("method", "route", "status"),
            registry=self._counted,
        )

    def run_ended(self, ended: EndedRun, became: str) -> None:
        """One more run has ended, or could not begin; `became` is `FinalizeResult.what`."""
        self._runs.labels(ended.status, "" if ended.cause is None else ended.cause, became).inc()
        for stage, seconds in ended.result["timing"].items():
            self._stages.labels(stage).observe(seconds)

    def run_lost(self, became: str) -> None:
        """One more run was lost with its node."""
        self._runs.labels("LOST", str(Cause.INFRASTRUCTURE), became).inc()

    def kept(self, trajectory: Trajectory) -> None:
        """The trajectory of one more session that is final."""
        stats = trajectory.metadata.get("stats", {})
        self._tokens.labels("trained").inc(stats.get("tokens_trained", 0))
        for reason, count in stats.get("tokens_excluded", {}).items():
            self._tokens.labels(reason).inc(count)

    def callback_tried(self, *, taken: bool, dead: bool) -> None:
        """One more try of a callback."""
        self._tries.labels("taken" if taken else "dead" if dead else "failed").inc()

    def answered(self, method: str, route: str, status: int) -> None:
        self._requests.labels(method, route, status).inc()

    async def render(self, service: Service) -> bytes:
        """All of them as text. A database that cannot be used is a number too."""
        try:
            told: JSON | None = await service.status()
        except StateError:
            told = None
        once = CollectorRegistry()
        once.register(_Families([*_server(service, told), *_nodes(service.workers.nodes())]))
        once.register(_Families(_with_nodes(await service.workers.metrics())))
        return generate_latest(self._counted) + generate_latest(once)


class _Families(Collector):
    """Families that were read already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _server(service: Service, told: JSON | None) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"bridle_server_{name}", text, value=value)

    yield gauge("database_up", "Whether the database can be used.", told is not None)
    yield gauge("healthy", "Whether no part of the server has failed.", service.failure is None)
    yield gauge("slots", "Runs that may be under way at once.", service.workers.capacity)
    yield gauge("runs_under_way", "Runs now.", len(service.scheduler.running))
    if told is None:
        return
    yield gauge("paused", "Whether no session is started until `resume`.", told["paused"])
    yield gauge("policy_version", "Version under which sessions start.", told["policy"]["version"])
    yield gauge("sessions_waiting", "Sessions still to be started.", told["sessions_waiting"])
    yield gauge("groups_unacked", "Groups that ended and nobody acked.", told["groups_unacked"])
    for what in ("waiting", "running"):
        text = f"Sessions {what}, by the owner of their task."
        family = GaugeMetricFamily(f"bridle_server_owner_{what}", text, labels=("owner",))
        for owner, counts in told["owners"].items():
            family.add_metric([owner], counts[what])
        yield family
    for name, text, states in (
        ("tasks", "Tasks by state.", TaskState),
        ("sessions", "Started sessions by state.", SessionState),
        ("callbacks", "Callbacks by state.", CallbackState),
    ):
        family = GaugeMetricFamily(f"bridle_server_{name}", text, labels=("state",))
        for state in states:
            family.add_metric([str(state)], told[name].get(state, 0))
        yield family


def _nodes(nodes: Iterable[JSON]) -> Iterator[Metric]:
    families = {
        "up": GaugeMetricFamily(
            "bridle_node_up", "Whether a node takes part: it is live or draining.", labels=("node",)
        ),
        "slots": GaugeMetricFamily("bridle_node_slots", "Runs it has room for.", labels=("node",)),
        "free": GaugeMetricFamily("bridle_node_free", "Of those, free ones.", labels=("node",)),
    }
    for node in nodes:
        families["up"].add_metric([node["name"]], node["state"] in ("live", "draining"))
        for name in ("slots", "free"):
            families[name].add_metric([node["name"]], node[name])
    return iter(families.values())


def _with_nodes(texts: Mapping[str, str]) -> Iterable[Metric]:
    """The families of all nodes' gateways, each sample with its `node`."""
    families: dict[str, Metric] = {}
    for node, text in texts.items():
        for told in text_string_to_metric_families(text):
            family = families.setdefault(
                told.name, Metric(told.name, told.documentation, told.type)
            )
            for sample in told.samples:
                family.add_sample(sample.name, {"node": node, **sample.labels}, sample.value)
    return families.values()

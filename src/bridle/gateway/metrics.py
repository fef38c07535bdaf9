"""Numbers for operators, in Prometheus text form. One registry per gateway, none global."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridle.engines.pool import EnginePool


class Metrics:
    """Counters of one gateway. Incrementing one costs about a microsecond."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "bridle_requests",
            "Requests on the data routes, by dialect, what they asked for, and status.",
            ("dialect", "route", "status"),
            registry=self._registry,
        )
        self.calls = Counter(
            "bridle_calls",
            "Model calls by how they ended: committed, failed, cancelled.",
            ("outcome",),
            registry=self._registry,
        )
        self.joined = Counter(
            "bridle_joined_requests",
            "Requests that joined an earlier call instead of sampling again.",
            registry=self._registry,
        )
        self.placements = Counter(
            "bridle_placements",
            "Calls by their place in the conversation and whether tokens were extended.",
            ("kind", "extended"),
            registry=self._registry,
        )
        self.deliveries = Counter(
            "bridle_deliveries", "Delivery records by state.", ("state",), registry=self._registry
        )
        self.breaks = Counter(
            "bridle_prompt_breaks",
            "Calls that the engine sampled under another prompt than it was given.",
            registry=self._registry,
        )
        self.prompt_tokens = Counter(
            "bridle_prompt_tokens", "Prompt tokens of committed calls.", registry=self._registry
        )
        self.sampled_tokens = Counter(
            "bridle_sampled_tokens", "Sampled tokens of committed calls.", registry=self._registry
        )
        self.in_flight = Gauge(
            "bridle_calls_in_flight", "Model calls now.", registry=self._registry
        )
        self.sessions = Gauge("bridle_sessions_open", "Living sessions.", registry=self._registry)
        self.duration = Histogram(
            "bridle_call_seconds",
            "Seconds from a request's last byte to its commit.",
            buckets=(0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600),
            registry=self._registry,
        )

        self.cached_tokens = Counter(
            "bridle_cached_prompt_tokens",
            "Prompt tokens of committed calls that came from an engine's prefix cache.",
            registry=self._registry,
        )
        self._bound: dict[tuple[object, ...], Counter] = {}

    def request(self, dialect: str, route: str, status: int) -> None:
        """One more answered request."""
        self._count(self.requests, dialect, route, status)

    def call(self, outcome: str) -> None:
        """One more ended call."""
        self._count(self.calls, outcome)

    def placement(self, kind: str, *, extended: bool) -> None:
        """One more placed call."""
        self._count(self.placements, kind, extended)

    def delivery(self, state: str) -> None:
        """One more delivery record."""
        self._count(self.deliveries, state)

    def _count(self, counter: Counter, *values: object) -> None:
        # `labels` takes a lock and joins texts each time; the few children there are, are kept.
        key = (counter, *values)
        child = self._bound.get(key)
        if child is None:
            child = self._bound[key] = counter.labels(*map(str, values))
        child.inc()

    def watch(self, pools: Callable[[], Mapping[str, EnginePool]]) -> None:
        """Tell the replicas of these pools, by the name of their model, whenever somebody asks."""
        self._registry.register(_Replicas(pools))

    def render(self) -> bytes:
        """All of them as Prometheus text, version 0.0.4."""
        return generate_latest(self._registry)


class _Replicas(Collector):
    """Reads the pools' own counters; nothing is counted twice on the way of a call."""

    def __init__(self, pools: Callable[[], Mapping[str, EnginePool]]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        """One family per number."""
        labels = ("model", "replica")
        gauges = {
            name: GaugeMetricFamily(f"bridle_replica_{name}", text, labels=labels)
            for name, text in _GAUGES.items()
        }
        counters = {
            name: CounterMetricFamily(f"bridle_replica_{name}", text, labels=labels)
            for name, text in _COUNTERS.items()
        }
        routed = CounterMetricFamily(
            "bridle_routed_calls",
            "Calls by why they went to their replica: first, stuck, spilled, moved.",
            labels=("model", "how"),
        )
        for model, pool in self._pools().items():
            for told in pool.replicas():
                place = (model, told["name"])
                gauges["up"].add_metric(place, told["state"] == "live")
                for name in ("calls_in_flight", "sessions", "version"):
                    gauges[name].add_metric(place, told[name])
                for name, counter in counters.items():
                    counter.add_metric(place, told[name])
            for how, count in pool.routed.items():
                routed.add_metric((model, how.value), count)
        yield from (*gauges.values(), *counters.values(), routed)


_GAUGES = {
    "up": "Whether a replica gets calls.",
    "calls_in_flight": "Calls that run on a replica now.",
    "sessions": "Sessions that live on a replica.",
    "version": "Policy version of a replica's weights, as far as is known.",
}
_COUNTERS = {
    "calls": "Calls that were given to a replica.",
    "failures": "Calls that a replica failed.",
    "losses": "How often a replica went down.",
    "prompt_tokens": "Prompt tokens of calls that a replica ended.",
    "cached_tokens": "Of those, the ones that came from its prefix cache.",
}

"""Numbers for operators, in Prometheus text form. One registry per gateway, none global."""

from __future__ import annotations

import math
import shutil
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bridle.engines.pool import EnginePool
from bridle.types import Usage


class Tally:
    """A number, or one per set of label values, that the gateway's loop alone changes.

    `prometheus_client`'s own take a lock and three calls for each of the dozen increments of a
    model call: ten times as long.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), *, sinks: bool = False
    ) -> None:
        """`sinks`: it may go down again."""
        self._name, self._text, self._labels, self._sinks = name, text, labels, sinks
        self.values: defaultdict[tuple[object, ...], float] = defaultdict(float)
        """The number by its label values; whoever counts adds to it."""
        if not labels:
            self.values[()] = 0

    def family(self) -> Metric:
        """Return the counter or gauge with all its labels' values for Prometheus."""
        kind = GaugeMetricFamily if self._sinks else CounterMetricFamily
        family = kind(self._name, self._text, labels=self._labels)
        for of, value in self.values.items():
            family.add_metric(list(map(str, of)), value)
        return family


class Spread:
    """Counts of seconds by their size, which the gateway's loop alone changes; see `Tally`."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._total = 0.0
        self._created = time.time()

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def family(self) -> Metric:
        """Return the histogram of the counts so far for Prometheus."""
        names = [*map(floatToGoString, self._bounds)]
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], [*zip(names, accumulate(self._counts), strict=True)], self._total)
        family.add_sample(f"{self._name}_created", {}, self._created)
        return family


class Metrics:
    """Counters of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Tally(
            "bridle_requests",
            "Requests on the data routes, by dialect, what they asked for, and status.",
            ("dialect", "route", "status"),
        )
        self.calls = Tally(
            "bridle_calls",
            "Model calls by how they ended: committed, cut, failed, cancelled.",
            ("outcome",),
        )
        self.joined = Tally(
            "bridle_joined_requests",
            "Requests that joined an earlier call instead of sampling again.",
        )
        self.placements = Tally(
            "bridle_placements",
            "Calls by their place in the conversation and whether tokens were extended.",
            ("kind", "extended"),
        )
        self.deliveries = Tally("bridle_deliveries", "Delivery records by state.", ("state",))
        self.breaks = Tally(
            "bridle_prompt_breaks",
            "Calls that the engine sampled under another prompt than it was given.",
        )
        self.prompt_tokens = Tally("bridle_prompt_tokens", "Prompt tokens of committed calls.")
        self.sampled_tokens = Tally("bridle_sampled_tokens", "Sampled tokens of committed calls.")
        self.cached_tokens = Tally(
            "bridle_cached_prompt_tokens",
            "Prompt tokens of committed calls that came from an engine's prefix cache.",
        )
        self.in_flight = Tally("bridle_calls_in_flight", "Model calls now.", sinks=True)
        self.sessions = Tally("bridle_sessions_open", "Living sessions.", sinks=True)
        self.duration = Spread(
            "bridle_call_seconds",
            "Seconds from a request's last byte to its commit.",
            (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600),
        )
        tallies = [kept for kept in vars(self).values() if isinstance(kept, Tally | Spread)]
        self._registry.register(_Tallies(tallies))

    def committed(self, usage: Usage, seconds: float, *, replayed: bool) -> None:
        """Count the tokens of one more committed call, and the seconds that it took."""
        if not replayed:
            self.sampled_tokens.values[()] += usage.completion_tokens
        self.cached_tokens.values[()] += usage.cached_tokens
        self.prompt_tokens.values[()] += usage.prompt_tokens
        self.duration.observe(seconds)

    def watch(self, pools: Callable[[], Mapping[str, EnginePool]]) -> None:
        """Include the state of these pools' replicas, by the name of their model, in every
        rendering.
        """
        self._registry.register(_Replicas(pools))

    def watch_disk(self, folder: Path) -> None:
        """Include the free space of the disk that has `folder` in every rendering."""
        self._registry.register(_Disk(folder))

    def render(self) -> bytes:
        """Return all metrics as Prometheus text, version 0.0.4."""
        return generate_latest(self._registry)


class _Tallies(Collector):
    """Reads tallies."""

    def __init__(self, tallies: Sequence[Tally | Spread]) -> None:
        self._tallies = tallies

    def collect(self) -> Iterator[Metric]:
        return (tally.family() for tally in self._tallies)


class _Disk(Collector):
    """Reads how much a disk can still take: what is full first when nobody looks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        """Yield one number; none while the folder cannot be reached."""
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError:
            return
        text = "Room left where the capture lies, in bytes."
        yield GaugeMetricFamily("bridle_data_free_bytes", text, value=free)


class _Replicas(Collector):
    """Reads the pools' own counters; nothing is counted twice on the way of a call."""

    def __init__(self, pools: Callable[[], Mapping[str, EnginePool]]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
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
            for replica in pool.replicas():
                place = (model, replica["name"])
                gauges["up"].add_metric(place, replica["state"] == "live")
                gauges["released"].add_metric(place, replica["state"] == "released")
                for name in ("calls_in_flight", "sessions", "version"):
                    gauges[name].add_metric(place, replica[name])
                for name, counter in counters.items():
                    counter.add_metric(place, replica[name])
            for how, count in pool.routed.items():
                routed.add_metric((model, how.value), count)
        yield from (*gauges.values(), *counters.values(), routed)


_GAUGES = {
    "up": "Whether a replica gets calls.",
    "released": "Whether a trainer has a replica's memory, so that nothing is sent to it.",
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


_WORST = {
    "bridle_replica_up": min,
    "bridle_replica_released": max,
    "bridle_replica_version": max,
    "bridle_data_free_bytes": min,
}
"""The merge of several processes' gauges where it is not the sum."""


def merged_metrics(texts: Sequence[str], more: Sequence[tuple[str, str, str, int]] = ()) -> str:
    """Merge the metrics of several gateways: samples of the same name and labels are added up, but
    for those of `_WORST`.

    `more` are further metrics: name, help text, type, value.
    """
    lines: dict[str, float | None] = {}
    families: dict[str, dict[str, float | None]] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith("#"):
                lines = families.setdefault(line.split(" ", 3)[2], {})
                lines[line] = None
                continue
            name, _, number = line.rpartition(" ")
            before, value = lines.get(name), float(number)
            lines[name] = value if before is None else _merge(name, before, value)
    parts = [
        name if number is None else f"{name} {number}"
        for family in families.values()
        for name, number in family.items()
    ]
    for name, text, kind, count in more:
        parts += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {float(count)}"]
    return "\n".join(parts) + "\n"


def _merge(name: str, one: float, other: float) -> float:
    family = name.partition("{")[0]
    if family.endswith("_created"):
        return min(one, other)
    chosen = _WORST.get(family)
    return one + other if chosen is None else chosen(one, other)

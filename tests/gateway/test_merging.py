"""Numbers of several workers as those of one gateway."""

from bridle.gateway.merging import merged_metrics, merged_replicas
from bridle.gateway.metrics import Metrics


def numbers(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_samples_are_added_by_name_and_labels():
    one, other = Metrics(), Metrics()
    for metrics, times in ((one, 1), (other, 2)):
        for _ in range(times):
            metrics.request("anthropic", "generate", 200)
            metrics.duration.observe(0.01)
    other.request("google", "models", 401)
    texts = [metrics.render().decode() for metrics in (one, other)]

    merged = merged_metrics(texts, [("bridle_workers", "Processes.", "gauge", 2)])

    told = numbers(merged)
    asked = 'bridle_requests_total{dialect="%s",route="%s",status="%d"}'
    assert told[asked % ("anthropic", "generate", 200)] == 3
    assert told[asked % ("google", "models", 401)] == 1
    assert told["bridle_call_seconds_count"] == 3
    assert told['bridle_call_seconds_bucket{le="0.02"}'] == 3
    assert told["bridle_workers"] == 2
    created = [numbers(text)["bridle_call_seconds_created"] for text in texts]
    assert told["bridle_call_seconds_created"] == min(created)


def test_each_family_stands_together_and_is_told_once():
    merged = merged_metrics([Metrics().render().decode()] * 3)
    types = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    family = ""
    for line in merged.splitlines():
        if line.startswith("# TYPE"):
            family = line.split(" ")[2].removesuffix("_created")
        elif not line.startswith("#"):
            assert line.startswith(family)


def test_a_replica_that_one_worker_lost_is_told_as_lost():
    text = "# TYPE bridle_replica_up gauge\nbridle_replica_up %d\n"
    text += "# TYPE bridle_replica_version gauge\nbridle_replica_version %d\n"
    told = numbers(merged_metrics([text % (1, 3), text % (0, 4)]))
    assert told == {"bridle_replica_up": 0, "bridle_replica_version": 4}


def test_room_on_a_disk_that_workers_share_is_not_added():
    text = "# TYPE bridle_data_free_bytes gauge\nbridle_data_free_bytes %d\n"
    told = numbers(merged_metrics([text % 70, text % 69]))
    assert told == {"bridle_data_free_bytes": 69}


def test_what_workers_count_of_a_replica_is_added_and_trouble_is_told():
    counted = ("calls_in_flight", "sessions", "calls", "failures", "losses")
    tokens = ("prompt_tokens", "cached_tokens")
    live = {"name": "a", "state": "live", "error": None, "version": 3}
    live |= dict.fromkeys((*counted, *tokens), 2)
    down = {**live, "state": "down", "error": "gone", "version": 2, "calls": 5}
    other = {**live, "name": "b"}

    for order in ([[live, other], [down, other]], [[down, other], [live, other]]):
        first, second = merged_replicas(order)
        assert (first["state"], first["error"], first["version"]) == ("down", "gone", 3)
        assert (first["calls"], first["sessions"]) == (7, 4)
        assert (second["state"], second["calls"]) == ("live", 4)

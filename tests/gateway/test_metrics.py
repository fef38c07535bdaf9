"""Numbers for operators."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.registry import Collector

from bridle.gateway.metrics import Metrics, Spread, merged_metrics


def test_counters_are_rendered_as_prometheus_text_and_belong_to_one_gateway():
    one, other = Metrics(), Metrics()
    one.calls.values[("committed",)] += 1
    one.in_flight.values[()] += 1
    one.requests.values["anthropic", "generate", 200] += 1
    one.placements.values["child", True] += 1
    one.sampled_tokens.values[()] += 15
    one.duration.observe(0.01)
    text = one.render().decode()
    assert 'bridle_calls_total{outcome="committed"} 1.0' in text
    assert "bridle_calls_in_flight 1.0" in text
    assert "# TYPE bridle_calls_in_flight gauge" in text
    assert 'bridle_requests_total{dialect="anthropic",route="generate",status="200"} 1.0' in text
    assert 'bridle_placements_total{extended="True",kind="child"} 1.0' in text
    assert "bridle_sampled_tokens_total 15.0" in text
    assert "bridle_joined_requests_total 0.0" in text
    assert 'bridle_call_seconds_bucket{le="0.02"} 1.0' in text
    assert "outcome=" not in other.render().decode()


def test_the_free_disk_space_is_reported_while_the_folder_exists(tmp_path):
    metrics = Metrics()
    assert "bridle_data_free_bytes" not in metrics.render().decode()
    folder = tmp_path / "data"
    folder.mkdir()
    metrics.watch_disk(folder)
    answer = metrics.render().decode()
    (line,) = (one for one in answer.splitlines() if one.startswith("bridle_data_free_bytes "))
    assert float(line.split()[1]) > 0
    folder.rmdir()
    assert "bridle_data_free_bytes" not in metrics.render().decode()


def numbers(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_merged_samples_are_added_up_by_name_and_labels():
    one, other = Metrics(), Metrics()
    for metrics, times in ((one, 1), (other, 2)):
        for _ in range(times):
            metrics.requests.values["anthropic", "generate", 200] += 1
            metrics.duration.observe(0.01)
    other.requests.values["google", "models", 401] += 1
    texts = [metrics.render().decode() for metrics in (one, other)]

    merged = merged_metrics(texts, [("bridle_workers", "Processes.", "gauge", 2)])

    answer = numbers(merged)
    asked = 'bridle_requests_total{dialect="%s",route="%s",status="%d"}'
    assert answer[asked % ("anthropic", "generate", 200)] == 3
    assert answer[asked % ("google", "models", 401)] == 1
    assert answer["bridle_call_seconds_count"] == 3
    assert answer['bridle_call_seconds_bucket{le="0.02"}'] == 3
    assert answer["bridle_workers"] == 2
    created = [numbers(text)["bridle_call_seconds_created"] for text in texts]
    assert answer["bridle_call_seconds_created"] == min(created)


def test_merged_metrics_list_each_family_once():
    merged = merged_metrics([Metrics().render().decode()] * 3)
    types = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    family = ""
    for line in merged.splitlines():
        if line.startswith("# TYPE"):
            family = line.split(" ")[2].removesuffix("_created")
        elif not line.startswith("#"):
            assert line.startswith(family)


def test_a_replica_that_one_worker_lost_is_down_in_the_merged_metrics():
    text = "# TYPE bridle_replica_up gauge\nbridle_replica_up %d\n"
    text += "# TYPE bridle_replica_version gauge\nbridle_replica_version %d\n"
    answer = numbers(merged_metrics([text % (1, 3), text % (0, 4)]))
    assert answer == {"bridle_replica_up": 0, "bridle_replica_version": 4}


def test_free_bytes_of_a_disk_that_workers_share_are_not_added_up():
    text = "# TYPE bridle_data_free_bytes gauge\nbridle_data_free_bytes %d\n"
    answer = numbers(merged_metrics([text % 70, text % 69]))
    assert answer == {"bridle_data_free_bytes": 69}


class One(Collector):
    """Collects one number."""

    def __init__(self, tally):
        self.tally = tally

    def collect(self):
        yield self.tally.family()


def test_spread_renders_like_prometheus_client_s_histogram():
    bounds, seconds = (0.005, 0.5, 1, 30), (0.005, 0.0051, 0.5, 29, 30, 31, 4000, 0)
    libraries = CollectorRegistry()
    library = Histogram("bridle_s", "Seconds.", buckets=bounds, registry=libraries)
    spread = Spread("bridle_s", "Seconds.", bounds)
    for value in seconds:
        library.observe(value)
        spread.observe(value)
    ours = CollectorRegistry()
    ours.register(One(spread))
    found, wanted = (
        [line for line in generate_latest(one).decode().splitlines() if "_created " not in line]
        for one in (ours, libraries)
    )
    assert found == wanted
    assert "bridle_s_created" in numbers(generate_latest(ours).decode())

"""Numbers for operators."""

from bridle.gateway.metrics import Metrics


def test_counters_are_rendered_as_prometheus_text_and_belong_to_one_gateway():
    one, other = Metrics(), Metrics()
    one.call("committed")
    one.in_flight.inc()
    one.in_flight.inc()
    one.in_flight.dec()
    one.request("anthropic", "generate", 200)
    one.placement("child", extended=True)
    one.sampled_tokens.inc(7)
    one.sampled_tokens.inc(8)
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


def test_the_room_left_on_the_disk_is_told_while_the_folder_is_there(tmp_path):
    metrics = Metrics()
    assert "bridle_data_free_bytes" not in metrics.render().decode()
    folder = tmp_path / "data"
    folder.mkdir()
    metrics.watch_disk(folder)
    told = metrics.render().decode()
    (line,) = (one for one in told.splitlines() if one.startswith("bridle_data_free_bytes "))
    assert float(line.split()[1]) > 0
    folder.rmdir()
    assert "bridle_data_free_bytes" not in metrics.render().decode()

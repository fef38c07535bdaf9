"""Numbers for operators."""

from bridle.gateway.metrics import Metrics


def test_counters_are_rendered_as_prometheus_text_and_belong_to_one_gateway():
    one, other = Metrics(), Metrics()
    one.calls.labels("committed").inc()
    one.in_flight.inc()
    one.duration.observe(0.01)
    text = one.render().decode()
    assert 'bridle_calls_total{outcome="committed"} 1.0' in text
    assert "bridle_calls_in_flight 1.0" in text
    assert 'bridle_call_seconds_bucket{le="0.02"} 1.0' in text
    assert "outcome=" not in other.render().decode()

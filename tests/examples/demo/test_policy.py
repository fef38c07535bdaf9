"""The demo's second part with a model that has learned nothing: all of it but the success."""

import io

import pytest
from examples.demo.policy import policy_part, show_policy
from tests.cli.models import untrained

from bridle.cli.output import console

pytestmark = pytest.mark.timeout(180)


def test_every_session_is_accounted_for_and_the_rate_is_what_was_scored(tmp_path):
    model = untrained(tmp_path / "model")
    part = policy_part(tmp_path / "policy", 3, model)
    written, before = io.StringIO(), console.file
    console.file = written
    try:
        rate = show_policy(part, model)
    finally:
        console.file = before

    assert len(part.sessions) == 3
    for line in part.sessions:
        assert line["status"] == "COMPLETED", line["error"]
        assert line["tokens_captured"] == line["tokens_trained"] + sum(
            line["tokens_excluded"].values()
        )
    assert rate == sum(line["reward"] for line in part.sessions) / 3
    assert "prefix_merging:" in written.getvalue()
    assert "per_request:" in written.getvalue()

"""The demo's second part with a model that has learned nothing: all of it but the success."""

import io
import json

import pytest
from examples.demo.lookups import lookups
from examples.demo.main import Part
from examples.demo.policy import FORKS, lookup_task, policy_part, show_forks, show_policy
from tests.cli.models import untrained

from bridle.cli.run import BatchRun, run_batch
from bridle.cli.terminal import console

pytestmark = pytest.mark.timeout(180)


def test_the_demo_accounts_for_every_token_and_reports_the_mean_reward(tmp_path):
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


def test_the_demo_forks_a_failed_session_at_its_last_turn(tmp_path):
    [lookup] = lookups(1, seed=3)
    call = {"name": "cat", "arguments": {"name": lookup.thing}}
    turns = [{"tool_calls": [call]}, {"content": "wrong"}]
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"conversations": [{"turns": turns}]}))
    task, run = lookup_task(lookup, tmp_path / "tasks"), tmp_path / "policy" / "run"
    sessions = run_batch(BatchRun([task], f"scripted:{script}", run, 1))
    forks = show_forks(Part(run, sessions, 1.0), untrained(tmp_path / "model"))
    assert [fork["fork"]["replayed"] for fork in forks] == [1] * FORKS
    assert {fork["fork"]["verdict"] for fork in forks} == {"exact"}
    assert show_forks(Part(run, [sessions[0] | {"reward": 1.0}], 1.0), tmp_path) == []

"""Demonstrations are captured through the gateway, the failed ones too."""

import asyncio
import json

from examples.demo.demonstrations import collect
from examples.demo.lookups import lookups

from bridle.capture.sqlite import SqliteReader


def test_every_demonstration_becomes_an_example_with_the_captured_ids(tmp_path):
    result = []

    counts = asyncio.run(collect(tmp_path, 20, seed=3, report=result.append))

    examples = [
        json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    ]
    assert counts.examples == len(examples) == result[-1] == 20
    with SqliteReader(tmp_path / "capture.sqlite") as reader:
        outcomes = [reader.outcome(s.session_id) for s in reader.sessions()]
        rewards = {o.session_id: o.reward or 0.0 for o in outcomes if o is not None}
        sampled = sum(
            len(e.output_ids) for s in reader.sessions() for e in reader.exchanges(s.session_id)
        )
    assert sampled == sum(sum(example["loss_mask"]) for example in examples)
    assert set(rewards) == {task.task_id for task in lookups(20, seed=3)}
    assert 0 < sum(rewards.values()) < 20

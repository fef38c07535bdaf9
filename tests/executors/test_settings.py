import pytest
from pydantic import ValidationError

from bridle.executors.members import ExecutorSettings, RaySettings


def test_sessions_are_computed_here_unless_one_word_says_otherwise():
    assert ExecutorSettings().kind == "local"
    changed = ExecutorSettings.model_validate({"kind": "ray", "node": {"run_slots": 3}})
    assert (changed.kind, changed.node.run_slots) == ("ray", 3)
    with pytest.raises(ValidationError):
        ExecutorSettings.model_validate({"kind": "slurm"})


def test_what_is_said_of_nodes_is_what_they_are_given():
    given = ExecutorSettings.model_validate({"node": {"run_slots": 3}}).node
    assert given.model_dump(exclude_unset=True) == {"run_slots": 3}


def test_a_lost_node_is_known_well_before_ten_seconds():
    assert RaySettings().lost_after_s + RaySettings().watch_s < 10

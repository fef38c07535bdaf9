"""Arguments that validation made of others mean the same; all other changes mean something else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.prompting.turns import explains

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "integer"},
        "all": {"type": "boolean", "default": False},
        "limit": {"type": "integer", "default": 10},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/Edit"}},
        "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["path"],
    "$defs": {"Edit": {"properties": {"old": {"type": "string"}, "n": {"type": "integer"}}}},
}


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ({"path": "a"}, {"path": "a", "all": False, "limit": 10}),
        ({"path": "a"}, {"path": "a", "lines": 5}),
        ({"path": "a", "lines": "5"}, {"path": "a", "lines": 5}),
        ({"path": "a", "all": "True"}, {"path": "a", "all": True}),
        ({"path": "a", "unknown": 1}, {"path": "a"}),
        ({"path": "a", "mode": None}, {"path": "a"}),
        ({"path": "a"}, {"path": "a", "mode": None}),
        (
            {"path": "a", "edits": [{"old": "x", "n": "1"}]},
            {"path": "a", "edits": [{"old": "x", "n": 1}]},
        ),
    ],
)
def test_argument_changes_made_by_schema_validation_are_explained(sampled, echoed):
    assert explains(SCHEMA, sampled, echoed)


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ({"path": "a"}, {"path": "b"}),
        ({"path": "a", "lines": 5}, {"path": "a", "lines": 6}),
        ({"path": "a", "lines": 5}, {"path": "a"}),
        ({"path": "a", "all": True}, {"path": "a", "all": False}),
        ({}, {"path": "a"}),
        ({"path": "a"}, {"path": "a", "unknown": 1}),
        ({"path": "a", "edits": [{"old": "x"}]}, {"path": "a", "edits": []}),
        ({"path": "a", "edits": [{"old": "x"}]}, {"path": "a", "edits": [{"old": "y"}]}),
    ],
)
def test_argument_changes_of_meaning_are_not_explained(sampled, echoed):
    assert not explains(SCHEMA, sampled, echoed)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)


@given(JSON_VALUES, JSON_VALUES)
def test_any_two_values_are_compared_without_an_error_and_equal_ones_explained(one, other):
    assert explains({}, one, one)
    assert explains(SCHEMA, one, other) in {True, False}


def test_a_self_referencing_schema_terminates():
    loop = {"$ref": "#"}
    assert not explains(loop, {"a": 1}, {"a": 2})


REFERENCES = {"anyOf": [{"$ref": "#/$defs/Any"}] * 3}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("schema", "sampled", "echoed"),
    [
        ({"properties": {"x": REFERENCES}, "$defs": {"Any": REFERENCES}}, {"x": 1}, {"x": 2}),
        ({"properties": {"x": {"anyOf": None, "oneOf": 3}}}, {"x": 1}, {"x": 2}),
        ({"properties": {"x": {}, "y": {}}, "required": 3}, {"y": 1}, {"x": 1, "y": 2}),
        ({"properties": {"x": {}}}, {"x": 10**400}, {"x": "1"}),
    ],
    ids=["endless references", "alternatives are no list", "required is no list", "huge integer"],
)
def test_odd_schemas_and_huge_values_terminate_and_are_not_explained(schema, sampled, echoed):
    assert not explains(schema, sampled, echoed)

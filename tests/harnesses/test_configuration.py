import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import AgentSpec, merged
from bridle.errors import ConfigError
from bridle.harnesses.base import (
    as_toml,
    events_backwards,
    mcp_entries,
    output_budget,
    refuse_extras,
    skill_folders,
)

STDIO = {"name": "a", "command": "serve", "args": ["-x"], "env": {"K": "v"}}
HTTP = {"name": "b", "transport": "streamable-http", "url": "http://m/mcp"}


def agent(**fields):
    return AgentSpec(harness="some", **fields)


def test_objects_are_merged_recursively_and_other_values_are_replaced():
    under = {"a": {"x": 1, "y": [1]}, "b": 1}
    over = {"a": {"y": [2], "z": 3}, "b": {"c": 1}}
    assert merged(under, over) == {"a": {"x": 1, "y": [2], "z": 3}, "b": {"c": 1}}
    assert under == {"a": {"x": 1, "y": [1]}, "b": 1}


texts = st.text(st.characters(exclude_categories=["Cs"]))
leaves = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | texts
values = st.recursive(leaves, lambda v: st.lists(v) | st.dictionaries(texts, v), max_leaves=12)


@given(st.dictionaries(texts, values))
def test_toml_round_trips(value):
    assert tomllib.loads(as_toml(value).decode()) == value


def test_none_values_are_left_out_of_toml():
    assert tomllib.loads(as_toml({"a": None, "b": {"c": None, "d": 1}}).decode()) == {"b": {"d": 1}}


def test_a_value_that_toml_cannot_express_is_refused():
    with pytest.raises(ConfigError, match="cannot be written as TOML"):
        as_toml({"a": [None]})


@pytest.mark.parametrize(("context", "budget"), [(400, 256), (8192, 2048), (10**6, 32_000)])
def test_output_budget_is_a_quarter_of_the_context_within_bounds(context, budget):
    assert output_budget(context) == budget


def test_an_mcp_server_with_an_unsupported_transport_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'some' cannot use 'b' over streamable-http; .* stdio"):
        refuse_extras(agent(mcp_servers=[STDIO, HTTP]), transports=("stdio",))
    with pytest.raises(ConfigError, match="it takes no MCP server at all"):
        refuse_extras(agent(mcp_servers=[STDIO]), transports=())


def test_skills_are_refused_for_a_harness_without_skills():
    with pytest.raises(ConfigError, match=r"agent\.skills_path: harness 'some' takes no skills"):
        refuse_extras(agent(skills_path="skills"), skills=False)


def test_mcp_server_entries_use_the_field_names_of_the_harness():
    servers = agent(mcp_servers=[STDIO, HTTP, {**HTTP, "name": "c", "transport": "sse"}])
    local = {"command": "serve", "args": ["-x"], "env": {"K": "v"}}
    remote = {"url": "http://m/mcp", "headers": {}}
    assert mcp_entries(servers) == {"a": local, "b": remote, "c": remote}
    typed = mcp_entries(servers, type_field="type", stdio="local", http="streamableHttp")
    assert [entry["type"] for entry in typed.values()] == ["local", "streamableHttp", "sse"]
    assert "type" not in mcp_entries(servers, type_field="type")["a"]
    named = mcp_entries(servers, http_url="httpUrl", headers="http_headers", trust=True)
    assert named == {
        "a": {**local, "trust": True},
        "b": {"httpUrl": "http://m/mcp", "http_headers": {}, "trust": True},
        "c": {"url": "http://m/mcp", "http_headers": {}, "trust": True},
    }


def test_each_skill_of_a_folder_is_copied_under_its_name(tmp_path):
    for name in ("one", "two", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "one/SKILL.md").write_text("x")
    (tmp_path / "two/SKILL.md").write_text("x")
    expected = {"/h/skills/one": tmp_path / "one", "/h/skills/two": tmp_path / "two"}
    assert skill_folders(agent(skills_path=str(tmp_path)), "/h/skills") == expected
    one = agent(skills_path=str(tmp_path / "one"))
    assert skill_folders(one, "/h/skills") == {"/h/skills/one": tmp_path / "one"}


def test_a_task_without_skills_copies_no_folder():
    assert skill_folders(agent(), "/h/skills") == {}


def test_a_skills_path_without_a_skill_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=rf"no skill .* in {tmp_path}"):
        skill_folders(agent(skills_path=str(tmp_path)), "/h")
    with pytest.raises(ConfigError, match="no skill"):
        skill_folders(agent(skills_path=str(Path("no/where"))), "/h")


def test_json_events_are_read_backwards_and_broken_lines_skipped():
    stream = b'noise\n{"type":"a","n":1}\n[1]\n{"type":"b"}\n{"type":"a","n":2}\n{"type":"a","n"'
    assert [e.get("n") for e in events_backwards(stream, '"a"')] == [2, 1]
    assert len(list(events_backwards(stream))) == 3

"""Settings: unknown fields are refused, and mistakes say where."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from bridle.config import (
    AgentSpec,
    McpServer,
    Task,
    builtin_tokenizer_dir,
    cache_dir,
    explain,
    load_toml,
    validated,
)
from bridle.errors import ConfigError
from bridle.evaluators.composite import CompositeSettings


def mistake(**fields) -> ConfigError:
    with pytest.raises(ValidationError) as caught:
        Task.model_validate({"task_id": "t", "instruction": "x"} | fields)
    return explain(caught.value, "tasks.toml:3")


def test_a_validation_error_names_the_position_the_field_and_the_value():
    text = str(mistake(num_samples=0))

    assert text.startswith("tasks.toml:3: num_samples:")
    assert "given: 0" in text


def test_an_unknown_field_is_refused_by_name():
    assert "runtme" in str(mistake(runtme={}))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"intsruction": "x"}, "instruction"),
        ({"budgets": {"agents_s": 3}}, "agent_s"),
        ({"runtime": {"prepare": [{"type": "exec", "comand": "true"}]}}, "command"),
    ],
)
def test_an_unknown_field_is_refused_with_a_suggestion(given, meant):
    with pytest.raises(ValidationError) as caught:
        Task.model_validate({"task_id": "t", "instruction": "do", **given})
    assert f"did you mean {meant!r}?" in str(explain(caught.value, "tasks.toml:3"))


def test_the_error_for_a_missing_field_shows_no_value():
    with pytest.raises(ValidationError) as caught:
        Task.model_validate({"task_id": "t", "agent": {"harness": "empty"}})
    assert str(explain(caught.value, "t.json:1")) == "t.json:1: instruction: Field required"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"metadata": 3}, "metadata: Input should be an object with fields; given: 3"),
        ({"runtime": []}, "runtime: Input should be an object with fields; given: []"),
        (
            {"runtime": {"prepare": "true"}},
            "runtime.prepare: Input should be a list; given: 'true'",
        ),
        (
            {"rejected_reward": float("nan")},
            "rejected_reward: Input should be a finite number; given: nan",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_without_words_of_python(fields, said):
    assert str(mistake(**fields)) == f"tasks.toml:3: {said}"


def test_an_empty_list_in_place_of_one_with_items_is_refused_without_words_of_python():
    with pytest.raises(ConfigError, match="parts: List should have at least 1 item, not 0; given"):
        validated(CompositeSettings, {"parts": []}, "evaluator.config")


@pytest.mark.parametrize(
    "fields",
    [
        {"agent": {"harness": "codex", "env": {"OPENAI_API_KEY": ["hush"]}}},
        {"metadata": [{"password": "hush"}]},
        {"runtme": {"control_token": "hush"}},
        {"num_samples": "http://user:hush@host"},
    ],
)
def test_a_validation_error_shows_no_key_token_or_password(fields):
    assert "hush" not in str(mistake(**fields))


def test_an_error_for_a_number_of_tokens_shows_it():
    assert str(mistake(limits={"max_tokens": "x"})).endswith("; given: 'x'")


def test_validation_errors_shorten_long_values_and_count_further_mistakes():
    text = str(mistake(task_id="!" * 300, num_samples=-1))

    assert len(text) < 300
    assert "(+1 more)" in text


def test_a_wrong_item_of_a_list_is_counted_once():
    with pytest.raises(ConfigError, match=r"parts\.0\.wrong: Extra inputs .*; given: 1$"):
        validated(CompositeSettings, {"parts": [{"strategy": "command", "wrong": 1}]}, "c")


def test_default_sampling_is_from_the_full_distribution_at_temperature_1():
    sampling = Task(task_id="t", instruction="x").sampling

    assert (sampling.temperature.mode, sampling.temperature.value) == ("override", 1.0)
    assert (sampling.top_p.value, sampling.top_k.value) == (1.0, -1)


def test_a_task_s_sampling_overrides_the_sampling_of_its_agent():
    agent = {"harness": "pi", "sampling": {"orphans": "serve", "on_rewrite": "fork"}}
    given = {"task_id": "t", "instruction": "go", "agent": agent}
    alone = Task.model_validate(given)
    over = Task.model_validate({**given, "sampling": {"orphans": "refuse"}})
    made = Task(task_id="t", instruction="go", agent=AgentSpec.model_validate(agent))
    assert (alone.sampling.orphans, alone.sampling.on_rewrite) == ("serve", "fork")
    assert (over.sampling.orphans, over.sampling.on_rewrite) == ("refuse", "fork")
    assert (
        made.sampling
        == alone.sampling
        == Task.model_validate_json(alone.model_dump_json()).sampling
    )
    with pytest.raises(ValidationError, match="sampling"):
        Task.model_validate({**given, "sampling": 3})


def test_an_mcp_server_needs_the_url_or_command_of_its_transport():
    with pytest.raises(ValidationError, match="url"):
        McpServer(name="m", transport="sse", command="x")
    with pytest.raises(ValidationError, match="command"):
        McpServer(name="m")


def test_toml_errors_name_the_file(tmp_path):
    (tmp_path / "a.toml").write_text("a = \n")

    with pytest.raises(ConfigError, match=r"a\.toml.*line 1"):
        load_toml(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match="no such file"):
        load_toml(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_text("a = 1\n")
    assert load_toml(tmp_path / "c.toml") == {"a": 1}


def test_the_cache_folder_is_set_by_bridle_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("BRIDLE_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "bridle"


def test_the_builtin_tokenizer_ships_in_the_package():
    assert (builtin_tokenizer_dir() / "tokenizer.json").is_file()

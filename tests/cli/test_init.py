"""`bridle init`: a first task that is valid, and nothing overwritten."""

from bridle.datasets.jsonl import load_tasks
from bridle.engines.script import load_script


def test_what_is_made_loads(say, tmp_path):
    said = say("init", tmp_path / "mine")

    assert said.code == 0
    assert load_tasks(tmp_path / "mine" / "hello.toml")[0].task_id == "hello"
    assert load_script(tmp_path / "mine" / "script.json").conversations


def test_a_second_time_changes_nothing(say, tmp_path):
    say("init", tmp_path)
    (tmp_path / "hello.toml").write_text("mine")

    said = say("init", tmp_path)

    assert said.code == 2
    assert (tmp_path / "hello.toml").read_text() == "mine"

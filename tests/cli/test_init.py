"""`bridle init`: a first task that is valid, and nothing overwritten."""

from bridle.datasets.jsonl import load_tasks
from bridle.engines.script import load_script


def test_the_folder_that_init_makes_is_a_task_set_and_the_script_it_prints_exists(say, tmp_path):
    said = say("init", tmp_path / "mine")

    command = said.out.replace("\n", " ").split()
    script = command[command.index("--engine") + 1].removeprefix("scripted:")
    assert said.code == 0
    assert [task.task_id for task in load_tasks(tmp_path / "mine")] == ["hello"]
    assert load_script(tmp_path / script).conversations


def test_a_second_time_changes_nothing(say, tmp_path):
    say("init", tmp_path)
    (tmp_path / "hello" / "task.toml").write_text("mine")

    said = say("init", tmp_path)

    assert said.code == 2
    assert (tmp_path / "hello" / "task.toml").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_named(say, tmp_path):
    (tmp_path / "mine").write_text("a file")

    said = say("init", tmp_path / "mine")

    assert said.code == 2
    assert str(tmp_path / "mine") in said.err

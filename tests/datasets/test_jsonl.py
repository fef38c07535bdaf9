import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import merged
from bridle.datasets.jsonl import load_tasks
from bridle.errors import ConfigError

ONE = {"task_id": "a", "instruction": "do a"}
TWO = {"task_id": "b", "instruction": "do b", "num_samples": 2}


def written(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return path


def ids(tasks):
    return [(task.task_id, task.num_samples) for task in tasks]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", f"\n{json.dumps(ONE)}\n\n{json.dumps(TWO)}"),
        ("t.jsonl", f"\ufeff{json.dumps(ONE)}\r\n{json.dumps(TWO)}\r\n"),
        ("t.json", [ONE, TWO]),
        ("t.json", {"tasks": [ONE, TWO]}),
        ("t.json", {"defaults": {"num_samples": 2}, "tasks": [{**ONE, "num_samples": 1}, TWO]}),
        (
            "t.toml",
            """[defaults]\nnum_samples = 2\n[[tasks]]\ntask_id = "a"\ninstruction = "do a"
            num_samples = 1\n[[tasks]]\ntask_id = "b"\ninstruction = "do b"\n""",
        ),
    ],
)
def test_jsonl_json_and_toml_files_load_the_same_tasks(tmp_path, name, content):
    assert ids(load_tasks(written(tmp_path, name, content))) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.json", ONE), ("t.toml", 'task_id = "a"\ninstruction = "do a"\n')],
)
def test_a_file_may_hold_one_task(tmp_path, name, content):
    assert ids(load_tasks(written(tmp_path, name, content))) == [("a", 1)]


def test_a_folder_loads_the_task_files_and_task_folders_in_it(tmp_path):
    written(tmp_path, "2.jsonl", json.dumps({**ONE, "task_id": "second"}))
    written(tmp_path, "1.json", {**ONE, "task_id": "first"})
    written(tmp_path, "3/task.toml", 'task_id = "third"\ninstruction = "x"\n')
    written(tmp_path, "3/files/data.json", "not a task")
    written(tmp_path, ".hidden/x.json", "not a task")
    written(tmp_path, "notes.md", "not a task")
    tasks = load_tasks(tmp_path)
    assert [task.task_id for task in tasks] == ["first", "second", "third"]
    assert tasks[2].task_dir == str(tmp_path / "3")


def test_relative_paths_are_relative_to_the_task_file(tmp_path):
    written(tmp_path, "d/files/x", "")
    actions = [
        {"type": "upload_dir", "source": "files", "target": "."},
        {"type": "exec", "command": "true"},
    ]
    task = {**ONE, "runtime": {"prepare": actions, "eval_prepare": actions[1:]}}
    task["agent"] = {"harness": "pi", "skills_path": "skills"}
    (loaded,) = load_tasks(written(tmp_path, "d/t.json", task))
    assert loaded.runtime.prepare[0].source == str(tmp_path / "d" / "files")
    assert loaded.runtime.prepare[1].source is None
    assert loaded.agent.skills_path == str(tmp_path / "d" / "skills")


def test_overrides_replace_task_fields_and_defaults_fill_missing_ones(tmp_path):
    path = written(tmp_path, "t.json", {**ONE, "budgets": {"agent_s": 5}})
    (task,) = load_tasks(
        path,
        defaults={"budgets": {"agent_s": 1, "init_s": 2}},
        overrides={"num_samples": 7, "agent": {"harness": "pi"}},
    )
    assert (task.budgets.agent_s, task.budgets.init_s) == (5, 2)
    assert (task.num_samples, task.agent.harness) == (7, "pi")


# ---- errors


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.jsonl", json.dumps(ONE) + "\n{oops", r"t\.jsonl:2: .*column 2: "),
        ("t.jsonl", "[" * 200_000, r"t\.jsonl: values are nested too deeply"),
        ("t.jsonl", json.dumps(ONE) + "\n7", r"t\.jsonl:2: a task must be an object, not 7"),
        (
            "t.jsonl",
            json.dumps(ONE) + "\n" + json.dumps({**TWO, "num_samples": 0}),
            r"t\.jsonl:2: num_samples: .*greater than or equal to 1; given: 0",
        ),
        ("t.json", '{\n "task_id": "a",\n b}', r"t\.json:3: .*column 2"),
        ("t.json", [ONE, {"task_id": "b"}], r"t\.json:6: instruction: Field required"),
        ("t.json", {"tasks": [ONE, {**TWO, "samples": 3}]}, r"t\.json:11: samples: Extra inputs"),
        (
            "t.json",
            {"tasks": [ONE], "x": 1},
            r"t\.json:1: unknown field 'x': beside 'tasks' only 'defaults'",
        ),
        ("t.json", {"tasks": 1}, r"t\.json:1: tasks: must be a list, not int"),
        ("t.json", {"tasks": [], "defaults": 1}, r"t\.json:1: defaults: must be an object, not 1"),
        ("t.json", '"x"', r"t\.json:1: a task must be an object"),
        ("t.json", [], r"t\.json: no tasks in it"),
        ("t.json", [ONE, ONE], r"t\.json:6: task_id 'a' is .*t\.json:2 too"),
        ("t.toml", 'task_id = "a"\ninstruction = \n', r"t\.toml:2: Invalid value"),
        ("t.toml", 'task_id = "a', r"t\.toml:1: "),
        (
            "t.toml",
            'task_id = "a"\ninstruction = "x"\n[budgets]\ninit_s = 1\nagent_s = -1\n',
            r"t\.toml:5: budgets\.agent_s: .*greater than 0; given: -1",
        ),
        (
            "t.toml",
            """[[tasks]]\ntask_id = "a"\ninstruction = "x"\n\n[[tasks]]\ntask_id = "b"
            instruction = "x"\n[tasks.agent]\nharnes = "pi"\n""",
            r"t\.toml:9: agent\.harnes: .* did you mean 'harness'\?; given: 'pi'",
        ),
        ("t.toml", 'tasks = [{task_id = "a"}]\n', r"t\.toml:1: instruction: Field required"),
        (
            "t.json",
            {**ONE, "runtime": {"prepare": [{"type": "exec"}]}},
            r"t\.json:5: runtime\.prepare\.0\.command is missing: .*'exec' needs it",
        ),
        (
            "t.json",
            {**ONE, "runtime": {"eval_prepare": [{"type": "upload_file", "source": "x"}]}},
            r"runtime\.eval_prepare\.0\.target is missing: .*'upload_file' needs it",
        ),
        (
            "t.json",
            {
                **ONE,
                "runtime": {"prepare": [{"type": "upload_file", "source": "gone", "target": "x"}]},
            },
            r"t\.json:\d: runtime\.prepare\.0\.source: no such file: /.*/gone",
        ),
    ],
)
def test_task_file_errors_name_path_line_and_field(tmp_path, name, content, said):
    with pytest.raises(ConfigError, match=said):
        load_tasks(written(tmp_path, name, content))


def test_a_path_that_is_no_task_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_tasks(tmp_path / "gone")
    with pytest.raises(ConfigError, match="no tasks in it"):
        load_tasks(tmp_path)
    with pytest.raises(
        ConfigError, match=r"the name of a task file must end in \.jsonl, \.json, \.toml"
    ):
        load_tasks(written(tmp_path, "t.yaml", ""))
    (tmp_path / "t.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"t\.json: cannot be read"):
        load_tasks(tmp_path / "t.json")


numbers = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3))
trees = st.recursive(numbers, lambda inner: st.dictionaries(st.sampled_from("abc"), inner))


@given(trees, trees)
def test_merged_settings_prefer_the_override_and_keep_all_other_keys(under, over):
    both = merged(under, over)
    assert both.keys() == under.keys() | over.keys()
    for name in both:
        if name not in under:
            assert both[name] == over[name]
        elif name not in over:
            assert both[name] == under[name]
        elif isinstance(under[name], dict) and isinstance(over[name], dict):
            assert both[name] == merged(under[name], over[name])
        else:
            assert both[name] == over[name]


@given(st.integers(0, 3), st.integers(0, 4))
def test_json_error_names_the_line_of_the_wrong_field(tmp_path_factory, before, indent):
    good = [{"task_id": f"ok-{i}", "instruction": "x,]}{\n"} for i in range(before)]
    text = json.dumps(
        {"defaults": {"metadata": {"tasks": []}}, "tasks": [*good, {"bad": 1}]}, indent=indent
    )
    path = tmp_path_factory.mktemp("tasks") / "t.json"
    path.write_text(text)
    line = text.count("\n", 0, text.index('"bad"')) + 1
    with pytest.raises(ConfigError, match=rf"t\.json:{line}: bad: Extra inputs"):
        load_tasks(path, defaults={"task_id": "x", "instruction": "x"})

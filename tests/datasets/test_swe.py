"""Rows as the sets publish them, with less text: each says where its shape is from."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridle.datasets.jsonl import load_tasks
from bridle.datasets.swe import is_swe, swe_task
from bridle.errors import ConfigError
from bridle.evaluators import open_evaluator


def patch(name, lines="-a\n+b\n"):
    return f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n{lines}"


DYNAMO = "tests/test_dynamodb/test_dynamodb_update_expressions.py"
# SWE-Gym/SWE-Gym; commands: NVIDIA-NeMo/Gym@d27174c1, resources_servers/swerl_gen/README.md
GYM = {
    "instance_id": "getmoto__moto-7365",
    "repo": "getmoto/moto",
    "version": "5.0",
    "base_commit": "7f6c9cb1deafb280fe7fcc7551c38e397f11a706",
    "created_at": "2024-02-19 20:29:03",
    "hints_text": "",
    "problem_statement": "`update_item` performs floating-point arithmetic.",
    "patch": patch("moto/dynamodb/models/dynamo_type.py"),
    "test_patch": patch(DYNAMO),
    "FAIL_TO_PASS": [f"{DYNAMO}::test_update_item_add_float"],
    "PASS_TO_PASS": [f"{DYNAMO}::test_update_different_map_elements_in_single_request"],
}
# NovaSky-AI/SkyRL@a9564572, examples/train/mini_swe_agent/preprocess_swegym.py
SKYRL = {
    "data_source": "swe-gym",
    "prompt": [{"role": "user", "content": GYM["problem_statement"]}],
    "env_class": "null",
    "instance": GYM,
}
# NVIDIA-NeMo/ProRL-Agent-Server@45347507, examples/swegym_slime_grpo/swegym_eval_23.jsonl
POLAR = {
    "prompt": [{"role": "user", "content": "Rule L060 could give a specific error message"}],
    "label": "",
    "metadata": {
        "instance_id": "sqlfluff__sqlfluff-2419",
        "instance": {
            "instance_id": "sqlfluff__sqlfluff-2419",
            "repo": "sqlfluff/sqlfluff",
            "version": "0.8",
            "base_commit": "f1dba0e1dd764ae72d67c3d5e1471cf14d3db030",
            "environment_setup_commit": "a5c4eae4e3e419fe95460c9afd9cf39a35a470c4",
            "problem_statement": "Rule L060 could give a specific error message",
            "patch": patch("src/sqlfluff/rules/L060.py"),
            "test_patch": "diff --git a/test/rules/std_L060_test.py b/test/rules/std_L060_test.py\n"
            "new file mode 100644\n--- /dev/null\n+++ b/test/rules/std_L060_test.py\n"
            "@@ -0,0 +1 @@\n+import sqlfluff\n",
            "FAIL_TO_PASS": ["test/rules/std_L060_test.py::test__rules__std_L060_raised"],
            "PASS_TO_PASS": [],
        },
    },
}
# princeton-nlp/SWE-bench@1194adf5 (fields, names of tests as JSON text)
CLASSIC = {
    "instance_id": "django__django-11099",
    "repo": "django/django",
    "version": "3.0",
    "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
    "environment_setup_commit": "419a78300f7cd27611196e1e464d50fd0385ff27",
    "problem_statement": "UsernameValidator allows trailing newline in usernames",
    "hints_text": "",
    "patch": patch("django/contrib/auth/validators.py"),
    "test_patch": patch("tests/auth_tests/test_validators.py"),
    "FAIL_TO_PASS": '["test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)"]',
    "PASS_TO_PASS": "[]",
}
# package swebench 4.1.0: swebench/harness/constants/{go,javascript}.py (repositories, versions,
# commands), test_spec/utils.py and javascript.py (the script); commits and tests are not the sets'
MULTILINGUAL = CLASSIC | {
    "instance_id": "redis__redis-13115",
    "repo": "redis/redis",
    "version": "13115",
    "test_patch": patch("tests/unit/scripting.tcl"),
    "FAIL_TO_PASS": ["not a script"],
    "PASS_TO_PASS": [],
}
MULTIMODAL = CLASSIC | {
    "instance_id": "markedjs__marked-1262",
    "repo": "markedjs/marked",
    "version": "0.3",
    "test_patch": patch("test/new/a.md"),
    "image_assets": '{"problem_statement": [{"path": "a.png", "url": "https://example.org"}]}',
}
# package swebench 5.0.2, swebench.harness.utils.make_test_spec
NEWEST = CLASSIC | {
    "image": "swebench/sweb.eval.x86_64.django_1776_django-11099:latest",
    "eval_script": "#!/bin/bash\nset -uxo pipefail\n./tests/runtests.py\n",
    "log_parser": "parse_log_django",
    "eval_type": "pass_and_fail",
    "image_assets": None,
}
# SWE-rebench/SWE-bench-fork@39316f79, swebench/harness/test_spec/test_spec.py (`install_config`);
# the image is the set's, the commit and the tests are not
REBENCH = {
    "instance_id": "tobymao__sqlglot-1177",
    "repo": "tobymao/sqlglot",
    "version": "10.6",
    "base_commit": "910166c1d1d33e2110c26140e1916745dc2f1212",
    "problem_statement": "A wrong join",
    "docker_image": "swerebench/sweb.eval.x86_64.tobymao_1776_sqlglot-1177",
    "patch": patch("sqlglot/optimizer.py"),
    "test_patch": patch("tests/test_optimizer.py") + patch("tests/fixtures/a.json"),
    "install_config": {
        "install": "pip install -e .[dev]",
        "log_parser": "parse_log_pytest",
        "test_cmd": "pytest --no-header -rA --tb=line --color=no",
    },
    "FAIL_TO_PASS": ["tests/test_optimizer.py::test_join"],
    "PASS_TO_PASS": [],
}
# SWE-bench/SWE-smith (fields), package swesmith 0.0.9 (names)
SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "problem_statement": "Tokens expire at once",
    "patch": patch("lib.py", "-right\n+wrong\n"),
    "FAIL_TO_PASS": ["tests/test_lib.py::test_right"],
    "PASS_TO_PASS": ["tests/test_other.py::test_other"],
}
DJANGO = (
    "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 "
    "auth_tests.test_validators"
)
CASES = patch("test-data/unit/a.test", "-a\n+[case testOne]\n+[case testTwo]\n")
ROWS = {
    "gym": (GYM, "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest"),
    "skyrl": (SKYRL, "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest"),
    "polar": (POLAR, "swebench/sweb.eval.x86_64.sqlfluff_1776_sqlfluff-2419:latest"),
    "classic": (CLASSIC, "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"),
    "multilingual": (
        MULTILINGUAL,
        "swebench/sweb.eval.x86_64.redis_1776_redis-13115:latest",
    ),
    "multimodal": (MULTIMODAL, "swebench/sweb.eval.x86_64.markedjs_1776_marked-1262:latest"),
    "newest": (NEWEST, NEWEST["image"]),
    "rebench": (REBENCH, REBENCH["docker_image"]),
    "smith": (SMITH, SMITH["image_name"]),
}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_of_each_dataset_loads_with_its_own_image(tmp_path, name, suffix):
    row, image = ROWS[name]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps([row] if suffix == "json" else row))
    (task,) = load_tasks(tmp_path)
    runtime = task.runtime
    assert (runtime.backend, runtime.image, runtime.workdir) == ("docker", image, "/testbed")
    assert (task.evaluator.strategy, task.evaluator.trusted) == ("swebench", False)
    instance = task.evaluator.config["instance"]
    assert not {"patch", "test_patch"} & instance.keys()
    named = [*instance["FAIL_TO_PASS"], *instance["PASS_TO_PASS"]]
    assert instance["FAIL_TO_PASS"]
    assert all(json.dumps(one) in json.dumps(row).replace("\\", "") for one in named)
    assert callable(open_evaluator(task.evaluator).evaluate)


@pytest.mark.parametrize(
    ("row", "parser", "command"),
    [
        (GYM, "parse_log_pytest", f"pytest -n0 -rA {DYNAMO}"),
        (
            CLASSIC,
            "parse_log_django",
            DJANGO,
        ),
        (
            REBENCH,
            "parse_log_pytest",
            "pytest --no-header -rA --tb=line --color=no tests/test_optimizer.py",
        ),
        (
            GYM | {"repo": "python/mypy", "version": "0.910", "test_patch": CASES},
            "parse_log_pytest",
            "pytest -n0 -rA -k 'testOne or testTwo'",
        ),
    ],
)  # fmt: skip
def test_eval_script_of_a_row_runs_its_dataset_s_test_command_between_the_output_markers(
    row, parser, command
):
    instance = swe_task(row, "rows:1")["evaluator"]["config"]["instance"]
    assert (instance["log_parser"], instance["eval_type"]) == (parser, "pass_and_fail")
    before, _, after = instance["eval_script"].partition(": '>>>>> Start Test Output'\n")
    assert after.splitlines()[:2] == [command, ": '>>>>> End Test Output'"]
    assert row["test_patch"] in before


def test_multilingual_rows_use_the_build_and_test_commands_of_their_version():
    task = swe_task(MULTILINGUAL, "rows:1")
    instance = task["evaluator"]["config"]["instance"]
    assert (instance["log_parser"], instance["eval_type"]) == ("parse_log_redis", "pass_and_fail")
    before, _, after = instance["eval_script"].partition(": '>>>>> Start Test Output'\n")
    assert before.splitlines()[-2:] == ["make distclean", "make"]
    assert MULTILINGUAL["test_patch"] in before
    assert "conda" not in before
    assert after.splitlines()[:2] == [
        "TERM=dumb ./runtest --durable --single unit/scripting", ": '>>>>> End Test Output'",
    ]  # fmt: skip
    assert task["metadata"]["unverified"]
    assert "unverified" not in swe_task(CLASSIC, "rows:1")["metadata"]


def test_rows_whose_tests_print_only_failures_have_eval_type_fail_only():
    instance = swe_task(MULTIMODAL, "rows:1")["evaluator"]["config"]["instance"]
    assert instance["eval_type"] == "fail_only"


# R2E-Gym/R2E-Gym@0277f10b, src/r2egym/agenthub/runtime/docker.py (fields of a row)
R2E = {"repo_name": "orange3", "docker_image": "i", "problem_statement": "x",
       "expected_output_json": "{}", "parsed_commit_content": "{}"}  # fmt: skip
# scaleapi/SWE-bench_Pro-os@0875a8af, swe_bench_pro_eval.py
PRO = CLASSIC | {"repo": "NodeBB/NodeBB", "selected_test_files_to_run": "['a']"}
MULTI_SWE = {"org": "a", "repo": "b", "number": 1, "instance_id": "a__b-1", "fix_patch": "x"}


@pytest.mark.parametrize(
    ("row", "name"), [(R2E, "R2E-Gym"), (PRO, "SWE-bench Pro"), (MULTI_SWE, "Multi-SWE-bench")]
)
def test_rows_of_a_dataset_that_cannot_be_graded_are_refused_unless_they_bring_a_script(
    tmp_path, row, name
):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=f"rows.jsonl:1: .*cannot be graded: {name}"):
        load_tasks(tmp_path)
    own_script = {
        name: NEWEST[name] for name in ("image", "eval_script", "log_parser", "eval_type")
    }
    assert swe_task(NEWEST | row | own_script, "rows:1")


def test_a_row_with_its_own_eval_script_keeps_it_and_metadata_has_no_solution():
    task = swe_task(NEWEST, "rows:1")
    assert task["evaluator"]["config"]["instance"]["eval_script"] == NEWEST["eval_script"]
    assert task["metadata"] == {name: CLASSIC[name] for name in ("repo", "version", "base_commit")}


@pytest.mark.parametrize("row", [GYM, CLASSIC, REBENCH, NEWEST])
def test_prepare_steps_of_a_row_scrub_the_git_history(row):
    runtime = swe_task(row, "rows:1")["runtime"]
    assert runtime["prepare"] == [{"type": "scrub_git", "target": "/testbed"}]


def test_swe_smith_prepare_step_applies_the_bug_and_removes_the_fix_from_git_history(tmp_path):
    def git(*words):
        return subprocess.run(
            ["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )

    (tmp_path / "tests").mkdir()
    (tmp_path / "lib.py").write_text("right\n")
    (tmp_path / "tests/test_lib.py").write_text("hidden\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "Fixed")):
        git("-c", "user.name=a", "-c", "user.email=a@example.org", *words)
    (step,) = swe_task(SMITH, "rows:1")["runtime"]["prepare"]
    env = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(["bash", "-c", step["command"]], cwd=tmp_path, check=True, env=env)
    assert (tmp_path / "lib.py").read_text() == "wrong\n"
    assert git("show", "HEAD~1:tests/test_lib.py").stdout == "hidden\n"
    assert not (tmp_path / "tests/test_lib.py").exists()
    assert git("rev-list", "--count", "--all").stdout == "2\n"
    assert git("log", "--all", "-Sright", "--oneline").stdout == ""


@pytest.mark.parametrize(
    ("row", "changes", "why"),
    [
        (GYM, {"FAIL_TO_PASS": "[]"}, "rows:1: FAIL_TO_PASS: the row names no test"),
        (GYM, {"PASS_TO_PASS": "no json"}, "PASS_TO_PASS: must be a list"),
        (GYM, {"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS: must be a list"),
        (GYM, {"test_patch": None}, "test_patch: the row lacks this field"),
        (GYM, {"test_patch": patch("README.md")}, "test_patch: the patch changes no test file"),
        (GYM, {"test_patch": "x" * 10_000_000}, "test_patch: has 10,000,000 bytes, and at most"),
        (GYM, {"test_patch": patch("../../etc/passwd")}, "writes outside .*'../../etc/passwd'"),
        (GYM, {"base_commit": "; rm -rf /"}, "base_commit: must be the hash"),
        (GYM, {"problem_statement": None}, "problem_statement: the row lacks this field"),
        (GYM, {"problem_statement": 7}, "problem_statement: must be text, not 7"),
        (GYM, {"version": "99"}, "version: SWE-Gym/.*@242429c.* no tests for .*99; known"),
        (GYM, {"repo": "a/b"}, "repo: 'a/b' is in no data set .* if it brings image, eval_script"),
        (MULTILINGUAL, {"version": "1"}, "package swebench 4.1.0 has no tests for redis/redis 1"),
        (MULTIMODAL, {"image_assets": {"test_patch": [{"path": "a"}]}}, "image_assets: .*network"),
        (REBENCH, {"install_config": {"log_parser": "mine"}}, "a log_parser of .* not 'mine'"),
        (REBENCH, {"docker_image": None}, "docker_image: the row names no image"),
        (SMITH, {"FAIL_TO_PASS": ["a.test.js"]}, "of the data set SWE-smith only rows of Python"),
        (SMITH, {"patch": "x" * 200_000}, "patch: has 200,000 bytes"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_graded_faithfully_is_refused_with_its_field(row, changes, why):
    with pytest.raises(ConfigError, match=why):
        swe_task(row | changes, "rows:1")


def test_invalid_rows_are_skipped_with_a_warning_unless_strict(tmp_path, capfd):
    rows = [GYM | {"instance_id": f"getmoto__moto-{number}"} for number in range(1000)]
    rows[500] = {**rows[500], "version": "99"}
    lines = [*(json.dumps(row) for row in rows), "{broken", json.dumps(rows[0])]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert len(load_tasks(tmp_path)) == 999
    said = "".join(capfd.readouterr())
    assert "rows.jsonl:501: version: " in said
    assert "rows.jsonl:1001: not JSON at column 2" in said
    assert "rows.jsonl:1002: task_id 'getmoto__moto-0' is used at" in said
    with pytest.raises(ConfigError, match=r"rows\.jsonl:501: version"):
        load_tasks(tmp_path, strict=True)


def test_a_file_with_only_invalid_rows_is_refused(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([{**GYM, "repo": "a/b"}]))
    with pytest.raises(ConfigError, match=r"rows\.json:1: repo: 'a/b'"):
        load_tasks(tmp_path)


@pytest.mark.parametrize(("row", "reverse"), [(SKYRL, False), (CLASSIC, False), (SMITH, True)])
def test_oracle_harness_of_a_row_gets_its_reference_patch(tmp_path, row, reverse):
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    (task,) = load_tasks(tmp_path, overrides={"agent": {"harness": "oracle"}})
    own = row.get("instance", row)
    assert task.agent.settings == {"patch": own["patch"], "reverse": reverse}
    (task,) = load_tasks(tmp_path, overrides={"agent": {"harness": "empty"}})
    assert task.agent.settings == {}


def test_oracle_harness_is_refused_for_a_row_without_a_patch(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([CLASSIC | {"patch": ""}]))
    with pytest.raises(ConfigError, match="patch: the row lacks this field"):
        load_tasks(tmp_path, overrides={"agent": {"harness": "oracle"}})


def test_a_task_object_is_not_recognised_as_a_swe_row():
    assert is_swe(GYM)
    assert not is_swe({"task_id": "a", "instruction": "b", "metadata": {"instance": GYM}})
    assert not is_swe([])


LOAD = """
import sys
from pathlib import Path
from bridle.datasets.jsonl import load_tasks
print(*(task.task_id for task in load_tasks(Path(sys.argv[1]))))
"""


def hub(folder, path):
    """Load in a process of its own, with the hub's cache in a folder and no network."""
    env = {**os.environ, "HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", LOAD, path]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


def test_a_dataset_or_one_split_is_loaded_by_its_hub_id(tmp_path):
    set_folder = tmp_path / "datasets--SWE-Gym--SWE-Gym"
    data = set_folder / "snapshots" / "abc" / "data"
    data.mkdir(parents=True)
    (set_folder / "refs").mkdir()
    (set_folder / "refs" / "main").write_text("abc")
    pq.write_table(pa.Table.from_pylist([GYM]), data / "train-00000-of-00001.parquet")
    dev = GYM | {"instance_id": "getmoto__moto-1"}
    pq.write_table(pa.Table.from_pylist([dev]), data / "dev-00000-of-00001.parquet")
    whole = hub(tmp_path, "hf://datasets/SWE-Gym/SWE-Gym")
    assert whole.stdout == "getmoto__moto-1 getmoto__moto-7365\n", whole.stderr
    split = hub(tmp_path, "hf://datasets/SWE-Gym/SWE-Gym@main/data/train-*")
    assert split.stdout == "getmoto__moto-7365\n"
    missing = hub(tmp_path, "hf://datasets/a/b")
    assert "hf://datasets/a/b: cannot be loaded from the hub: " in missing.stderr


def test_parquet_files_may_hold_swe_rows_or_tasks(tmp_path):
    task = {"task_id": "plain", "instruction": '{"say": 1}', "num_samples": 2, "repo": None}
    task["evaluator"] = json.dumps({"strategy": "command", "config": {"command": "true"}})
    pq.write_table(pa.Table.from_pylist([GYM]), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([task | {"metadata": None}]), tmp_path / "b.parquet")
    first, second = load_tasks(tmp_path)
    assert (first.task_id, first.evaluator.strategy) == ("getmoto__moto-7365", "swebench")
    assert (second.num_samples, second.evaluator.config) == (2, {"command": "true"})
    assert second.instruction == '{"say": 1}'


def test_a_parquet_error_names_file_and_row(tmp_path):
    rows = [{"task_id": "a", "instruction": "x", "metadata": "{"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet:1: metadata"):
        load_tasks(tmp_path)
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: the task file cannot be read"):
        load_tasks(tmp_path)

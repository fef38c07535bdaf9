import subprocess
from pathlib import Path

import pytest
from tests.harnesses.made import context

from bridle.config import AgentSpec
from bridle.errors import ConfigError
from bridle.harnesses import CHECKS, HARNESSES, open_harness
from bridle.harnesses.base import needs_model
from bridle.types import Cause


def test_oracle_and_empty_need_no_model_and_every_other_harness_does():
    assert [name for name in CHECKS if needs_model(open_harness(name))] == []
    assert all(needs_model(open_harness(name)) for name in HARNESSES)


async def test_oracle_and_empty_install_nothing(tmp_path):
    for name in CHECKS:
        assert await open_harness(name).install(tmp_path, lambda _line: None) is None


def test_empty_harness_runs_true_and_refuses_settings():
    assert open_harness("empty").launch(context()).command == "true"
    with pytest.raises(ConfigError, match=r"agent\.settings of harness 'empty'"):
        open_harness(AgentSpec(harness="empty", settings={"solution": "x"}))


@pytest.mark.parametrize(
    ("target", "inside"), [(None, "{home}/.solution"), ("/solution", "/solution")]
)
def test_oracle_copies_the_solution_folder_and_runs_solve_sh(target, inside):
    settings = {"solution": "/tasks/t/solution", "target": target}
    given = context()
    launch = open_harness(AgentSpec(harness="oracle", settings=settings)).launch(given)
    place = inside.format(home=given.home)
    assert launch.folders == {place: Path("/tasks/t/solution")}
    assert launch.command == f"bash {place}/solve.sh"


@pytest.mark.parametrize(("reverse", "result"), [(False, "right\n"), (True, "worst\n")])
def test_oracle_applies_the_reference_patch_forward_or_reversed(tmp_path, reverse, result):
    (tmp_path / "a.txt").write_text("wrong\n")
    lines = "-worst\n+wrong\n" if reverse else "-wrong\n+right\n"
    patch = f"--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n{lines}"
    settings = {"patch": patch, "reverse": reverse}
    launch = open_harness(AgentSpec(harness="oracle", settings=settings)).launch(context())
    (content,) = launch.files.values()
    (tmp_path / "given").write_bytes(content)
    (name,) = launch.files
    line = str(launch.command).replace(name, "given")
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    assert (tmp_path / "a.txt").read_text() == result


def test_oracle_refuses_a_task_without_a_solution():
    with pytest.raises(ConfigError, match="brings no solution for harness 'oracle'"):
        open_harness("oracle").launch(context())


def test_oracle_solution_with_exit_code_1_is_a_crash():
    oracle = open_harness("oracle")
    assert oracle.exit_cause(0, None, b"") is None
    assert oracle.exit_cause(1, None, b"") is Cause.HARNESS_CRASH

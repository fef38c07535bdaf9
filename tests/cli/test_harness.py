"""`bridle harness`: the list, a check with and without replay, pruning."""

from __future__ import annotations

import os

import pytest
from tests.harnesses.made import write_pi

from bridle.cli.harness import check_harness, history_of
from bridle.harnesses import HARNESSES
from bridle.harnesses.base import SCRIPTS
from bridle.harnesses.bundles import MARKER
from bridle.node.results import sessions
from bridle.scripted.script import make_script
from bridle.trajectory.transcript import script_of


def test_harness_list_has_version_dialects_and_install_state_of_every_harness(
    say, tmp_path, monkeypatch
):
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path))
    rows = {row["harness"]: row for row in say("harness", "list", "--json").json}

    assert set(rows) == set(HARNESSES)
    assert rows["aider"]["dialects"] == ["openai_chat"]
    assert rows["cline"]["dialects"][0] == "openai_chat"
    assert set(rows["cline"]["dialects"]) == set(rows["command"]["dialects"])
    assert rows["qwen_code"]["dialects"] == ["openai_chat", "anthropic", "google"]
    here = {name for name, row in rows.items() if row["installed"]}
    assert here == {name for name, row in rows.items() if row["version"] is None}

    bundle = tmp_path / "bundles" / f"pi-{rows['pi']['version']}-0123456789ab"
    bundle.mkdir(parents=True)
    assert not installed(say, "pi")
    (bundle / MARKER).write_text("{}")
    assert installed(say, "pi")


def installed(say, name):
    [row] = [row for row in say("harness", "list", "--json").json if row["harness"] == name]
    return row["installed"]


def test_harness_list_without_json_is_a_table(say):
    said = say("harness", "list").out

    assert "installed" in said
    assert "qwen_code" in said


def test_harness_check_of_a_working_harness_exits_with_code_0(say):
    said = say("harness", "check", "function", "--json")

    assert (said.code, said.json["works"]) == (0, True)


def test_harness_check_of_an_unknown_harness_exits_with_code_2(say):
    said = say("harness", "check", "nobody")

    assert said.code == 2
    assert "known:" in said.err


def test_harness_prune_removes_and_lists_unused_bundles(say, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path))
    bundle = tmp_path / "bundles" / "pi-0.1-0123456789ab"
    bundle.mkdir(parents=True)
    (bundle / MARKER).write_text('{"size_mb": 7}')
    os.utime(bundle / MARKER, (1.0, 1.0))

    [row] = say("harness", "prune", "--dry-run", "--json").json
    assert (row["bundle"], row["size_mb"]) == (bundle.name, 7)
    assert bundle.exists()

    said = say("harness", "prune").out
    assert "removed: 1 bundles, 7 MB" in said
    assert not bundle.exists()
    assert say("harness", "prune", "--json").json == []


@pytest.mark.parametrize("name", ["command", "function"])
def test_harness_check_reports_a_harness_that_makes_its_tool_call_as_working(name):
    report = check_harness(name)

    assert report["works"]
    assert (report["status"], report["tool call"]) == ("COMPLETED", "made")
    assert (report["model calls"], report["merge ratio"]) == (3, 1.0)
    assert report["history"].startswith("keeps its history: all 3 turns shown")
    assert report["unknown to the gateway"] == {}


def test_a_changed_history_is_reported_with_its_cause_and_its_token_cost():
    line = {"turns_shown": 45, "turns_verbatim": 0, "tokens_rerendered": 300,
            "habits": {"system_changed": 9}}  # fmt: skip
    assert history_of(line) == (
        "changes its system prompt (a clock?): "
        "45 of 45 turns shown are not as they were sampled (300 tokens)"
    )
    summary = line | {"habits": {"summary": 1}}
    assert history_of(summary).startswith("replaces old messages by fewer (a summary): 45 of 45")
    assert history_of(line | {"turns_shown": 0}) == "shows no turn of the model again"


def test_harness_check_reports_an_exact_replay_of_the_command_harness():
    assert check_harness("command", replay=True)["replay"] == "exact"


UNSTEADY = f"""
from dataclasses import replace
from pathlib import Path
from bridle.harnesses.command import CommandHarness

class Unsteady(CommandHarness):
    name = "unsteady"

    def __init__(self, agent):
        super().__init__(agent.model_copy(update={{"command": "true {{instruction}}"}}))

    def launch(self, context):
        launch, path = super().launch(context), f"{{context.home}}/agent.py"
        words = {[f"word{number}" for number in range(40)]}
        file = "open(os.environ['INSTRUCTION_FILE'], 'a')"
        steps = f"import os; print(*set({{words}}), file={{file}}, flush=True)"
        agent = Path({str(SCRIPTS / "shell_agent.py")!r}).read_text()
        program = {{path: (agent.replace("import json", f"{{steps}}; import json", 1)).encode()}}
        return replace(launch, command=f"python3 {{path}}", files=launch.files | program)
"""
"""A harness whose first prompt has the words of a set, in the order that Python draws."""


def test_harness_check_names_the_setting_that_makes_a_replay_exact(tmp_path, monkeypatch):
    (tmp_path / "unsteady.py").write_text(UNSTEADY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(HARNESSES, "unsteady", "unsteady:Unsteady")

    report = check_harness("unsteady", replay=True)["replay"]

    assert report.startswith("refused: ")
    assert "likely cause: the order of words (of a set?)" in report
    assert report.endswith("; exact with agent.env PYTHONHASHSEED = '0'")


def test_harness_check_of_version_image_uses_the_program_on_path_and_installs_nothing(
    say, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", f"{write_pi(tmp_path / 'bin').parent}:{os.environ['PATH']}")
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path / "cache"))

    report = say("harness", "check", "pi", "--version", "image", "--json").json

    assert report["works"], report
    assert report["version"] == "9.9.9 image (unlocked)"
    assert report["unknown to the gateway"] == {"pi_says": 3}
    assert not (tmp_path / "cache" / "bundles").exists()


def test_harness_check_names_a_program_that_the_image_lacks(say, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    said = say("harness", "check", "qwen_code", "--version", "image", "--json")

    assert said.code == 1
    assert "qwen: not found" in said.json["error"]


@pytest.mark.harnesses
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "noise"),
    [("codex", "exec_result"), ("copilot", "session_id"), ("openclaw", "session_id")],
)
def test_replay_of_a_harness_with_random_texts_is_equivalent_except_for_those_texts(name, noise):
    report = check_harness(name, replay=True)["replay"]

    assert report.startswith("equivalent but for")
    assert noise in report


@pytest.mark.harnesses
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "what"), [("aider", "edit"), ("mini_swe_agent", "tool call")])
def test_harness_check_works_for_aider_and_mini_swe_agent(name, what):
    report = check_harness(name)

    assert report["works"], report
    assert report[what] == "made"


def test_script_of_a_captured_session_has_the_exact_sampled_ids_in_order(finished_run):
    capture = next(sessions(finished_run))

    script = script_of(capture)

    [conversation] = script["conversations"]
    assert [turn["token_ids"] for turn in conversation["turns"]] == [
        exchange.output_ids.tolist() for exchange in capture.exchanges
    ]
    assert conversation["when"]["user_contains"][0].endswith("hold?")
    assert len(make_script(script, "replay").conversations[0].turns) == 2

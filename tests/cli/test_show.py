"""`bridle show`: runs, sessions, differences."""

import asyncio
import subprocess
import sys

import pytest
from tests.capture.made import MadeSession

from bridle.capture.sqlite import SqliteStore
from bridle.cli.show import law_line, left_lines, row


def first_session(say, run) -> str:
    return say("show", run, "--json").json[0]["session_id"]


def test_show_prints_a_run_as_a_table_with_its_token_balance(say, finished_run):
    said = say("show", finished_run)

    assert said.code == 0
    assert "3 sessions" in said.out
    assert "excluded 0: holds" in said.out


def test_a_session_is_found_by_a_prefix_of_its_id(say, finished_run):
    session = first_session(say, finished_run)

    said = say("show", session[:-2], "--run", finished_run)
    found_above = say("show", session, "--run", finished_run.parent, "--json")

    assert "root: first" in said.out
    assert "cat(" in said.out
    assert found_above.json["session_id"] == session
    assert found_above.json["stats"]["roots"] == 1


def test_an_ambiguous_session_id_prefix_is_refused(say, finished_run):
    said = say("show", "q", "--run", finished_run)

    assert said.code == 2
    assert "beginning of 3 session ids" in said.err


@pytest.mark.parametrize(("trained", "verdict"), [(3, ": holds"), (2, "DOES NOT HOLD")])
def test_token_balance_line_tells_whether_captured_equals_trained_plus_excluded(trained, verdict):
    line = {"tokens_captured": 5, "tokens_trained": trained, "tokens_excluded": {"cut": 2}}

    assert law_line([line]).endswith(verdict.lstrip(": "))


def test_row_of_a_session_without_measured_numbers_shows_dashes():
    line = dict.fromkeys(
        ("session_id", "harness", "status", "cause", "reward", "exchanges", "tokens_captured",
         "tokens_trained", "tokens_excluded", "merge_ratio", "traces")
    )  # fmt: skip

    assert row(line)[3] == "-"


def test_run_report_fits_40_lines_and_says_whether_laws_1_and_2_hold(say, finished_run):
    said = say("show", finished_run, "--report")
    numbers = say("show", finished_run, "--report", "--json").json

    assert "law 1     holds" in said.out
    assert "law 2     holds" in said.out
    assert len(said.out.splitlines()) < 40
    assert (numbers["sessions"], numbers["merge_ratio"]) == (3, 1.0)
    assert numbers["tokens_captured"] == numbers["tokens_trained"]


def test_show_refuses_a_report_of_a_session(say, finished_run):
    said = say("show", first_session(say, finished_run), "--run", finished_run, "--report")

    assert said.code == 2
    assert "--report needs a run folder" in said.err


async def write(made, folder):
    async with await SqliteStore.open(folder / "capture.sqlite") as store:
        await made.write(store)


@pytest.mark.parametrize("of", ["run", "report", "session"])
def test_show_names_request_fields_that_had_no_effect(say, tmp_path, of):
    made = MadeSession("one")
    made.call(extra={"unknown": {"mood": 2}, "unenforced": ["min_p"]})
    made.end()
    asyncio.run(write(made, tmp_path))
    shown = {
        "run": [tmp_path],
        "report": [tmp_path, "--report"],
        "session": ["one", "--run", tmp_path],
    }
    said = say("show", *shown[of])
    assert "unknown to the gateway, not acted on: 2 mood" in said.out
    assert "asked for and not enforced: 1 min_p" in said.out


def test_run_report_lists_turns_before_laws(say, finished_run):
    said = say("show", finished_run, "--report").out
    order = ["turns  ", "merge ratio", "law 1", "law 2", "excluded  ", "forks"]
    assert sorted(order, key=said.index) == order


def test_names_of_unscored_and_lost_files_are_shown_with_control_characters_escaped():
    evaluation = {"unscorable": "too deep", "stayed": ["a\x1b[2Jb\u202e: no file"]}
    assert list(left_lines({"evaluation": evaluation, "left_out": {"out/z": "not there"}})) == [
        "reward 0: too deep",
        "not scored: a\\x1b[2Jb\\u202e: no file",
        "not kept: out/z: not there",
    ]
    assert list(left_lines({"evaluation": None})) == []


def test_show_imports_no_heavy_package(finished_run):
    code = """
import sys
from bridle.cli.__main__ import main
try:
    main(["show", sys.argv[1]])
except SystemExit as ended:
    assert ended.code == 0
print(*sys.modules)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code, finished_run], capture_output=True, text=True, check=True
    )
    heavy = {"asyncio", "structlog", "pyarrow", "transformers", "torch", "uvloop", "aiohttp"}
    assert not heavy & set(shown.stdout.splitlines()[-1].split())

"""Tables, numbers and JSON."""

import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

from bridle.cli import output
from bridle.cli.show import COLUMNS, row

LONG = "django__django-11099-a-task-with-a-rather-long-name.mini_swe_agent-7"
LINE = {
    "session_id": LONG, "harness": "mini_swe_agent", "status": "COMPLETED", "cause": None,
    "reward": None, "exchanges": 4, "tokens_captured": 154, "tokens_trained": 150,
    "tokens_excluded": {"cut": 4}, "merge_ratio": 1.0, "traces": 1,
}  # fmt: skip


def test_json_goes_to_stdout_as_one_document(capsys):
    output.print_json({"a": [1, None]})

    assert json.loads(capsys.readouterr().out) == {"a": [1, None]}


def test_columns_marked_as_numbers_are_aligned_right_and_missing_cells_are_empty():
    made = output.table("t", ("name", "#count"), [("a", None)])

    assert [column.justify for column in made.columns] == ["left", "right"]
    assert list(made.columns[1].cells) == [""]


@pytest.fixture
def printed():
    """Return what is printed into a console of this many columns."""
    before = output.console.file, output.console.width
    output.console.file = file = io.StringIO()

    def of(width, print_it):
        output.console.width = width
        print_it()
        return file.getvalue()

    yield of
    output.console.file, output.console.width = before


@pytest.mark.parametrize("width", [20, 80, 160, 400])
def test_an_id_is_whole_at_any_width(printed, width):
    out = printed(width, lambda: output.print_table("run", COLUMNS, [row(LINE)]))

    assert re.search(rf"(^|\s){re.escape(LONG)}($|\s)", out, re.MULTILINE)
    assert "150" in out


def test_a_table_that_is_too_wide_leaves_out_nothing(printed):
    out = printed(80, lambda: output.print_table("run", COLUMNS, [row(LINE)]))

    title, session, cells = out.splitlines()
    assert (title, session) == ("run", LONG)
    assert cells.split("  ")[1:] == [
        "harness mini_swe_agent", "status COMPLETED", "reward -", "calls 4", "captured 154",
        "trained 150", "excluded 4 cut", "merge 1.00", "traces 1",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["run .[embedded]", "[bold]x[/bold]", "a :smile: b", "\\[x]"])
def test_text_is_printed_unchanged(printed, text):
    def print_it():
        output.console.print(text)
        output.console.print(output.table(text, ("a",), [[text]]))

    assert printed(80, print_it).count(text) == 3


def test_the_consoles_of_the_command_line_take_no_markup():
    for console in (output.console, output.notes):
        assert isinstance(console, Console)
        assert console.render_str("[bold]x").plain == "[bold]x"


@pytest.mark.parametrize(("env", "width"), [({}, 160), ({"COLUMNS": "80"}, 80)])
def test_without_a_terminal_columns_sets_the_width(env, width):
    code = "from bridle.cli.output import console; print(console.width)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, env=env
    )
    assert int(done.stdout) == width


HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\x1b[31md"
"""Sets a terminal's title, clears it, and colours what follows."""


def test_no_text_of_an_agent_is_obeyed_by_a_terminal():
    shown = io.StringIO()
    console = output.Plain(file=shown, force_terminal=True, markup=False, width=80)

    console.print(output.table(HOSTILE, ("name",), [(HOSTILE,)]))
    console.print(HOSTILE, style="bold")

    out = re.sub(r"\x1b\[\d*(;\d+)*m", "", shown.getvalue())
    assert set(out) & {"\x1b", "\x07", "\x9b"} == set()
    assert "[31md" in out

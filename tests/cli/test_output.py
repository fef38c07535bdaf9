"""Tables, and checks of output paths over all verbs."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bridle.cli import terminal
from bridle.cli.show import COLUMNS, row
from bridle.cli.terminal import check_file, check_folder
from bridle.errors import ConfigError

LONG = "django__django-11099-a-task-with-a-rather-long-name.mini_swe_agent-7"
LINE = {
    "session_id": LONG, "harness": "mini_swe_agent", "status": "COMPLETED", "cause": None,
    "reward": None, "exchanges": 4, "tokens_captured": 154, "tokens_trained": 150,
    "tokens_excluded": {"cut": 4}, "merge_ratio": 1.0, "traces": 1,
}  # fmt: skip


def test_json_goes_to_stdout_as_one_document(capsys):
    terminal.print_json({"a": [1, None]})

    assert json.loads(capsys.readouterr().out) == {"a": [1, None]}


def test_columns_marked_as_numbers_are_aligned_right_and_missing_cells_are_empty():
    made = terminal.table("t", ("name", "#count"), [("a", None)])

    assert [column.justify for column in made.columns] == ["left", "right"]
    assert list(made.columns[1].cells) == [""]


@pytest.fixture
def printed():
    """Return what is printed into a console of this many columns."""
    before = terminal.console.file, terminal.console.width
    terminal.console.file = file = io.StringIO()

    def of(width, print_it):
        terminal.console.width = width
        print_it()
        return file.getvalue()

    yield of
    terminal.console.file, terminal.console.width = before


@pytest.mark.parametrize("width", [20, 80, 160, 400])
def test_a_session_id_in_a_table_is_not_cut_at_any_width(printed, width):
    out = printed(width, lambda: terminal.print_table("run", COLUMNS, [row(LINE)]))

    assert re.search(rf"(^|\s){re.escape(LONG)}($|\s)", out, re.MULTILINE)
    assert "150" in out


def test_a_table_wider_than_the_terminal_prints_every_cell(printed):
    out = printed(80, lambda: terminal.print_table("run", COLUMNS, [row(LINE)]))

    title, session, cells = out.splitlines()
    assert (title, session) == ("run", LONG)
    assert cells.split("  ")[1:] == [
        "harness mini_swe_agent", "status COMPLETED", "reward -", "calls 4", "captured 154",
        "trained 150", "excluded 4 cut", "merge 1.00", "traces 1",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["run .[embedded]", "[bold]x[/bold]", "a :smile: b", "\\[x]"])
def test_text_is_printed_unchanged(printed, text):
    def print_it():
        terminal.console.print(text)
        terminal.console.print(terminal.table(text, ("a",), [[text]]))

    assert printed(80, print_it).count(text) == 3


def test_consoles_print_markup_literally():
    for console in (terminal.console, terminal.notes):
        assert isinstance(console, Console)
        assert console.render_str("[bold]x").plain == "[bold]x"


@pytest.mark.parametrize(
    ("env", "width"), [({}, 160), ({"COLUMNS": "70"}, 70), ({"COLUMNS": "0"}, 80)]
)
def test_output_width_without_a_terminal_is_that_of_the_columns_variable(env, width):
    code = "from bridle.cli.terminal import console; print(console.width)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, env=env
    )
    assert int(done.stdout) == width


def test_a_note_without_a_terminal_is_one_line_however_long():
    code = "from bridle.cli.terminal import notes; notes.print('a long error ' * 20)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stderr.splitlines() == ["a long error " * 20]


FILE = "taken/file"
SCRIPTED = ("--engine", "scripted:mine/hello/script.json")


@pytest.fixture
def here(say, tmp_path, monkeypatch):
    """The current folder: a task set `mine`, and a file where a folder is wanted."""
    monkeypatch.chdir(tmp_path)
    say("init", "mine")
    Path("taken").mkdir()
    Path(FILE).write_text("")
    return tmp_path


WANT_A_FOLDER = {
    "gateway": ("gateway", *SCRIPTED, "--port", 0, "--data"),
    "serve": ("serve", *SCRIPTED, "--port", 0, "--data"),
    "serve --trajectories": ("serve", *SCRIPTED, "--port", 0, "--trajectories"),
    "run": ("run", "mine", *SCRIPTED, "--out"),
    "generate": ("generate", "mine", *SCRIPTED, "--out"),
    "train": ("train", "--model", "m", "--tasks", "mine", "--out"),
    "demo": ("demo", "--out"),
    "init": ("init",),
}


@pytest.mark.parametrize("verb", WANT_A_FOLDER)
def test_a_file_where_a_folder_is_wanted_is_named(say, here, verb):
    said = say(*WANT_A_FOLDER[verb], f"{FILE}/below")

    assert said.code == 2
    assert f"{FILE}/below: {FILE} is a file; name a folder" in said.err


@pytest.mark.parametrize(("url", "why"), [("s3://b/p", "s3fs"), ("nowhere://b/p", "nowhere")])
def test_storage_without_a_driver_is_refused_at_the_start(say, here, url, why):
    said = say("serve", *SCRIPTED, "--port", 0, "--trajectories", url)

    assert said.code == 2
    assert f"--trajectories {url}: " in said.err
    assert why in said.err


@pytest.mark.parametrize("verb", ["gateway", "init"])
def test_a_folder_that_the_operating_system_refuses_is_named(say, here, verb):
    said = say(*WANT_A_FOLDER[verb], "/proc/refused")

    assert said.code == 3
    assert "/proc/refused" in said.err


def test_a_folder_where_a_file_is_wanted_is_named(say, finished_run, here):
    said = say("export", finished_run, "--format", "sft", "--out", "taken")

    assert said.code == 2
    assert "--out taken is a folder; name a file" in said.err


def test_a_pipe_or_device_as_output_is_refused_and_stays(say, finished_run, here):
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")

    for name in ("pipe", "link"):
        said = say("export", finished_run, "--format", "sft", "--out", name)
        assert said.code == 2
        assert f"--out {name} is a device or a pipe; name a file" in said.err
    assert Path("link").is_symlink()


def test_an_export_to_a_link_writes_the_file_that_it_leads_to(say, finished_run, here):
    Path("link").symlink_to("file")

    assert say("export", finished_run, "--format", "sft", "--out", "link").code == 0
    assert Path("link").is_symlink()
    assert Path("file").stat().st_size


def test_results_on_a_full_disk_end_with_code_3_and_one_line(finished_run):
    command = [sys.executable, "-m", "bridle.cli", "show", str(finished_run), "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3
    assert done.stderr == "bridle: the disk: No space left on device\n"


def test_rebuilding_into_a_file_is_refused(say, finished_run, here):
    said = say("rebuild", finished_run, "--out", FILE)

    assert said.code == 2
    assert f"{FILE} is a file; name a folder" in said.err


def test_rebuilding_a_missing_run_creates_no_folder(say, here):
    said = say("rebuild", "nowhere")

    assert said.code == 2
    assert not Path("nowhere").exists()


def test_a_run_folder_that_cannot_be_made_on_a_disk_with_room_is_not_called_a_full_disk(say, here):
    said = say("run", "mine", *SCRIPTED, "--out", "/proc/gone/run")

    assert said.code == 3
    assert "cannot begin a run in /proc: No such file" in said.err
    assert "name another folder by --out" in said.err
    assert "disk space" not in said.err


@pytest.mark.parametrize("verb", ["run", "gateway", "serve", "engine"])
def test_a_missing_tokenizer_folder_is_named(say, here, verb):
    engine = (SCRIPTED[1],) if verb == "engine" else SCRIPTED
    tasks = ("mine",) if verb == "run" else ("--port", 0)

    said = say(verb, *tasks, *engine, "--tokenizer", "nowhere")

    assert said.code == 2
    assert "tokenizer 'nowhere': no such folder; give a folder" in said.err


@pytest.mark.parametrize("verb", ["run", "gateway", "serve"])
def test_an_engine_that_does_not_answer_is_named(say, here, verb):
    tasks = ("mine",) if verb == "run" else ("--port", 0)

    said = say(verb, *tasks, "--engine", "http://127.0.0.1:9", "--tokenizer", "builtin")

    assert said.code == 3
    if verb == "run":  # with whatever else is wrong
        assert "engine http://127.0.0.1:9 takes no connection: Connection refused" in said.err
    else:
        assert "http://127.0.0.1:9/v1/models cannot be reached: " in said.err
        assert "is the engine running there?" in said.err


@pytest.mark.parametrize("verb", ["gateway", "serve", "engine", "dashboard"])
def test_a_port_in_use_is_named(say, finished_run, here, verb):
    first = {"engine": SCRIPTED[1:], "dashboard": (finished_run,)}.get(verb, SCRIPTED)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        said = say(verb, *first, "--port", port)

    assert said.code == 2
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use; choose another" in said.err


@pytest.mark.parametrize("verb", ["gateway", "serve", "engine", "dashboard"])
def test_a_port_that_does_not_exist_is_refused_with_the_allowed_range(
    say, finished_run, here, verb
):
    first = {"engine": SCRIPTED[1:], "dashboard": (finished_run,)}.get(verb, SCRIPTED)

    said = say(verb, *first, "--port", 99999)

    assert said.code == 2
    assert "less than or equal to 65535" in said.err


def test_a_folder_as_config_file_is_named(say, here):
    said = say("run", "mine", "--config", "mine")

    assert said.code == 2
    assert "mine: cannot be read" in said.err


def test_path_checks_do_not_create_the_folder(tmp_path):
    assert check_folder(tmp_path / "a" / "b", "--out") == tmp_path / "a" / "b"
    assert check_file(tmp_path / "a" / "b.json", "--out") == tmp_path / "a" / "b.json"
    assert not list(tmp_path.iterdir())


def test_an_unwritable_folder_is_refused(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    try:
        (locked / "probe").touch()
    except PermissionError:
        with pytest.raises(ConfigError, match="cannot be written; name another folder"):
            check_folder(locked / "run", "--out")
    else:  # the tests run as root, whom no permission stops
        assert check_folder(locked / "run", "--out") == locked / "run"


HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\x1b[31md"
"""Sets a terminal's title, clears it, and colours what follows."""


def test_terminal_escapes_in_agent_text_are_removed():
    shown = io.StringIO()
    console = terminal.Plain(file=shown, force_terminal=True, markup=False, width=80)

    console.print(terminal.table(HOSTILE, ("name",), [(HOSTILE,)]))
    console.print(HOSTILE, style="bold")

    out = re.sub(r"\x1b\[\d*(;\d+)*m", "", shown.getvalue())
    assert set(out) & {"\x1b", "\x07", "\x9b"} == set()
    assert "[31md" in out

"""The command line as a whole: verbs, errors and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest
import structlog

import bridle
from bridle.cli.__main__ import EXTRAS, app, load, main
from bridle.cli.__main__ import VERBS as EVERY
from bridle.cli.terminal import console, log_to_stderr, notes
from bridle.errors import ConfigError, install_extra

VERBS = {
    *("demo", "run", "show", "rebuild", "export", "doctor", "gateway", "engine", "init", "train"),
    *(
        "serve",
        "submit",
        "status",
        "watch",
        "cancel",
        "certify",
        "generate",
        "dashboard",
        "score",
        "fork",
    ),
    "teach",
}


def test_version_option_prints_the_version_of_the_package(say):
    assert bridle.__version__ in say("--version").out


def test_every_subcommand_exists_and_has_help(say):
    assert set(EVERY) == VERBS | {"harness", "tasks"}
    for verb in (*VERBS, "harness"):
        assert say(verb, "--help").code == 0


@pytest.mark.parametrize("verb", [(), ("run",), ("harness", "check")])
def test_short_help_flag_prints_the_same_as_the_long_one(say, verb):
    assert say(*verb, "-h").out == say(*verb, "--help").out != ""


@pytest.fixture
def noisy():
    """A verb `noisy` that prints on every way, and fails."""

    def noisy() -> None:
        console.print("a result")
        notes.print("a note")
        structlog.get_logger().info("a line")
        structlog.get_logger().warning("a warning")
        raise ConfigError("the fault")

    app.command("noisy")(noisy)
    yield
    app.registered_commands.pop()
    notes.quiet = notes.verbose = False
    log_to_stderr()


@pytest.mark.parametrize("flag", [("noisy", "-q"), ("--quiet", "noisy")])
def test_quiet_flag_hides_notes_but_not_results_warnings_or_errors(say, noisy, flag):
    assert "a note" in say("noisy").err

    said = say(*flag)

    assert said.out == "a result\n"
    assert "a note" not in said.err
    assert "a line" not in said.err
    assert "a warning" in said.err
    assert said.err.endswith("bridle: the fault\n")


def test_verbose_flag_prints_the_traceback_of_an_error(say, noisy):
    assert "Traceback" not in say("noisy").err

    said = say("noisy", "-v")

    assert "Traceback" in said.err
    assert said.err.endswith("bridle: the fault\n")
    assert say("show", "--", "-v").err.startswith("bridle: there is no session '-v'")


def test_every_subcommand_has_a_json_flag():
    def verbs(command, path):
        for name, below in getattr(command, "commands", {"": command}).items():
            yield from verbs(below, (*path, name)) if name else [(path, command)]

    options = {
        path: [o for one in verb.params for o in one.opts]
        for name in EVERY
        for path, verb in verbs(load(name), (name,))
    }
    assert len(options) > 20
    assert [path for path, given in options.items() if "--json" not in given] == []


@pytest.mark.parametrize(("words", "place"), [("bridle tra", "1"), ("bridle nope tra", "2")])
def test_bash_completion_completes_subcommand_names(words, place):
    asked = {"_BRIDLE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    done = subprocess.run(
        [Path(sys.executable).with_name("bridle")],
        env=asked,
        capture_output=True,
        check=False,
        text=True,
    )

    assert done.stdout.split() == ["train"]


@pytest.mark.parametrize("verb", ["harness", "tasks"])
def test_subcommand_groups_have_no_completion_option(say, verb):
    assert "completion" not in say(verb, "--help").out


def test_a_misspelt_subcommand_gets_a_suggestion(say):
    said = say("shwo")

    assert said.code == 2
    assert "Did you mean 'show'" in said.err


def test_an_error_message_keeps_brackets_and_has_no_traceback(say, tmp_path):
    said = say("show", "[x]", "--run", tmp_path)

    assert said.code == 2
    assert "'[x]'" in said.err
    assert "Traceback" not in said.err


class Bug(Exception):
    """No error of a user."""


@pytest.fixture
def failing():
    """Makes a verb `fail` that raises this error."""

    def make(error):
        def fail() -> None:
            raise error

        app.command("fail")(fail)

    yield make
    app.registered_commands.pop()


@pytest.mark.parametrize("bug", [Bug(), ModuleNotFoundError("no x", name="x"), OSError(5, "eh")])
def test_unexpected_exceptions_are_raised_and_not_turned_into_messages(failing, bug):
    failing(bug)

    with pytest.raises(type(bug)):
        main(["fail"])


def test_error_for_a_missing_package_names_the_extra_to_install(say, failing):
    failing(ModuleNotFoundError("No module named 'torch'", name="torch"))

    said = say("fail")

    assert said.code == 3
    assert "torch" in said.err
    assert install_extra("embedded") in said.err


def test_a_permission_error_names_the_file_and_exits_with_code_3(say, failing):
    failing(PermissionError(13, "Permission denied", "/some/[file]"))

    said = say("fail")

    assert (said.code, said.err) == (3, "bridle: /some/[file]: Permission denied\n")


def test_the_extras_of_optional_packages_exist():
    assert set(EXTRAS.values()) <= set(metadata("bridle").get_all("Provides-Extra") or ())


def test_help_loads_no_heavy_package():
    code = (
        "import sys\nfrom bridle.cli.__main__ import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'renderers', 'openai', 'pyarrow', 'aiohttp'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    assert "LOADED []" in done.stdout


def test_python_m_bridle_cli_exits_with_the_code_of_the_command():
    command = [sys.executable, "-m", "bridle.cli", "show", "nothing", "--run", "/nonexistent"]
    done = subprocess.run(command, capture_output=True, check=False, text=True)

    assert done.returncode == 2
    assert "no session" in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_works_with_closed_standard_streams(tmp_path, closed):
    line = f"exec {sys.executable} -c 'from bridle.cli import main; main()' init made {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=False, cwd=tmp_path)

    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "made" / "hello" / "task.toml").exists()


def test_ctrl_c_while_packages_are_loaded_ends_with_code_130_and_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    command = [sys.executable, "-c", "from bridle.cli import main; main()"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, check=False, env=env, text=True)

    assert (done.returncode, done.stderr) == (130, "")


DEAD = "http://127.0.0.1:9"

FAULTS = {
    "cancel": (("a", "--server", DEAD), 3),
    "certify": (("gone", "--model", "gone"), 2),
    "dashboard": (("gone",), 2),
    "demo": (("--tasks", "0"), 2),
    "doctor": (("gone",), 2),
    "engine": (("scripted:gone.json",), 2),
    "export": (("gone", "--format", "sft", "--out", "x.jsonl"), 2),
    "fork": (("gone", "--run", "gone", "--at", "1"), 2),
    "gateway": (("--config", "gone.toml"), 2),
    "generate": (("gone", "--engine", "scripted:gone.json", "--out", "x"), 2),
    "init": (("mine", "--agent", "gone.py"), 2),
    "rebuild": (("gone",), 2),
    "run": (("gone", "--engine", "scripted:gone.json"), 2),
    "score": (("gone", "--reward", "1"), 2),
    "serve": (("--config", "gone.toml"), 2),
    "show": (("gone",), 2),
    "status": (("--server", DEAD), 3),
    "submit": (("gone.jsonl", "--server", DEAD), 2),
    "teach": (("gone", "--teacher", "embedded:gone"), 2),
    "train": (("gone.toml",), 2),
    "watch": (("--server", DEAD), 3),
}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_faulty_arguments_exit_with_the_documented_code_and_create_no_file(
    say, tmp_path, monkeypatch, verb
):
    monkeypatch.chdir(tmp_path)
    arguments, code = FAULTS[verb]
    said = say(verb, *arguments)
    assert said.code == code, said.err
    assert said.err.strip()
    assert "Traceback" not in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("group", ["harness", "tasks"])
def test_a_group_of_verbs_that_is_given_alone_prints_its_help_and_no_empty_error(say, group):
    said = say(group)
    assert said.code == 2
    assert f"bridle {group}" in said.out
    assert said.err == ""


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_an_unknown_flag_exits_with_code_2(say, verb):
    said = say(verb, "--no-such-flag")
    assert said.code == 2
    assert "no-such-flag" in said.err


def test_a_value_that_is_no_choice_of_a_flag_is_refused_without_words_of_python(say):
    said = say("export", "x", "--format", "wat", "--out", "y")
    assert said.code == 2
    assert "Invalid value for '--format': 'wat' is not one of 'parquet'" in said.err

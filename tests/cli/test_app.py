"""Exit codes and errors of the command line as a whole."""

import subprocess
import sys

import pytest

import bridle
from bridle.cli.app import app, main

VERBS = {
    *("demo", "run", "show", "rebuild", "export", "doctor", "gateway", "engine", "init", "train"),
    *("serve", "submit", "status", "watch", "cancel", "generate", "dashboard"),
}


def test_the_version_is_the_packages(say):
    assert bridle.__version__ in say("--version").out


def test_every_verb_is_there_and_has_help(say):
    assert {command.name for command in app.registered_commands} == VERBS
    for verb in (*VERBS, "harness"):
        assert say(verb, "--help").code == 0


def test_errors_are_one_line_with_brackets_kept(say, tmp_path):
    said = say("show", "[x]", "--run", tmp_path)

    assert said.code == 2
    assert "'[x]'" in said.err
    assert "Traceback" not in said.err


def test_our_own_bugs_are_not_hidden():
    class Bug(Exception):
        pass

    def fail() -> None:
        raise Bug

    app.command("fail")(fail)
    try:
        with pytest.raises(Bug):
            main(["fail"])
    finally:
        app.registered_commands.pop()


def test_help_loads_no_heavy_package():
    code = (
        "import sys\nfrom bridle.cli.app import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'renderers', 'openai', 'pyarrow', 'aiohttp'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)

    assert "LOADED []" in done.stdout

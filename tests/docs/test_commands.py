"""Every `sh` block of the README and of the guides is run, line by line, as it stands.

A server that the README expects is one of ours in vLLM's shape: its address and the model's folder
are the only words that are replaced. A JSON file that a page shows under its name is
there. A command that serves is asked to end when it listens.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bridle.config import builtin_tokenizer_dir

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
SERVING = ("bridle dashboard", "bridle gateway", "bridle serve", "bridle engine")
VLLM, MODEL = "http://127.0.0.1:8000", "path/to/model"

pytestmark = [pytest.mark.harnesses, pytest.mark.core, pytest.mark.timeout(1800)]


def commands(page: Path) -> list[str]:
    """The command lines of a page; `make` targets are run by CI itself."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("make ", "#"))]


WITH_COMMANDS = [page for page in PAGES if commands(page)]


def prepare(page: Path, folder: Path) -> None:
    """Write what the commands of a page read: the registry that it shows, and the examples."""
    for name, block in re.findall(
        r"`(\w+\.json)`:\n\n```json\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        (folder / name).write_text(block)
        (folder / "examples").symlink_to(ROOT / "examples")


def start(line: str, folder: Path) -> tuple[subprocess.Popen, str]:
    """A command that serves on a free port, and its URL."""
    line = re.sub(r" --port \d+", "", line) + " --port 0"
    process = subprocess.Popen(
        ["bash", "-c", f"exec {line}"], cwd=folder, env={**os.environ, "PATH": PATH},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said = ""
    assert process.stderr is not None
    for text in process.stderr:
        said += text
        if found := re.search(r" at\s+(http://[\w.]+:\d+)", said):
            return process, found[1]
    raise AssertionError(f"{line}: {said}")


def stop(process: subprocess.Popen) -> int:
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_work_in_their_order(page, tmp_path):
    words = {MODEL: str(builtin_tokenizer_dir())}
    prepare(page, tmp_path)
    with ExitStack() as stack:
        for line in commands(page):
            if VLLM in line and VLLM not in words:
                bridle = ["bridle", "init", "served"]
                subprocess.run(bridle, cwd=tmp_path, env={**os.environ, "PATH": PATH}, check=True)
                script = "scripted:served/hello/script.json"
                served, words[VLLM] = start(f"bridle engine {script}", tmp_path)
                stack.callback(stop, served)
            for word, instead in words.items():
                line = line.replace(word, instead)  # noqa: PLW2901 - the line as it is run
            if line.startswith(SERVING):
                process, _ = start(line, tmp_path)
                assert stop(process) == 0, line
                continue
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=tmp_path,
                env={**os.environ, "PATH": PATH},
                capture_output=True,
                check=False,
                text=True,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_every_command_of_the_readme_is_run():
    text = (ROOT / "README.md").read_text()
    shown = re.findall(r"^bridle .*$", text, re.MULTILINE)

    assert len(shown) >= 8
    assert [
        line for line in shown if line.split("  #")[0] not in commands(ROOT / "README.md")
    ] == []

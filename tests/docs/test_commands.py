"""Every `sh` block of the README and of the guides is run, line by line, as it stands.

A server that a page expects is one of ours in vLLM's shape: its address and the model's folder are
replaced, and a rollout server's address, which has a free port here. A JSON file that a page shows
under its name is there. A command that serves runs beside the rest of its block, and is then asked
to end.
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
SERVING = re.compile(r"(?:[A-Z_]+=\S+ )*bridle (?:dashboard|gateway|serve|engine) ")
VLLM, MODEL, SERVER = "http://127.0.0.1:8000", "path/to/model", "http://127.0.0.1:8080"

pytestmark = [pytest.mark.harnesses, pytest.mark.core, pytest.mark.timeout(1800)]


def blocks(page: Path) -> list[list[str]]:
    """The command lines of each block of a page; `make` targets are run by CI itself."""
    found = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = ([re.split(r" +# ", line)[0].strip() for line in block.splitlines()] for block in found)
    return [[line for line in own if line and not line.startswith(("make ", "#"))] for own in lines]


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page) for line in block]


WITH_COMMANDS = [page for page in PAGES if commands(page)]


def prepare(page: Path, folder: Path) -> None:
    """Write what the commands of a page read: the files that it shows, and the examples."""
    for name, block in re.findall(
        r"`(\w+\.jsonl?)`:\n\n```json\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        (folder / name).write_text(block)
    (folder / "examples").symlink_to(ROOT / "examples")


def start(line: str, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A command that serves on a free port, and its URL."""
    line = re.sub(r" --port \d+", "", line) + " --port 0"
    process = subprocess.Popen(
        ["bash", "-c", f"exec env {line}"], cwd=folder, env={**os.environ, "PATH": PATH},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said = ""
    assert process.stderr is not None
    for text in process.stderr:
        said += text
        if found := re.search(r" at\s+(http://[\w.]+:\d+)", said):
            return process, found[1]
    raise AssertionError(f"{line}: {said}")


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, f"{process.args!r}\n{said}"


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_shell_commands_of_each_docs_page_succeed_in_order(page, tmp_path):
    words = {MODEL: str(builtin_tokenizer_dir())}
    prepare(page, tmp_path)
    with ExitStack() as engines:
        for block in blocks(page):
            if VLLM in " ".join(block) and VLLM not in words:
                run(["bridle", "init", "served"], tmp_path)
                script = "scripted:served/hello/script.json"
                served, words[VLLM] = start(f"bridle engine {script}", tmp_path)
                engines.callback(stop, served)
            follow(block, tmp_path, words)


def follow(block: list[str], folder: Path, words: dict[str, str]) -> None:
    """Run the commands of a block; its servers end after the last one."""
    words.pop(SERVER, None)
    with ExitStack() as servers:
        for line in block:
            for word, instead in words.items():
                line = line.replace(word, instead)  # noqa: PLW2901 - the line as it is run
            if SERVING.match(line):
                process, url = start(line, folder)
                servers.callback(stop, process)
                if "bridle serve " in line:
                    words[SERVER] = url
            else:
                run(["bash", "-c", line], folder, BRIDLE_SERVER=words.get(SERVER, SERVER))


def run(words: list[str], folder: Path, **env: str) -> None:
    env = {**os.environ, "PATH": PATH, **env}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, check=False, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"


def test_every_bridle_command_in_the_readme_is_run_by_a_test():
    text = (ROOT / "README.md").read_text()
    shown = re.findall(r"^bridle .*$", text, re.MULTILINE)

    assert len(shown) >= 8
    assert [
        line for line in shown if line.split("  #")[0] not in commands(ROOT / "README.md")
    ] == []

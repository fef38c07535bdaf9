"""What is sent through a door; how it ends is tried with real doors in `test_door`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridle.runtimes import door_client
from bridle.runtimes.door_client import BROKEN, request

ENDS = [("exit 0", 0), ("exit 7", 7), ("signal 15", -15), ("signal 9", -9), ("failed why", BROKEN)]


def test_a_request_names_folder_words_and_variables_and_keeps_empty_words():
    body = request("bash", ["-c", "", "x y"])
    assert int.from_bytes(body[:4], "big") == len(body) - 4
    cwd, count, *rest = body[4:].decode().split("\0")
    assert (cwd, count) == (str(Path.cwd()), "4")
    assert rest[:4] == ["bash", "-c", "", "x y"]
    assert f"PATH={os.environ['PATH']}" in rest[4:]


@pytest.mark.parametrize(("answer", "code"), ENDS)
def test_it_ends_as_the_command_did(answer, code):
    line = f"import sys; sys.path.insert(0, {str(Path(door_client.__file__).parent)!r})\n"
    line += f"import door_client; door_client.end_as({answer!r})"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", line], check=False, capture_output=True
    )
    assert done.returncode == code
    assert (b"bridle: why" in done.stderr) == (code == BROKEN)


def test_without_a_door_it_says_so():
    words = [sys.executable, "-I", "-S", door_client.__file__, "/nowhere/socket", "bash"]
    done = subprocess.run(words, check=False, capture_output=True)
    assert done.returncode == BROKEN
    assert b"the sandbox's door is shut" in done.stderr

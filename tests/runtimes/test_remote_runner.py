import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.runtimes import remote_runner
from bridle.runtimes.output import Kept, joined
from bridle.runtimes.remote_runner import Stream, marked, pack, run


def said(part):
    return joined(base64.b64decode(part["head"]), base64.b64decode(part["tail"]), part["size"])


@given(st.lists(st.binary(max_size=40)), st.integers(0, 60))
def test_what_is_kept_of_a_stream_is_what_every_runtime_keeps(parts, limit):
    theirs, ours = Stream(Path("/nowhere"), "out", 0, limit), Kept(limit)
    for part in parts:
        theirs.feed(part)
        ours.feed(part)
    assert said(theirs.kept()) == ours.value()
    assert theirs.flush(all_of_it=True) is False


def test_a_stream_is_written_out_in_pieces_up_to_its_limit(tmp_path):
    stream = Stream(tmp_path, "out", 5, 100)
    stream.feed(b"abc")
    assert stream.flush(all_of_it=True)
    stream.feed(b"defg")
    assert stream.flush(all_of_it=True)
    stream.feed(b"more")
    assert not stream.flush(all_of_it=True)
    pieces = [(tmp_path / f"out.{n}").read_bytes() for n in range(stream.pieces)]
    assert b"".join(map(base64.b64decode, pieces)) == b"abcde"


def ran(folder, argv, **changes):
    request = {
        "argv": argv,
        "env": {"BRIDLE_EXEC": "x"},
        "cwd": str(folder),
        "make": None,
        "stdin": False,
        "timeout_s": None,
        "output_limit": 1000,
        "streamed": 1000,
        "mark": f"BRIDLE_EXEC=runner-{os.getpid()}",
        **changes,
    }
    (folder / "request").write_text(json.dumps(request))
    run(folder)
    return json.loads((folder / "status").read_text())


@pytest.mark.parametrize(
    ("argv", "code", "out", "err"),
    [
        (["bash", "-c", "echo out; echo err >&2; exit 3"], 3, b"out\n", b"err\n"),
        (["bash", "-c", "kill -9 $$"], -9, b"", b""),
        (["no-such-program"], 127, b"", b"bridle: no-such-program: not found\n"),
        (["/etc/passwd"], 126, b"", b"bridle: /etc/passwd: cannot be executed\n"),
        (["bash", "-c", "exec >&- 2>&-; exit 4"], 4, b"", b""),
    ],
)
def test_a_command_s_end_and_words_are_in_the_status(tmp_path, argv, code, out, err):
    status = ran(tmp_path, argv)
    ended = status["ended"]
    assert (ended["code"], said(ended["out"]), said(ended["err"])) == (code, out, err)
    assert (ended["timed_out"], ended["failed"]) == (False, None)


def test_input_is_given_and_a_folder_is_made(tmp_path):
    (tmp_path / "input").write_text(base64.b64encode(b"\0given").decode())
    made = str(tmp_path / "a" / "b")
    status = ran(tmp_path, ["cat"], stdin=True, make=made, cwd=made)
    assert said(status["ended"]["out"]) == b"\0given"


def test_a_folder_that_is_not_there_is_no_end_of_the_command(tmp_path):
    status = ran(tmp_path, ["true"], cwd=str(tmp_path / "nowhere"))
    assert "nowhere does not exist" in status["ended"]["failed"]


@pytest.mark.parametrize("line", ["sleep 60", "exec >&- 2>&-; sleep 60"])
def test_a_command_that_takes_too_long_is_ended(tmp_path, line):
    status = ran(tmp_path, ["bash", "-c", line], timeout_s=0.05)
    assert status["ended"]["timed_out"]


def test_a_command_whose_client_has_given_up_is_ended(tmp_path):
    (tmp_path / "over").touch()
    assert ran(tmp_path, ["sleep", "60"])["ended"]["code"] < 0


def test_marked_processes_and_what_they_started_are_found_and_ended():
    mark = f"BRIDLE_SESSION=marked-{os.getpid()}"
    env = {"PATH": os.environ["PATH"], "BRIDLE_SESSION": mark.partition("=")[2]}
    line = "trap '' TERM; env -i sleep 60 & echo begun; wait"
    child = subprocess.Popen(["bash", "-c", line], env=env, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    assert child.pid in marked(mark)
    subprocess.run([sys.executable, remote_runner.__file__, "kill", mark, "0"], check=True)
    child.wait()
    child.stdout.close()
    assert marked(mark) == set()


def test_only_what_lies_in_the_session_is_packed(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").write_text("x" * 10)
    (tmp_path / "own" / "way").symlink_to("/etc")
    assert pack(f"{tmp_path}/own/file", tmp_path / "out", str(tmp_path / "own")) == 1
    for path in ("own/way/passwd", "own/../../x"):
        with pytest.raises(OSError, match="outside the session's own folder"):
            pack(f"{tmp_path}/{path}", tmp_path / "none", str(tmp_path / "own"))
    with pytest.raises(FileNotFoundError):
        pack(f"{tmp_path}/own/nothing", tmp_path / "none", "")


def test_a_started_command_outlives_the_call_that_started_it(tmp_path):
    request: dict[str, object] = {"argv": ["true"], "env": {}, "cwd": "/", "make": None}
    request |= {"stdin": False, "timeout_s": 5, "output_limit": 1, "streamed": 0, "mark": "X=y"}
    (tmp_path / "request").write_text(json.dumps(request))
    words = [sys.executable, remote_runner.__file__, "start", str(tmp_path)]
    subprocess.run(words, check=True)
    while not (tmp_path / "status").exists():
        time.sleep(0.01)
    assert json.loads((tmp_path / "status").read_text())["ended"]["code"] == 0

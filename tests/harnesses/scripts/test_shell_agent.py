import asyncio
import os
import subprocess
import sys
import time
from typing import Any

from tests.gateway.house import house

from bridle.harnesses.base import SCRIPTS
from bridle.harnesses.scripts import shell_agent
from bridle.harnesses.scripts.shell_agent import AgentTask, bash, run

TURNS: list[dict[str, Any]] = [{"shell": ["echo hi > made.txt"]}, {"content": "It is there."}]


async def test_shell_agent_runs_tool_calls_until_a_reply_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with house(*TURNS) as home:
        caller = await home.session()
        task = AgentTask("make it", dict(caller.handle.base_urls), caller.handle.key, "m")
        assert await asyncio.to_thread(run, task) == "It is there."
        assert [e.root_reason for e in caller.exchanges] == ["first", None]
    assert (tmp_path / "made.txt").read_text() == "hi\n"


async def test_shell_agent_as_a_script_reads_the_environment_of_the_command_harness(tmp_path):
    (tmp_path / "task.txt").write_text("make it")
    async with house(*TURNS) as home:
        caller = await home.session()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SCRIPTS / "shell_agent.py"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            env={
                "PATH": os.environ["PATH"],
                "INSTRUCTION_FILE": "task.txt",
                "OPENAI_BASE_URL": caller.handle.base_urls["openai"],
                "OPENAI_API_KEY": caller.handle.key,
                "MODEL": "m",
            },
        )
        said, _ = await process.communicate()
    assert (process.returncode, said) == (0, b"It is there.\n")
    assert (tmp_path / "made.txt").exists()


def test_bash_tool_returns_output_and_exit_code_of_the_command():
    assert bash("echo out; echo err >&2; exit 3") == "out\nerr\n[exit code: 3]"
    assert bash("true") == "[exit code: 0]"


def test_bash_tool_cuts_the_middle_of_long_output():
    text = bash("printf 'a%.0s' {1..40000}; printf end")
    assert "[10003 characters left out]" in text
    assert text.endswith("end\n[exit code: 0]")


def test_bash_tool_stops_a_hanging_command_and_its_children(monkeypatch):
    monkeypatch.setattr(shell_agent, "LIMIT_S", 1.5)
    began = time.monotonic()
    assert bash("sleep 60 & echo on; sleep 60") == "on\n[stopped after 1.5 s]"
    assert time.monotonic() - began < 50


def test_bash_tool_replaces_bytes_that_are_not_utf_8():
    assert bash(r"printf '\xff'") == "�\n[exit code: 0]"

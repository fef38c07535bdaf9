"""Shared by the tests of harnesses: contexts, and wheels made by hand."""

import base64
import hashlib
import zipfile

from bridle.config import AgentSpec
from bridle.harnesses.base import SCRIPTS, LaunchContext
from bridle.harnesses.bundles import Builder
from bridle.harnesses.packaged import NODE

PI = """#!/usr/bin/env python3
import json, os, sys
if "--version" in sys.argv:
    print("9.9.9")
    sys.exit()
with open(os.environ["PI_CODING_AGENT_DIR"] + "/models.json") as file:
    [provider] = json.load(file)["providers"].values()
task = AgentTask(
    instruction=sys.stdin.read(),
    base_urls={"openai": provider["baseUrl"]},
    key=provider["apiKey"],
    model=provider["models"][0]["id"],
)
plain_ask = ask
ask = lambda task, body: plain_ask(task, {**body, "pi_says": "hello"})
run(task)
"""
"""A small program that reads pi's configuration and does the work of `shell_agent.py`."""


SERVERS = [
    {"name": "a", "command": "serve", "args": ["-x"]},
    {"name": "b", "transport": "streamable-http", "url": "http://m"},
    {"name": "c", "transport": "sse", "url": "http://m"},
]
"""MCP servers of all three kinds, as a task names them."""


def maker(kind):
    """Return a function that makes a harness of this class; its keyword arguments are settings."""

    def make(mcp_servers=(), skills_path=None, **settings):
        given = {"mcp_servers": mcp_servers, "skills_path": skills_path}
        return kind(AgentSpec(harness=kind.name, settings=settings, **given))

    return make


async def set_up(kind, folder):
    """Set a harness's packages up with a program in Node's place; return what that was given."""
    program = folder / NODE
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nenv > ran.txt; echo "$@" >> ran.txt\n')
    program.chmod(0o755)
    await kind.package.setup(Builder(folder, print, kind.name))
    return (folder / "ran.txt").read_text()


def context(**changes):
    """A launch context with one session's made-up values."""
    values = {
        "instruction": "do it",
        "base_urls": {
            "openai": "http://gw/s/x/v1",
            "anthropic": "http://gw/s/x",
            "google": "http://gw/s/x",
        },
        "key": "key-1",
        "model_name": "bridle-policy",
        "workdir": "/w",
        "home": "/h",
        "bundle": "/b",
        "session_id": "s-1",
        "context_length": 32768,
        "task_id": "t-1",
        "sample_index": 3,
    }
    return LaunchContext(**{**values, **changes})


def wheel(folder, name, files):
    """A wheel in `folder` with `files` (path -> text; executable if it begins with #!).

    Returns the requirement line with its hash.
    """
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    everything = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},{_digest(text)},{len(text)}\n" for file, text in everything.items())
    everything[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in everything.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = (0o100755 if text.startswith("#!") else 0o100644) << 16
            archive.writestr(entry, text)
    return f"{name} @ file://{path} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def write_pi(folder):
    """Write `PI` as `folder/pi`; returns its path."""
    folder.mkdir(parents=True)
    agent = (SCRIPTS / "shell_agent.py").read_text().partition("if __name__")[0]
    first, rest = PI.split("\n", 1)
    (folder / "pi").write_text(f"{first}\n{agent}{rest}")
    (folder / "pi").chmod(0o755)
    return folder / "pi"


def _digest(text):
    raw = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

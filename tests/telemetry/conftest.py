"""A task whose agent calls the model twice and a tool once, and a scripted engine for it."""

import json
import sys

import pytest

AGENT = """\
import json, os, time, urllib.request

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": "2 + 2?"}]
messages.append(ask(messages))
call = messages[-1]["tool_calls"][0]
messages.append({"role": "tool", "tool_call_id": call["id"], "content": "4"})
print(ask(messages)["content"])
"""


@pytest.fixture
def run_of_two(tmp_path):
    """Arguments of `bridle run` for two sessions."""
    (tmp_path / "agent.py").write_text(AGENT)
    task = {
        "task_id": "sum",
        "instruction": "2 + 2?",
        "num_samples": 2,
        "agent": {"harness": "command", "command": f"{sys.executable} {tmp_path / 'agent.py'}"},
        "runtime": {"backend": "local"},
        "evaluator": {"strategy": "command", "config": {"command": "true"}},
    }
    turns = [{"tool_calls": [{"name": "add", "arguments": {"a": 2}}]}, {"content": "Four."}]
    (tmp_path / "tasks.json").write_text(json.dumps(task))
    (tmp_path / "script.json").write_text(json.dumps({"conversations": [{"turns": turns}]}))
    engine = f"scripted:{tmp_path / 'script.json'}"
    return ["run", tmp_path / "tasks.json", "--engine", engine, "--out", tmp_path / "first"]

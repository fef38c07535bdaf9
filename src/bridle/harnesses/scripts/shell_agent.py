"""The smallest agent: one shell tool over OpenAI Chat, with the standard library alone.

`run` is a function for harness `function`; as a script, `python shell_agent.py`, it takes the same
from the variables that harness `command` sets. It knows nothing of Bridle. Agents on SDKs that have
no tools of their own take `bash` from here; it runs inside the sandbox, with the bundle's Python.
"""

import json
import os
import signal
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command in the work folder.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
MOST_TURNS = 20
LIMIT_S = 120
LONGEST = 30_000
"""Characters of output that the model gets; of more, the middle is left out."""


@dataclass(frozen=True)
class AgentTask:
    """Attributes of the function's argument that this agent uses."""

    instruction: str
    base_urls: dict[str, str]
    key: str
    model: str


def run(task: AgentTask) -> str:
    """Let the model work on the task until it calls no tool, for at most `MOST_TURNS` calls.

    Returns the text of the last message.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.instruction}]
    for _ in range(MOST_TURNS):
        message = ask(task, {"model": task.model, "messages": messages, "tools": [TOOL]})
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            output = bash(json.loads(call["function"]["arguments"])["command"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    return str(messages[-1].get("content") or "")


def ask(task: AgentTask, body: dict[str, Any]) -> dict[str, Any]:
    """Send `body` to the model's chat route and return the completion.

    Raises `urllib.error.HTTPError` if the server refuses the request.
    """
    headers = {"Authorization": f"Bearer {task.key}", "Content-Type": "application/json"}
    url = f"{task.base_urls['openai']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - ours
    with urllib.request.urlopen(request, timeout=3600) as answer:  # noqa: S310
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message


def bash(command: str) -> str:
    """Run a shell command in the work folder and return what it printed.

    Args:
        command: The command line, read by bash.
    """
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        ending = f"exit code: {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        ending = f"stopped after {LIMIT_S} s"
    text = output.decode(errors="replace")
    if len(text) > LONGEST:
        left_out = len(text) - LONGEST
        half = LONGEST // 2
        text = f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
    return f"{text.rstrip()}\n[{ending}]".lstrip()


if __name__ == "__main__":
    given = os.environ
    task = AgentTask(
        instruction=Path(given["INSTRUCTION_FILE"]).read_text(encoding="utf-8"),
        base_urls={"openai": given["OPENAI_BASE_URL"]},
        key=given["OPENAI_API_KEY"],
        model=given["MODEL"],
    )
    print(run(task))

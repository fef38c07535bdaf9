"""A small coding agent, as users write them: the standard library, OpenAI Chat, one bash tool.

It reads the task from INSTRUCTION_FILE, runs what the model asks for in the current folder, and
ends when the model calls no tool. It knows nothing of Bridle.
"""

import json
import os
import subprocess
import urllib.request
from pathlib import Path

MOST_SHOWN = 2000
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


def ask(messages: list[dict]) -> dict:
    """The model's next message."""
    body = {"model": os.environ["MODEL"], "messages": messages, "tools": [TOOL]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def run(arguments: str) -> str:
    """The end of what a command prints; a call that cannot be read gets the reason."""
    try:
        command = str(json.loads(arguments)["command"])
    except (ValueError, KeyError, TypeError) as error:
        return f"the call cannot be read: {error!r}"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr)[-MOST_SHOWN:] or "done"


def main() -> None:
    instruction = Path(os.environ["INSTRUCTION_FILE"]).read_text()
    messages = [{"role": "user", "content": instruction}]
    while True:
        message = ask(messages)
        messages.append(message)
        for call in message.get("tool_calls") or []:
            result = run(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not message.get("tool_calls"):
            return


if __name__ == "__main__":
    main()

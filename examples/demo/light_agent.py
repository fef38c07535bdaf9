"""A light script harness: the standard library over OpenAI Chat, one tool, as users have them.

Run as `python light_agent.py INSTRUCTION` in a folder with files; it lets the model read files with
its one tool and writes the model's last word to answer.txt. It knows nothing of Bridle: base URL
and key come from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "cat",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}


def ask(base_url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """One chat completion; raises `urllib.error.HTTPError` on a refusal."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message


def read(folder: Path, arguments: str) -> str:
    """What the tool gives back for the model's arguments."""
    try:
        return (folder / str(json.loads(arguments)["name"])).read_text()
    except (OSError, ValueError, KeyError, TypeError):
        return "no such file"


def run(base_url: str, key: str, model: str, instruction: str, folder: Path) -> str:
    """Let the model work for at most 4 turns; returns its last word."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    text = ""
    for _ in range(4):
        message = ask(base_url, key, {"model": model, "messages": messages, "tools": [TOOL]})
        messages.append(message)
        text = str(message.get("content") or "")
        if not (calls := message.get("tool_calls")):
            break
        for call in calls:
            result = read(folder, call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return text


if __name__ == "__main__":
    answer = run(
        os.environ["OPENAI_BASE_URL"],
        os.environ["OPENAI_API_KEY"],
        os.environ.get("MODEL", "bridle-policy"),
        sys.argv[1],
        Path.cwd(),
    )
    Path("answer.txt").write_text(answer.strip() + "\n")

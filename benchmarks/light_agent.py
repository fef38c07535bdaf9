"""A light agent: OpenAI Chat over a bare socket, with a shell tool; 5 MiB of its own.

Its argument is the instruction.
"""

import json
import os
import socket
import subprocess
import sys

TOOL = {"name": "bash", "parameters": {"properties": {"command": {"type": "string"}}}}


def ask(messages: list[dict], *tools: dict) -> dict:
    """The model's next message."""
    host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    asked = {"model": os.environ["MODEL"], "messages": messages}
    if tools:
        asked["tools"] = [{"type": "function", "function": tool} for tool in tools]
    body = json.dumps(asked).encode()
    head = (
        f"POST /{path}/chat/completions HTTP/1.0\r\nHost: {host}\r\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((name, int(port or 80))) as connection:
        connection.sendall(head.encode() + body)
        with connection.makefile("rb") as answer:
            _, _, content = answer.read().partition(b"\r\n\r\n")
    return json.loads(content)["choices"][0]["message"]


if __name__ == "__main__":
    messages = [{"role": "user", "content": (sys.argv[1:] or ["Write done to out.txt."])[0]}]
    while calls := (message := ask(messages, TOOL)).get("tool_calls"):
        messages.append(message)
        for call in calls:
            line = json.loads(call["function"]["arguments"])["command"]
            ran = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)  # noqa: S602 - its tool
            said = {"role": "tool", "tool_call_id": call["id"], "content": ran.stdout + ran.stderr}
            messages.append(said)

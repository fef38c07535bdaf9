"""A light agent as users have them: the standard library over OpenAI Chat, one bash tool.

`--lenient` exits 0 after API errors, as some real harnesses do.
"""

# ruff: noqa: PTH123, S310, T201 - a user's script

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

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


def ask(messages):
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages, "tools": [TOOL]})
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        body.encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def main():
    with open(os.environ["INSTRUCTION_FILE"]) as file:
        messages = [{"role": "user", "content": file.read()}]
    for _ in range(20):
        try:
            message = ask(messages)
        except urllib.error.HTTPError as error:
            print("model error", error.code, file=sys.stderr)
            sys.exit(0 if "--lenient" in sys.argv else 1)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            line = json.loads(call["function"]["arguments"])["command"]
            ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": ran.stdout + ran.stderr}
            )
        if not message.get("tool_calls"):
            print(message["content"])
            return


main()

"""The LiteLLM proxy in front of the gateway; the OpenAI SDK is its client."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai import OpenAI
from tasks import MODEL, OPENAI, QUESTIONS, SYSTEM, add, population

PROXY_KEY = "sk-" + secrets.token_hex(32)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
config = Path(os.environ["HOME"], "proxy.json")
params = {"model": f"openai/{MODEL}", "api_base": OPENAI["base_url"], "api_key": OPENAI["api_key"]}
config.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": params}]}))
command = [sys.executable, "-c", "import litellm; litellm.run_server()", "--config", str(config)]
proxy = subprocess.Popen(
    [*command, "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"],
    stdout=subprocess.DEVNULL,
    env={**os.environ, "LITELLM_MASTER_KEY": PROXY_KEY},
)
try:
    while proxy.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness").close()
            break
        except OSError:
            time.sleep(0.1)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=PROXY_KEY, max_retries=0)
    functions = {"population": population, "add": add}
    kinds = {"population": {"city": "string"}, "add": {"a": "integer", "b": "integer"}}
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": functions[name].__doc__.split("\n")[0],
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in keys.items()},
                    "required": list(keys),
                },
            },
        }
        for name, keys in kinds.items()
    ]
    messages = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            reply = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = functions[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(message.content)
finally:
    proxy.terminate()
    proxy.wait()

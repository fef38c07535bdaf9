"""An agent as a Python function: the OpenAI SDK and one shell tool."""

import json
from asyncio import create_subprocess_shell
from asyncio.subprocess import PIPE, STDOUT

from openai import AsyncOpenAI

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


async def run(task):
    client = AsyncOpenAI(base_url=task.base_urls["openai"], api_key=task.key)
    messages = [{"role": "user", "content": task.instruction}]
    while True:
        reply = await client.chat.completions.create(
            model=task.model, messages=messages, tools=[TOOL]
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            command = json.loads(call.function.arguments)["command"]
            process = await create_subprocess_shell(command, stdout=PIPE, stderr=STDOUT)
            output, _ = await process.communicate()
            text = output.decode(errors="replace")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

"""The official SDKs of all four dialects as small agents: they read a book, a page a turn.

Each keeps its history as its provider's examples do, answers every call, and says `MORE` where the
model made none.
"""

from typing import Any

import anthropic
import httpx
import openai
from google import genai
from google.genai import types as google

from bridle.gateway.registry import SessionHandle

TURNS = 9
SCHEMA = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}
ABOUT = "Read a page."
INSTRUCTION = "Read the book to its end."
MORE = "Go on."


def reading(turns=TURNS):
    """A script that reads one page a turn and then tells the end."""
    steps = [
        {
            "reasoning": f"Page {page} is next." if page % 2 else None,
            "content": f"I read page {page}." if page % 3 else None,
            "tool_calls": [{"name": "look", "arguments": {"page": page}}],
        }
        for page in range(1, turns)
    ]
    return {"conversations": [{"turns": [*steps, {"content": "The end."}]}]}


def page(number):
    return f"Page {number}: it was a dark and stormy night, {number * 37}."


def openai_client(handle: SessionHandle) -> Any:
    """OpenAI's client of a session, without retries of its own."""
    return openai.AsyncOpenAI(
        api_key=handle.key, base_url=handle.base_urls["openai"], max_retries=0, timeout=120
    )


async def chat(handle, turns):
    """OpenAI's client on Chat Completions, whole."""
    tool = {"name": "look", "description": ABOUT, "parameters": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": INSTRUCTION}]
    async with openai_client(handle) as client:
        for _ in range(turns):
            done = await client.chat.completions.create(
                model="m", messages=messages, tools=[{"type": "function", "function": tool}]
            )
            message = done.choices[0].message
            calls = [
                {"id": c.id, "type": "function",
                 "function": {"name": c.function.name, "arguments": c.function.arguments}}
                for c in message.tool_calls or ()
            ]  # fmt: skip
            answer = {"role": "assistant", "content": message.content}
            messages.append(answer | ({"tool_calls": calls} if calls else {}))
            for number, call in enumerate(calls, len(messages)):
                result = {"role": "tool", "tool_call_id": call["id"], "content": page(number)}
                messages.append(result)
            if not calls:
                messages.append({"role": "user", "content": MORE})


async def responses(handle, turns):
    """OpenAI's client on Responses, whole."""
    tool = {"type": "function", "name": "look", "description": ABOUT, "parameters": SCHEMA}
    items: list[Any] = [{"role": "user", "content": INSTRUCTION}]
    async with openai_client(handle) as client:
        for _ in range(turns):
            done = await client.responses.create(model="m", input=items, tools=[tool], store=False)
            items += [one.model_dump(exclude_none=True) for one in done.output]
            items += [
                {"type": "function_call_output", "call_id": one.call_id, "output": page(len(items))}
                for one in done.output
                if one.type == "function_call"
            ]
            if items[-1].get("type") != "function_call_output":
                items.append({"role": "user", "content": MORE})


async def messages(handle, turns):
    """Anthropic's client, streaming."""
    tool = {"name": "look", "description": ABOUT, "input_schema": SCHEMA}
    said: list[Any] = [{"role": "user", "content": INSTRUCTION}]
    made: Any = anthropic.AsyncAnthropic(
        api_key=handle.key, base_url=handle.base_urls["anthropic"], max_retries=0
    )
    async with made as client:
        for _ in range(turns):
            async with client.messages.stream(
                model="m", max_tokens=4096, messages=said, tools=[tool]
            ) as stream:
                final = await stream.get_final_message()
            blocks = [block.model_dump(exclude_none=True) for block in final.content]
            said.append({"role": "assistant", "content": blocks})
            results = [
                {"type": "tool_result", "tool_use_id": b["id"], "content": page(len(said))}
                for b in blocks
                if b["type"] == "tool_use"
            ]
            said.append({"role": "user", "content": results or MORE})


async def contents(handle, turns):
    """Google's client, whole."""
    declared = google.FunctionDeclaration(
        name="look", description=ABOUT, parameters_json_schema=SCHEMA
    )
    config = google.GenerateContentConfig(tools=[google.Tool(function_declarations=[declared])])
    said: list[Any] = [google.Content(role="user", parts=[google.Part(text=INSTRUCTION)])]
    async with httpx.AsyncClient(timeout=120) as http:
        options = google.HttpOptions(base_url=handle.base_urls["google"], httpx_async_client=http)
        client: Any = genai.Client(api_key=handle.key, http_options=options).aio
        for _ in range(turns):
            done = await client.models.generate_content(model="m", contents=said, config=config)
            said.append(done.candidates[0].content)
            results = [
                google.Part.from_function_response(
                    name=part.function_call.name, response={"output": page(len(said))}
                )
                for part in said[-1].parts or ()
                if part.function_call
            ]
            said.append(google.Content(role="user", parts=results or [google.Part(text=MORE)]))


CLIENTS = [chat, responses, messages, contents]

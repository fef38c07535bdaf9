"""AutoGen's AssistantAgent, which keeps its context between runs."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from tasks import MODEL, OPENAI, QUESTIONS, SYSTEM, add, population

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


async def main():
    client = OpenAIChatCompletionClient(model=MODEL, model_info=INFO, **OPENAI)
    agent = AssistantAgent(
        "counter",
        client,
        tools=[population, add],
        system_message=SYSTEM,
        max_tool_iterations=5,
        reflect_on_tool_use=True,
    )
    for question in QUESTIONS:
        result = await agent.run(task=question)
    print(result.messages[-1].content)
    await client.close()


asyncio.run(main())

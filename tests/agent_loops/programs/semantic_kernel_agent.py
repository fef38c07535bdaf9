"""Semantic Kernel's ChatCompletionAgent with a thread."""

import asyncio

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function
from tasks import MODEL, OPENAI, QUESTIONS, SYSTEM, add, population


class Cities:
    """Plugin with the two tools."""

    population = staticmethod(kernel_function(population))
    add = staticmethod(kernel_function(add))


async def main():
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=AsyncOpenAI(**OPENAI))
    agent = ChatCompletionAgent(
        service=service, name="counter", instructions=SYSTEM, plugins=[Cities()]
    )
    thread = None
    for question in QUESTIONS:
        answer = await agent.get_response(messages=question, thread=thread)
        thread = answer.thread
    print(answer.content)


asyncio.run(main())

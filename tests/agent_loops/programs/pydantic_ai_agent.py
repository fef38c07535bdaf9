"""Pydantic AI over four model classes; the argument names one."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider
from tasks import ANTHROPIC, GOOGLE, MODEL, OPENAI, QUESTIONS, SYSTEM, add, population

MODELS = {
    "chat": lambda: OpenAIChatModel(MODEL, provider=OpenAIProvider(**OPENAI)),
    "responses": lambda: OpenAIResponsesModel(MODEL, provider=OpenAIProvider(**OPENAI)),
    "anthropic": lambda: AnthropicModel(MODEL, provider=AnthropicProvider(**ANTHROPIC)),
    "google": lambda: GoogleModel(MODEL, provider=GoogleProvider(**GOOGLE)),
}
agent = Agent(MODELS[sys.argv[1]](), instructions=SYSTEM, tools=[population, add])
history = []
for question in QUESTIONS:
    result = agent.run_sync(question, message_history=history)
    history = result.all_messages()
print(result.output)

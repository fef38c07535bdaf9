"""Strands Agents; the argument names the model class."""

import sys

from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from tasks import ANTHROPIC, MODEL, OPENAI, QUESTIONS, SYSTEM, add, population

MODELS = {
    "chat": lambda: OpenAIModel(client_args=OPENAI, model_id=MODEL),
    "anthropic": lambda: AnthropicModel(client_args=ANTHROPIC, model_id=MODEL, max_tokens=2000),
}
agent = Agent(
    model=MODELS[sys.argv[1]](),
    tools=[tool(population), tool(add)],
    system_prompt=SYSTEM,
    callback_handler=None,
)
for question in QUESTIONS:
    result = agent(question)
print(result)

"""Smolagents; the argument is `tools` (ToolCallingAgent) or `code` (CodeAgent)."""

import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from tasks import MODEL, OPENAI, QUESTIONS, add, population

model = OpenAIServerModel(MODEL, api_base=OPENAI["base_url"], api_key=OPENAI["api_key"])
kind = {"tools": ToolCallingAgent, "code": CodeAgent}[sys.argv[1]]
agent = kind(tools=[tool(population), tool(add)], model=model, max_steps=6, verbosity_level=0)
print(agent.run(QUESTIONS[0]))

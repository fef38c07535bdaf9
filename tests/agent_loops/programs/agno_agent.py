"""Agno with its history in memory; the argument names the API."""

import sys

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat, OpenAIResponses
from tasks import MODEL, OPENAI, QUESTIONS, SYSTEM, add, population

kinds = {"chat": OpenAIChat, "responses": OpenAIResponses}
agent = Agent(
    model=kinds[sys.argv[1]](id=MODEL, **OPENAI),
    instructions=SYSTEM,
    tools=[population, add],
    db=InMemoryDb(),
    add_history_to_context=True,
    telemetry=False,
)
for question in QUESTIONS:
    answer = agent.run(question, session_id="1")
print(answer.content)

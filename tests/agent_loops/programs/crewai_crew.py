"""A CrewAI crew of one agent with two tasks."""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"
os.environ["CREWAI_TRACING_ENABLED"] = "false"

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from tasks import MODEL, OPENAI, QUESTIONS, SYSTEM, add, population

model = LLM(model=f"openai/{MODEL}", **OPENAI)
agent = Agent(
    role="counter",
    goal=SYSTEM,
    backstory="You count people.",
    llm=model,
    tools=[tool("population")(population), tool("add")(add)],
)
tasks = [Task(description=text, expected_output="A number.", agent=agent) for text in QUESTIONS]
print(Crew(agents=[agent], tasks=tasks, verbose=False).kickoff())

"""An Inspect evaluation with its ReAct agent."""

import os
import sys

os.environ["OPENAI_BASE_URL"] = os.environ["URL_OPENAI"]
os.environ["OPENAI_API_KEY"] = os.environ["KEY"]

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.tool import tool
from tasks import MODEL, QUESTIONS, SYSTEM
from tasks import add as add_numbers
from tasks import population as count


@tool
def population():
    async def execute(city: str) -> str:
        """Return the number of people in a city.

        Args:
            city: The name of the city.
        """
        return count(city)

    return execute


@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return add_numbers(a, b)

    return execute


task = Task(
    dataset=[Sample(input=QUESTIONS[0], target="1009650")],
    solver=react(prompt=SYSTEM, tools=[population(), add()]),
)
logs = eval(task, model=f"openai/{MODEL}", display="none", log_dir=os.environ["HOME"])
if logs[0].status != "success":
    sys.exit(str(logs[0].error))
print(logs[0].samples[0].output.completion)

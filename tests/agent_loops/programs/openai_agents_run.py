"""The OpenAI Agents SDK; arguments: the API (chat, responses), and `handoff` for two agents."""

import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from tasks import MODEL, OPENAI, QUESTIONS, SYSTEM, add, population

set_tracing_disabled(True)
client = AsyncOpenAI(**OPENAI)
kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
model = kinds[sys.argv[1]](MODEL, client)
counter = Agent(
    name="counter",
    instructions=SYSTEM,
    model=model,
    tools=[function_tool(population), function_tool(add)],
)
first = counter
if sys.argv[2:] == ["handoff"]:
    first = Agent(
        name="desk", instructions="Hand over to the counter.", model=model, handoffs=[counter]
    )
given = []
for question in QUESTIONS:
    result = Runner.run_sync(first, [*given, {"role": "user", "content": question}])
    given, first = result.to_input_list(), result.last_agent
print(result.final_output)

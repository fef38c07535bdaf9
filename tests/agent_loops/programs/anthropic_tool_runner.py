"""The tool runner of Anthropic's Python SDK, which continues a thread on the server."""

from anthropic import Anthropic, beta_tool
from tasks import ANTHROPIC, MODEL, QUESTIONS, SYSTEM, add, population

runner = Anthropic(**ANTHROPIC).beta.messages.tool_runner(
    model=MODEL,
    max_tokens=2000,
    system=SYSTEM,
    messages=[{"role": "user", "content": QUESTIONS[0]}],
    tools=[beta_tool(population), beta_tool(add)],
)
print(runner.until_done().content[-1].text)

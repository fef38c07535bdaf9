"""Qwen-Agent's Assistant on an OpenAI-compatible server."""

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool
from tasks import MODEL, OPENAI, QUESTIONS, SYSTEM, add, population


@register_tool("population")
class Population(BaseTool):
    """Number of people in a city."""

    description = "Return the number of people in a city."
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }

    def call(self, params, **_):
        return population(**self._verify_json_format_args(params))


@register_tool("add")
class Add(BaseTool):
    """Sum of two numbers."""

    description = "Add two numbers."
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }

    def call(self, params, **_):
        return add(**self._verify_json_format_args(params))


config = {
    "model": MODEL,
    "model_type": "oai",
    "model_server": OPENAI["base_url"],
    "api_key": OPENAI["api_key"],
    "generate_cfg": {"use_raw_api": True},
}
agent = Assistant(llm=config, system_message=SYSTEM, function_list=["population", "add"])
messages = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    *_, replies = agent.run(messages)
    messages += replies
print(messages[-1]["content"])

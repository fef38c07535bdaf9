"""An agent on openai-agents: one shell tool, the SDK's own loop, Responses or Chat Completions.

`python openai_agents_agent.py CONFIG < INSTRUCTION`; endpoint and key come from OPENAI_BASE_URL and
OPENAI_API_KEY. Exit codes: 0 done, 3 turn limit, 4 the model's API failed, 1 anything else.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    AgentsException,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.mcp import MCPServer, MCPServerSse, MCPServerStdio, MCPServerStreamableHttp
from openai import APIError, AsyncOpenAI
from shell_agent import bash


def server(config: dict[str, Any]) -> MCPServer:
    """Return one MCP server (`config`) as an object of the SDK."""
    if config["transport"] == "stdio":
        process = {"command": config["command"], "args": config["args"], "env": config["env"]}
        return MCPServerStdio(process, name=config["name"], client_session_timeout_seconds=60)
    address = {"url": config["url"], "headers": config["headers"]}
    kind = MCPServerSse if config["transport"] == "sse" else MCPServerStreamableHttp
    return kind(address, name=config["name"], client_session_timeout_seconds=60)


async def run(config: dict[str, Any], instruction: str) -> str:
    """Let the agent do the task; returns its last message."""
    set_tracing_disabled(disabled=True)
    client = AsyncOpenAI(timeout=config["timeout_s"])
    chat = config["api"] == "openai_chat"
    kind = OpenAIChatCompletionsModel if chat else OpenAIResponsesModel
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server(one)) for one in config["mcp_servers"]]
        agent = Agent(
            name="agent",
            instructions=config["instructions"],
            model=kind(model=config["model"], openai_client=client),
            tools=[function_tool(bash)],
            mcp_servers=servers,
            # Two servers may have tools of one name, which ends the run otherwise.
            mcp_config={"include_server_in_tool_names": True},
        )
        if not config["stream"]:
            return str(
                (await Runner.run(agent, instruction, max_turns=config["max_turns"])).final_output
            )
        result = Runner.run_streamed(agent, instruction, max_turns=config["max_turns"])
        async for _ in result.stream_events():
            pass
        return str(result.final_output)


def main() -> int:
    """Run the agent on the instruction from stdin and print its last message; exit with 0, 3 at the
    turn limit, 4 for a failed model call, or 1.
    """
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        print(asyncio.run(run(config, sys.stdin.read())))
    except MaxTurnsExceeded as error:
        print(f"turn limit: {error}", file=sys.stderr)
        return 3
    except (APIError, AgentsException) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 4 if isinstance(error, APIError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

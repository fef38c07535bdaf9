"""An agent on google-adk: one shell tool, the SDK's own loop, generateContent.

`python google_adk_agent.py CONFIG < INSTRUCTION`; endpoint and key come from GOOGLE_GEMINI_BASE_URL
and GOOGLE_API_KEY. Exit codes: 0 done, 3 limit of calls, 4 the model's API failed, 1 anything else.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner
from google.adk.skills import load_skill_from_dir
from google.adk.tools.mcp_tool.mcp_session_manager import (
    SseConnectionParams,
    StdioConnectionParams,
    StreamableHTTPConnectionParams,
)
from google.adk.tools.mcp_tool.mcp_toolset import McpToolset
from google.adk.tools.skill_toolset import SkillDiscoveryMode, SkillToolset
from google.genai import errors, types
from mcp import StdioServerParameters
from shell_agent import bash


def toolset(config: dict[str, Any]) -> McpToolset:
    """Return the tools of one MCP server (`config`) as the SDK's toolset, named after the
    server.
    """
    params: StdioConnectionParams | SseConnectionParams | StreamableHTTPConnectionParams
    if config["transport"] == "stdio":
        process = StdioServerParameters(
            command=config["command"], args=config["args"], env=config["env"] or None
        )
        params = StdioConnectionParams(server_params=process, timeout=60)
    elif config["transport"] == "sse":
        params = SseConnectionParams(url=config["url"], headers=config["headers"])
    else:
        params = StreamableHTTPConnectionParams(url=config["url"], headers=config["headers"])
    return McpToolset(connection_params=params, tool_name_prefix=config["name"])


async def run(config: dict[str, Any], instruction: str) -> str:
    """Let the agent do the task; returns its last message."""
    tools: list[Any] = [bash, *map(toolset, config["mcp_servers"])]
    if config["skills"]:
        skills = [load_skill_from_dir(Path(one)) for one in config["skills"]]
        tools.append(SkillToolset(skills, discovery_mode=SkillDiscoveryMode.EAGER))
    base_url = os.environ["GOOGLE_GEMINI_BASE_URL"]
    agent = LlmAgent(
        name="agent",
        model=Gemini(model=config["model"], base_url=base_url),
        instruction=config["instructions"],
        tools=tools,
    )
    runner = InMemoryRunner(agent=agent, app_name="agent")
    session = await runner.session_service.create_session(app_name="agent", user_id="user")
    streaming = StreamingMode.SSE if config["stream"] else StreamingMode.NONE
    text = ""
    events = runner.run_async(
        user_id="user",
        session_id=session.id,
        new_message=types.Content(role="user", parts=[types.Part(text=instruction)]),
        run_config=RunConfig(max_llm_calls=config["max_turns"], streaming_mode=streaming),
    )
    async for event in events:
        if event.error_code:
            print(f"error: {event.error_code} {event.error_message}", file=sys.stderr)
        if event.is_final_response() and event.content and event.content.parts:
            text = "".join(part.text or "" for part in event.content.parts)
    await runner.close()
    return text


def main() -> int:
    """Run the agent on the instruction from stdin and print its last message; exit with 0, 3 at the
    turn limit, or 4 for a failed model call.
    """
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        print(asyncio.run(run(config, sys.stdin.read())))
    except LlmCallsLimitExceededError as error:
        print(f"turn limit: {error}", file=sys.stderr)
        return 3
    except errors.APIError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""An agent on claude-agent-sdk: Claude Code's own tools and loop, driven from Python.

`python claude_agent_sdk_agent.py CONFIG < INSTRUCTION`; endpoint and key come from
ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. Prints one JSON object per message. Exit codes: 0 done,
3 turn limit, 4 the model's API failed, 1 anything else.
"""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ProcessError, ResultMessage, query


def options(config: dict[str, Any]) -> ClaudeAgentOptions:
    """Return the SDK's options for a session: model, tools, MCP servers and turn limit of
    `config`.
    """
    return ClaudeAgentOptions(
        model=config["model"],
        permission_mode="bypassPermissions",
        system_prompt=config["instructions"] or {"type": "preset", "preset": "claude_code"},
        max_turns=config["max_turns"],
        mcp_servers=config["mcp_servers"],
        strict_mcp_config=True,
        setting_sources=["user", "project"],
        cwd=Path.cwd(),
        stderr=lambda line: print(line, file=sys.stderr),
    )


async def run(config: dict[str, Any], instruction: str) -> ResultMessage | None:
    """Let the agent do the task; returns the SDK's result, `None` if there is none."""
    result = None
    try:
        async for message in query(prompt=instruction, options=options(config)):
            print(
                json.dumps(
                    {"type": type(message).__name__, **dataclasses.asdict(message)}, default=str
                )
            )
            if isinstance(message, ResultMessage):
                result = message
    except ProcessError:
        # The CLI exits 1 after it has reported an error; the result says which.
        if result is None:
            raise
    return result


def main() -> int:
    """Run the agent on the instruction from stdin; exit with 0, 3 at the turn limit, 4 for a failed
    model call, or 1.
    """
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = asyncio.run(run(config, sys.stdin.read()))
    if result is None:
        print("the SDK ended without a result", file=sys.stderr)
        return 1
    if result.subtype == "error_max_turns":
        return 3
    if result.is_error:
        return 4 if result.subtype == "success" or result.api_error_status else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

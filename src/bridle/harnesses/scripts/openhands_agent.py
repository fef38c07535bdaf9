"""OpenHands' default agent, run through its SDK: its own prompt, tools and loop.

`python openhands_agent.py CONFIG < INSTRUCTION`; the key comes from LLM_API_KEY. Exit codes: 0
done, 3 limit of steps, 4 the model's API failed, 1 anything else.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, AgentContext, Conversation
from openhands.sdk.conversation.exceptions import ConversationRunError
from openhands.sdk.conversation.state import ConversationExecutionStatus
from openhands.sdk.event import Event
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.mcp.config import MCPServer
from openhands.tools.preset.default import get_default_agent
from pydantic import SecretStr, TypeAdapter


def show(event: Event) -> None:
    """Print one event as a line of JSON."""
    print(event.model_dump_json(), flush=True)


def run(config: dict[str, Any], instruction: str) -> int:
    """Let the agent do the task; returns the exit code of the process."""
    errors: list[ConversationErrorEvent] = []

    def watch(event: Event) -> None:
        show(event)
        if isinstance(event, ConversationErrorEvent):
            errors.append(event)

    llm = LLM(
        model=config["model"],
        base_url=config["base_url"],
        api_key=SecretStr(os.environ["LLM_API_KEY"]),
        usage_id="agent",
        timeout=config["timeout_s"],
        max_input_tokens=config["max_input_tokens"],
        max_output_tokens=config["max_output_tokens"],
        native_tool_calling=config["native_tool_calling"],
        **config["llm"],
    )
    servers: TypeAdapter[Any] = TypeAdapter(dict[str, MCPServer])
    agent = get_default_agent(llm=llm, cli_mode=True).model_copy(
        update={
            "mcp_config": servers.validate_python(config["mcp_servers"]),
            "agent_context": AgentContext(load_user_skills=True, load_project_skills=True),
        }
    )
    conversation = Conversation(
        agent=agent,
        workspace=str(Path.cwd()),
        callbacks=[watch],
        visualizer=None,
        max_iteration_per_run=config["max_turns"],
    )
    try:
        conversation.send_message(instruction)
        conversation.run()
        status = conversation.state.execution_status
    except ConversationRunError as error:
        print(error, file=sys.stderr)
        return 4
    finally:
        conversation.close()
    if status == ConversationExecutionStatus.FINISHED:
        return 0
    print(f"ended as {status.value}: {[error.code for error in errors]}", file=sys.stderr)
    limit = any("iteration" in error.code.lower() for error in errors)
    return 3 if limit else 1


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.exit(run(settings, sys.stdin.read()))

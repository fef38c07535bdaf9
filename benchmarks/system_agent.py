"""The light script harness with a system message before the task: another prompt, the same tool."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bridle.types import JSON
from examples.demo import light_agent

SYSTEM = {"role": "system", "content": "You are a helpful assistant that can read files."}

plainly = light_agent.ask


def ask(base_url: str, key: str, body: JSON) -> JSON:
    """One chat completion, as `light_agent.ask`."""
    return plainly(base_url, key, {**body, "messages": [SYSTEM, *body["messages"]]})


if __name__ == "__main__":
    light_agent.ask = ask
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    answer = light_agent.run(url, key, "bridle-policy", sys.argv[1], Path.cwd())
    Path("answer.txt").write_text(answer.strip() + "\n")

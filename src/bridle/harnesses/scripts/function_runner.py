"""Calls a Python function as a harness: `python function_runner.py CONFIG`.

The function gets one `FunctionTask`; it may be async. What it returns is printed, text as it is and
anything else as JSON. Exit codes are Python's own: 0 returned, 1 raised, or what it exits with.
The key comes from OPENAI_API_KEY. Runs inside the sandbox; it knows nothing of Bridle.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

MODULES = "modules"
"""Folder of the function's own modules, next to the configuration."""


@dataclass(frozen=True)
class FunctionTask:
    """Argument of the user's function."""

    instruction: str
    base_urls: dict[str, str]
    """`openai`, `anthropic`, `google` -> what the provider's SDK takes as its base URL."""
    key: str
    """The session's key, for all of them."""
    model: str
    workdir: str
    """The work folder; also the current one."""
    session_id: str
    task_id: str
    sample_index: int
    context_length: int
    """Tokens that the model takes in and gives out together."""


async def _waited(result: Awaitable[object]) -> object:
    return await result


def main() -> None:
    """Call the Python function that the configuration file names, and print its result."""
    config_file = Path(sys.argv[1])
    config = json.loads(config_file.read_text(encoding="utf-8"))
    sys.path.insert(0, str(config_file.parent / MODULES))
    function = getattr(importlib.import_module(config["module"]), config["name"])
    result: object = function(FunctionTask(key=os.environ["OPENAI_API_KEY"], **config["task"]))
    if inspect.isawaitable(result):
        result = asyncio.run(_waited(result))
    if result is not None:
        print(result if isinstance(result, str) else json.dumps(result, default=str))


if __name__ == "__main__":
    main()

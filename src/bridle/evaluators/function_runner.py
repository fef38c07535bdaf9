"""Calls a scoring function: `python function_runner.py module:name`, the session as JSON on stdin.

The last line on stdout is what it returned, as JSON; what it prints goes to stderr. The function
may be async. Runs on the operator's machine, in a process of its own; it knows nothing of Bridle.
"""

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Awaitable
from contextlib import redirect_stdout
from typing import Any


class Attempt(dict[str, Any]):
    """A session to be scored: its fields as attributes, and as the members of a mapping."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - each field has its own type
        try:
            return self[name]
        except KeyError:
            message = f"an attempt has no {name!r}; it has {', '.join(self)}"
            raise AttributeError(message) from None


async def _waited(result: Awaitable[object]) -> object:
    return await result


def main() -> None:
    """Call the function that the command line names and write what it returns."""
    module, _, name = sys.argv[1].partition(":")
    with redirect_stdout(sys.stderr):
        session = Attempt(json.load(sys.stdin))
        result: object = getattr(importlib.import_module(module), name)(session)
        if inspect.isawaitable(result):
            result = asyncio.run(_waited(result))
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()

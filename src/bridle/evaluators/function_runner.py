"""Calls a scoring function: `python function_runner.py module:name`, the session as JSON on stdin.

The returned value goes to stdout as JSON; what the function prints, and what programs print that it
runs, goes to stderr. The function may be async. With `--check` it is imported and its signature
checked, and nothing is called. Runs on the operator's machine, in a process of its own; it knows
nothing of Bridle.
"""

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORTS = "BRIDLE_IMPORTS_SCORER"
"""Environment variable that is set while a scorer's file is imported."""


class ScorerError(Exception):
    """A scoring function that cannot be called; the text names its file, its name and the fault."""


class Attempt(dict[str, Any]):
    """A session to be scored: its fields as attributes, and as the members of a mapping."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - each field has its own type
        try:
            return self[name]
        except KeyError:
            message = f"an attempt has no {name!r}; it has {', '.join(self)}"
            raise AttributeError(message) from None


def load_scorer(path: str) -> Callable[[Attempt], Any]:
    """Import the function that `module:name` or `file.py:name` names. Raises `ScorerError`."""
    module, _, name = path.rpartition(":")
    if not module:
        message = f"{path!r} names no function: give package.module:name or file.py:name"
        raise ScorerError(message)
    if module.endswith(".py") and not Path(module).is_file():
        message = f"there is no file {module}"
        raise ScorerError(message)
    os.environ[IMPORTS] = path
    try:
        found = (
            _of_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
        )
    except (Exception, SystemExit) as error:
        message = f"{module} cannot be imported: {type(error).__name__}: {error}"
        raise ScorerError(message) from error
    finally:
        os.environ.pop(IMPORTS)
    where = found.__file__ or module
    function = getattr(found, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [one for one in vars(found) if one[0] != "_"], 1)
        message = f"{where} has no function {name!r}"
        raise ScorerError(message + (f"; did you mean {close[0]!r}?" if close else ""))
    check_argument(function, f"{where}: {name}", "the attempt")
    return function  # type: ignore[no-any-return]  # it is callable


def check_argument(function: Callable[..., Any], name: str, argument: str) -> None:
    """Raise `ScorerError` unless a function can be called with one argument.

    The message has the function's `name` and says what the `argument` is.
    """
    signature: object = ""
    try:
        signature = inspect.signature(function)
        signature.bind(None)
    except ValueError:  # a builtin without a signature
        pass
    except TypeError as error:
        message = f"{name}{signature} must take one argument, {argument}: {error}"
        raise ScorerError(message) from None


def returned_json(returned: object) -> str:
    """Return a scoring function's return value as JSON; scalars of numpy and torch are numbers."""
    return json.dumps(returned, default=_scalar)


def _scalar(value: Any) -> object:  # noqa: ANN401 - of any package
    if hasattr(value, "item"):
        return value.item()
    message = f"{value!r} of type {type(value).__name__} is not JSON"
    raise TypeError(message)


def _of_file(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent.absolute()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


async def _waited(result: Awaitable[object]) -> object:
    return await result


def main() -> None:
    """Call the scoring function that the command line names, and write its return value as JSON."""
    path, *check = sys.argv[1:]
    # Programs that the function runs get no way to what is read as its value.
    output = os.dup(1)
    os.dup2(2, 1)
    with redirect_stdout(sys.stderr):
        try:
            function = load_scorer(path)
        except ScorerError as error:
            sys.exit(str(error))
        result: object = None
        if not check:
            result = function(Attempt(json.load(sys.stdin)))
        if inspect.isawaitable(result):
            result = asyncio.run(_waited(result))
    with os.fdopen(output, "w") as value:
        value.write(returned_json(result))


if __name__ == "__main__":
    main()

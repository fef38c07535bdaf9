"""The command line (`python -m bridle.cli`, `bridle`): all verbs, and errors as one line with an
exit code.
"""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from bridle import __version__
from bridle.cli.terminal import Plain, log_to_stderr, notes
from bridle.errors import BridleError, ConfigError, install_extra
from bridle.folders import FULL

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

EXTRAS = {
    "asyncpg": "postgres", "matplotlib": "train", "ray": "ray", "swerex": "remote",
    "torch": "embedded", "trl": "trl",
}  # fmt: skip
"""Extra that installs each optional package."""

EVERYWHERE = frozenset({"-q", "--quiet", "-v", "--verbose"})
"""Options of `bridle` that may also stand behind a verb."""

VERBS: Final = (
    *("demo", "run", "show", "rebuild", "score", "certify", "fork", "teach", "export", "generate"),
    *("train", "dashboard", "doctor", "gateway", "serve", "submit", "status", "watch", "cancel"),
    *("engine", "init", "harness", "tasks"),
)

FILES: Final = {
    **dict.fromkeys(("submit", "status", "watch", "cancel"), "client"),
    "certify": "doctor",
    "dashboard": "serve",
    "demo": "init",
    "fork": "run",
    "rebuild": "export",
    "generate": "export",
    "engine": "gateway",
    "teach": "score",
}
"""File of each verb that is not in the file of its own name."""


ClickContext: TypeAlias = Any
ClickCommand: TypeAlias = Any
"""Of click, or of the copy of it that newer versions of typer have."""


class Verbs(TyperGroup):
    """The verbs. Calling one loads its file; a list of all reads their files, and loads none."""

    def list_commands(self, ctx: ClickContext) -> list[str]:
        """Return the names of all verbs in the order of the help."""
        del ctx
        return list(VERBS)

    def get_command(self, ctx: ClickContext, cmd_name: str) -> ClickCommand:
        """Return a verb with its name and help text, for the list of verbs, without importing its
        file.
        """
        if cmd_name not in VERBS:
            return super().get_command(ctx, cmd_name)
        return TyperCommand(cmd_name, help=_functions(FILES.get(cmd_name, cmd_name))[cmd_name])

    def resolve_command(
        self, ctx: ClickContext, args: list[str]
    ) -> tuple[str | None, ClickCommand | None, list[str]]:
        """Return the verb that the arguments name, its file imported, and the remaining
        arguments.
        """
        if args[0] not in VERBS:
            # From these, typer suggests one for a misspelt verb.
            self.commands.update({verb: self.get_command(ctx, verb) for verb in VERBS})
            return super().resolve_command(ctx, args)
        return args[0], load(args[0]), args[1:]


def load(verb: str) -> ClickCommand:
    """Import the file of a command-line verb (`run`, `show`, ...) and return its command."""
    module = import_module(f"bridle.cli.{FILES.get(verb, verb)}")
    own: typer.Typer | None = getattr(module, "app", None)
    if own is None:
        own = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
        )
        own.command(verb)(getattr(module, verb))
    return typer.main.get_command(own)


@cache
def _functions(file: str) -> dict[str, str | None]:
    """Return the docstrings of a file's functions, without loading it."""
    tree = ast.parse(Path(__file__).with_name(f"{file}.py").read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name: ast.get_docstring(node) for node in functions}


app = typer.Typer(
    name="bridle",
    cls=Verbs,
    help="Reinforcement learning for language agents through their own, unmodified harness.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bridle {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(  # noqa: ARG001 - its callback acts
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print no progress and notes."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Print tracebacks of errors."),
) -> None:
    """Reinforcement learning for language agents through their own, unmodified harness."""
    notes.quiet, notes.verbose = quiet, verbose
    if context.invoked_subcommand != "show":  # it logs nothing and must start fast
        log_to_stderr("warning" if quiet else "info")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends by `SystemExit` with a documented code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = given[: given.index("--")] if "--" in given else given
    everywhere = [one for one in options if one in EVERYWHERE]
    words = [*everywhere, *(one for one in options if one not in EVERYWHERE)]
    try:
        code = app(args=[*words, *given[len(options) :]], prog_name="bridle", standalone_mode=False)
        if code == INTERRUPTED:
            code = _fail("interrupted; what was captured is kept", INTERRUPTED)
    except KeyboardInterrupt:
        code = _fail("interrupted; what was captured is kept", INTERRUPTED)
    except BrokenPipeError:
        code = 0
    except Exception as error:
        explained = _explain(error)
        if explained is None:
            raise
        if notes.verbose:
            traceback.print_exception(error)
        code = _fail(*explained)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> tuple[str, int] | None:
    """Return the message and exit code of an expected error; `None` = a bug."""
    match error:
        case ConfigError():
            return str(error), 2
        case BridleError():
            return str(error), 3
        case ModuleNotFoundError() if error.name in EXTRAS:
            command = install_extra(EXTRAS[error.name])
            return f"this needs the package {error.name}, which is missing: run {command}", 3
        case OSError() if error.filename is not None or error.errno in FULL:
            return f"{error.filename or 'the disk'}: {error.strerror}", 3  # a write has no name
    if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # typer's
        return error.format_message().replace("Value error, ", ""), 2
    return None


def _fail(message: str, code: int) -> int:
    if message:  # a group of verbs that is given alone has printed its help
        text = Text.assemble(("bridle:", "bold red"), f" {message}")
        Plain(stderr=True).print(text, highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    main()

"""The command line: all verbs, and errors as one line with an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer
from rich.text import Text

from bridle import __version__
from bridle.cli import (
    certify,
    client,
    dashboard,
    doctor,
    export,
    gateway,
    harness,
    init,
    run,
    score,
    serve,
    show,
    tasks,
    teach,
    train,
)
from bridle.cli.output import Plain, log_to_stderr, notes
from bridle.errors import BridleError, ConfigError, install_extra

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

EXTRAS = {
    "asyncpg": "postgres", "matplotlib": "train", "ray": "ray", "swerex": "remote",
    "torch": "embedded", "trl": "trl",
}  # fmt: skip
"""Extra that installs each optional package."""

EVERYWHERE = frozenset({"-q", "--quiet", "-v", "--verbose"})
"""Options of `bridle` that may also stand behind a verb."""

app = typer.Typer(
    name="bridle",
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


for verb in (
    *(init.demo, run.run, show.show, export.rebuild, score.score, certify.certify),
    *(run.fork, teach.teach),
    *(export.export, export.generate, train.train, dashboard.dashboard, doctor.doctor),
    *(gateway.gateway, serve.serve, client.submit, client.status, client.watch, client.cancel),
    *(gateway.engine, init.init),
):
    app.command(verb.__name__)(verb)
app.add_typer(harness.app, name="harness")
app.add_typer(tasks.app, name="tasks")


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
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror}", 3
    if hasattr(error, "exit_code") and hasattr(error, "format_message"):  # typer's
        return error.format_message(), 2
    return None


def _fail(message: str, code: int) -> int:
    text = Text.assemble(("bridle:", "bold red"), f" {message}")
    Plain(stderr=True).print(text, highlight=False, soft_wrap=True)
    return code

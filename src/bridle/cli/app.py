"""Assembles the verbs and turns errors into one clear line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from rich.console import Console

from bridle import __version__
from bridle.cli import (
    cancel,
    dashboard,
    demo,
    doctor,
    engine,
    export,
    gateway,
    generate,
    harness,
    init,
    rebuild,
    run,
    serve,
    show,
    status,
    submit,
    train,
    watch,
)
from bridle.cli.output import log_to_stderr
from bridle.errors import BridleError, ConfigError

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

app = typer.Typer(
    name="bridle",
    help="Reinforcement learning for language agents through their own, unmodified harness.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bridle {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(  # noqa: ARG001 - its callback acts
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Reinforcement learning for language agents through their own, unmodified harness."""
    log_to_stderr()


app.command("demo")(demo.demo)
app.command("run")(run.run)
app.command("show")(show.show)
app.command("rebuild")(rebuild.rebuild)
app.command("export")(export.export)
app.command("generate")(generate.generate)
app.command("train")(train.train)
app.command("dashboard")(dashboard.dashboard)
app.command("doctor")(doctor.doctor)
app.command("gateway")(gateway.gateway)
app.command("serve")(serve.serve)
app.command("submit")(submit.submit)
app.command("status")(status.status)
app.command("watch")(watch.watch)
app.command("cancel")(cancel.cancel)
app.command("engine")(engine.engine)
app.command("init")(init.init)
app.add_typer(harness.app, name="harness")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends by `SystemExit` with a documented code."""
    try:
        code = app(args=arguments, prog_name="bridle", standalone_mode=False)
        if code == INTERRUPTED:
            code = _fail("interrupted; what was captured is kept", INTERRUPTED)
    except KeyboardInterrupt:
        code = _fail("interrupted; what was captured is kept", INTERRUPTED)
    except ConfigError as error:
        code = _fail(str(error), 2)
    except BridleError as error:
        code = _fail(str(error), 3)
    except BrokenPipeError:
        code = 0
    except Exception as error:
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            raise
        code = _fail(error.format_message(), 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        f"[bold red]bridle:[/] {_escape(message)}"
    )
    return code


def _escape(text: str) -> str:
    return text.replace("[", r"\[")

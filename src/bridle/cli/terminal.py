"""The terminal of all verbs: shared flags, output, and checks of the paths that flags name.

Groups of flags are dataclasses. Output is tables, progress and JSON.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import orjson
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from bridle.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from bridle.cli.config import FileConfig

EnginesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        help="URL of a vLLM server, embedded:DIR or scripted:FILE; once for each replica.",
    ),
]
UntokenizedOption: TypeAlias = Annotated[
    bool | None, typer.Option(help="Serve an engine without token ids: text only, no training.")
]
Streaming: TypeAlias = Literal["live", "whole"]
StreamOption = Annotated[
    Streaming | None,
    typer.Option(help="Send streamed replies as they are sampled (live) or when committed."),
]
Rendering: TypeAlias = Literal["renderer", "engine"]
PromptOption = Annotated[
    Rendering | None,
    typer.Option(help="What renders the first prompt: Bridle or the engine's chat template."),
]
HarnessOption = Annotated[
    str | None, typer.Option(help="Run all tasks with this harness instead of their own.")
]
RuntimeOption = Annotated[
    str | None, typer.Option(help="auto, bubblewrap, docker or local, for all tasks.")
]
ConcurrencyOption = Annotated[
    int | None, typer.Option(min=1, help="Harnesses running at once; default: twice the cores.")
]
SamplesOption = Annotated[
    int | None, typer.Option(min=1, help="Sessions per task instead of its own number.")
]
FirstOption = Annotated[int | None, typer.Option(min=1, help="Only the first N tasks.")]
VerifiedOption = Annotated[
    Path | None,
    typer.Option("--verified", help="Manifest of `bridle tasks verify` that must list all tasks."),
]
TelemetryOption = Annotated[
    str | None,
    typer.Option(help="Trackers, by comma: wandb, mlflow, tensorboard, trackio, otel."),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Host name of requests to allow, besides localhost and addresses; repeatable.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TasksArgument = Annotated[
    Path,
    typer.Argument(
        help="Task file or folder, a set of a Harbor registry (FILE.json:NAME@VERSION), or a set "
        "on the hub (hf://datasets/ORG/NAME)."
    ),
]
CaptureArgument = Annotated[
    Path, typer.Argument(help="Run folder, a gateway's data folder, or a capture file.")
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Flags that name the engines: by themselves or in a config file."""

    engine: EnginesOption = None
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with engines, routing, models, gateway; flags come first."),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer folder, hub id or 'builtin'; default: the engine's own, if it has one."
        ),
    ] = None

    def load(self, **tables: Any) -> FileConfig:  # noqa: ANN401 - as `load_config` takes them
        """Return the config with these flags and `tables` in place of its own values."""
        from bridle.cli.config import load_config

        return load_config(
            self.config, engines=self.engine or (), tokenizer=self.tokenizer, **tables
        )


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that a parameter of a dataclass type becomes a flag for each field.

    The command gets the dataclass. Its fields are annotated as parameters of a command are.
    """
    groups: dict[str, tuple[type, list[str]]] = {}
    flags: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            flags.append(parameter)
            continue
        assert isinstance(kind, type)
        fields = inspect.signature(kind, eval_str=True).parameters
        groups[parameter.name] = (kind, list(fields))
        flags += fields.values()

    @functools.wraps(command)
    def wrapper(**given: object) -> None:
        for name, (kind, fields) in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in fields})
        command(**given)

    signature = inspect.Signature([flag.replace(kind=flag.KEYWORD_ONLY) for flag in flags])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    return wrapper


_FITTED = sys.stdout.isatty() or "COLUMNS" in os.environ

CONTROLS: Final = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\t\n\r"
}
"""Control characters, which a terminal would obey if they stood in an agent's text."""


class Plain(Console):
    """Console that replaces the control characters of texts."""

    verbose = False
    """Print the traceback of an error that is a user's mistake."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - as `Console` takes them
        super().__init__(**options)
        if self.width < 1:  # COLUMNS=0, with which nothing would be printed
            self.width = 80

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render with control characters in texts replaced; the console's own ones stay."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else text.translate(CONTROLS), style, control)


console = Plain(highlight=False, markup=False, emoji=False, width=None if _FITTED else 160)
"""Console for results. Text is printed unchanged: `[x]` and `:x:` have no meaning."""

_IN_JUPYTER = None if find_spec("ipywidgets") else False
"""`None` = in a notebook a progress display is a widget; without ipywidgets Rich would warn."""

notes = Plain(
    stderr=True,
    highlight=False,
    markup=False,
    emoji=False,
    force_jupyter=_IN_JUPYTER,
    soft_wrap=not sys.stderr.isatty(),
)
"""Console for progress and notes, on stderr, so that a pipe gets results only."""


def _shown(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace the control characters in the texts of a log line."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = value.translate(CONTROLS)
    return event


def log_to_stderr(level: str = "info") -> None:
    """Write the library's log lines from `level` on to stderr; stdout is for results."""
    import structlog

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _shown,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        # Looked up for each line: a progress display replaces the stream.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def print_json(value: object) -> None:
    """Print `value` as one JSON document on stdout."""
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")


def print_json_line(value: object) -> None:
    """Print `value` as one line of JSON and flush it, for a program that waits for it."""
    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table to print; columns whose name begins with `#` are aligned right."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        made.add_column(
            column.lstrip("#"),
            justify="right" if column.startswith("#") else "left",
            overflow="fold",
        )
    for row in rows:
        made.add_row(*("" if cell is None else str(cell) for cell in row))
    return made


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table whose first column holds ids; if it is too wide, two lines per row.

    Ids are never folded or truncated, because the next command needs them.
    """
    rows = list(rows)
    made = table(title, columns, rows)
    wide = console.options.update(max_width=100_000)
    if console.measure(made, options=wide).maximum <= console.width:
        console.print(made)
        return
    console.print(title, style="bold")
    names = [column.lstrip("#") for column in columns]
    for first, *cells in rows:
        named = zip(names[1:], cells, strict=True)
        shown = (f"{name} {cell}" for name, cell in named if cell not in ("", None))
        console.print(f"{first}\n  {'  '.join(shown)}", soft_wrap=True)


def progress() -> Progress:
    """Return a progress display on stderr; on a pipe it prints its last state only."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=notes,
        transient=False,
    )


def number(value: float | None, digits: int = 2) -> str:
    """Format a number for a table; `None` is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def check_folder(path: Path, flag: str) -> Path:
    """Return the folder that a flag names; `ConfigError` if it is not writable and cannot be
    created.
    """
    existing = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    if not existing.is_dir():
        raise ConfigError(f"{flag} {path}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: {existing} cannot be written; name another folder")
    return path


def check_storage(url: str, flag: str) -> None:
    """Raise `ConfigError` if the URL's storage has no driver; opens no connection."""
    import fsspec

    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{flag} {url}: this kind of storage cannot be used: {error}") from error


def check_file(path: Path, flag: str) -> Path:
    """Return the file that a flag names; `ConfigError` if it cannot be written."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file")
    if path.exists() and not path.is_file():  # as /dev/stdout, which the file would replace
        raise ConfigError(f"{flag} {path} is a device or a pipe; name a file")
    check_folder(path.parent, flag)
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written; name another file")
    return path

"""Flags that several verbs have, and groups of flags as dataclasses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

if TYPE_CHECKING:
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
        """Load the config with these flags and `tables` in place of its own values."""
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

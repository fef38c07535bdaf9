"""`bridle gateway`: only the model API, with sessions over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from bridle.cli.output import notes
from bridle.cli.serving import Stop, long_running, run_until_signal

if TYPE_CHECKING:
    from bridle.cli.config import FileConfig

EnginesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        help="URL of a vLLM server, embedded:DIR or scripted:FILE; once for each replica.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(help="TOML file with engines, routing, models, gateway; flags come first."),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="Tokenizer folder or 'builtin'; the engine's own where it has one."),
]
Streaming: TypeAlias = Literal["live", "whole"]
StreamOption = Annotated[
    Streaming | None,
    typer.Option(help="Streamed replies leave as they are sampled (live) or when committed."),
]
Rendering: TypeAlias = Literal["renderer", "engine"]
PromptOption = Annotated[
    Rendering | None,
    typer.Option(help="Who renders where a conversation begins: Bridle or the engine's template."),
]


PORT = 8100
"""Of the model API, where nothing else is said."""


def gateway(  # noqa: PLR0913 - one parameter per flag
    engine: EnginesOption = None,
    config: ConfigOption = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the model API; 0 takes a free one. [8100]")
    ] = None,
    data: Annotated[Path, typer.Option(help="Folder for capture and the control token.")] = Path(
        "runs/gateway"
    ),
    tokenizer: TokenizerOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    stream: StreamOption = None,
    prompt: PromptOption = None,
    control_port: Annotated[
        int | None, typer.Option(help="A listener of their own for the control routes.")
    ] = None,
    fsync: Annotated[
        bool, typer.Option("--fsync", help="Survive power loss too, not only kill -9.")
    ] = False,
    allow_untokenized: Annotated[
        bool | None,
        typer.Option(help="Serve an engine that gives no ids: text only, no training."),
    ] = None,
) -> None:
    """Serve the model API until Ctrl-C; sessions are opened over HTTP."""
    from bridle.cli.config import load_config

    flags = {
        "host": host,
        "port": port,
        "control_port": control_port,
        "data_dir": data,
        "stream": stream,
        "prompt": prompt,
        "allow_untokenized": allow_untokenized,
    }
    loaded = load_config(config, engines=engine or (), tokenizer=tokenizer, gateway=flags)
    data.mkdir(parents=True, exist_ok=True)
    run_until_signal(lambda stop: _serve(loaded, data, fsync, stop))


async def _serve(config: FileConfig, data: Path, fsync: bool, stop: Stop) -> None:
    from bridle.capture.sqlite import SqliteStore
    from bridle.cli.parts import open_all
    from bridle.gateway.app import Gateway

    settings = config.gateway
    if "port" not in settings.model_fields_set:
        settings = settings.model_copy(update={"port": PORT})
    parts = open_all(config)
    async with (
        await SqliteStore.open(data / "capture.sqlite", fsync="group" if fsync else "off") as store,
        Gateway(
            engine=parts.engine,
            renderer=parts.renderer,
            store=store,
            settings=settings,
            models=parts.models,
        ) as served,
    ):
        notes.print(f"model API at {served.url}, control routes at {served.control_url}")
        notes.print(f"capture in {store.path}; control token in {data / 'control.token'}")
        with long_running():
            await stop.wait()

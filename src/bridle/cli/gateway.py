"""`bridle gateway`: only the model API, with sessions over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from bridle.cli.output import notes
from bridle.cli.serving import Stop, run_until_signal

EngineOption = Annotated[
    str, typer.Option(help="URL of a vLLM server, embedded:DIR or scripted:FILE.")
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="Tokenizer folder or 'builtin'; the engine's own where it has one."),
]
Streaming: TypeAlias = Literal["live", "whole"]
StreamOption = Annotated[
    Streaming,
    typer.Option(help="Streamed replies leave as they are sampled (live) or when committed."),
]


def gateway(  # noqa: PLR0913 - one parameter per flag
    engine: EngineOption,
    port: Annotated[int, typer.Option(help="Port of the model API; 0 takes a free one.")] = 8100,
    data: Annotated[Path, typer.Option(help="Folder for capture and the control token.")] = Path(
        "runs/gateway"
    ),
    tokenizer: TokenizerOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    stream: StreamOption = "whole",
    control_port: Annotated[
        int | None, typer.Option(help="A listener of their own for the control routes.")
    ] = None,
    fsync: Annotated[
        bool, typer.Option("--fsync", help="Survive power loss too, not only kill -9.")
    ] = False,
    allow_untokenized: Annotated[
        bool, typer.Option(help="Serve an engine that gives no ids: text only, no training.")
    ] = False,
) -> None:
    """Serve the model API until Ctrl-C; sessions are opened over HTTP."""
    from bridle.gateway.settings import GatewaySettings

    data.mkdir(parents=True, exist_ok=True)
    settings = GatewaySettings(
        host=host,
        port=port,
        control_port=control_port,
        data_dir=data,
        stream=stream,
        allow_untokenized=allow_untokenized,
    )
    run_until_signal(lambda stop: _serve(engine, tokenizer, settings, data, fsync, stop))


async def _serve(
    spec: str, tokenizer: str | None, settings: object, data: Path, fsync: bool, stop: Stop
) -> None:
    from bridle.capture.sqlite import SqliteStore
    from bridle.cli.parts import open_parts
    from bridle.gateway.app import Gateway
    from bridle.gateway.settings import GatewaySettings

    assert isinstance(settings, GatewaySettings)
    engine, renderer = open_parts(spec, tokenizer)
    async with (
        await SqliteStore.open(data / "capture.sqlite", fsync="group" if fsync else "off") as store,
        Gateway(engine=engine, renderer=renderer, store=store, settings=settings) as served,
    ):
        notes.print(f"model API at {served.url}, control routes at {served.control_url}")
        notes.print(f"capture in {store.path}; control token in {data / 'control.token'}")
        await stop.wait()

"""`bridle engine`: serves an engine over HTTP, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated

import typer

from bridle.cli.output import notes
from bridle.cli.serving import Stop, run_until_signal


def engine(
    spec: Annotated[str, typer.Argument(help="scripted:FILE or embedded:DIR.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer folder or 'builtin'.")] = None,
) -> None:
    """Serve an engine over HTTP until Ctrl-C."""
    run_until_signal(lambda stop: _serve(spec, port, host, tokenizer, stop))


async def _serve(spec: str, port: int, host: str, tokenizer: str | None, stop: Stop) -> None:
    from bridle.engines import open_engine
    from bridle.scripted.server import EngineServer

    served = open_engine(spec, tokenizer=tokenizer)
    async with EngineServer(served, tokenizer=tokenizer, host=host, port=port) as server:
        notes.print(f"engine {server.info.model} at {server.url}; Ctrl-C ends it")
        await stop.wait()

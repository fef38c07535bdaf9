"""Checks of `bridle doctor --engine` beyond the probe: its text and logprobs compared with ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bridle.errors import BridleError, install_extra

if TYPE_CHECKING:
    from bridle.engines.base import Engine, EngineInfo
    from bridle.engines.compare import Render, Score
    from bridle.engines.probe import Finding
    from bridle.prompting.renderer import PromptRenderer
    from bridle.types import Ids

SAID = [{"role": "user", "content": "Say anything."}]
"""The conversation under which logprobs are sampled."""


async def compare(
    engine: Engine, info: EngineInfo, tokenizer: str | None, *, logprobs: bool
) -> AsyncIterator[Finding]:
    """Findings on a started engine, by `tokenizer` or its own.

    With `logprobs` also a plain forward pass of the model's folder, which must be on this machine.
    """
    import numpy as np

    from bridle.engines.compare import compare_rendering, compare_template, compare_vocabulary
    from bridle.engines.probe import Finding
    from bridle.engines.vllm import VllmEngine
    from bridle.prompting.renderer import load_renderer

    if isinstance(engine, VllmEngine):
        yield await engine.parsers()
    source = tokenizer or info.tokenizer_dir
    if source is None:
        yield Finding.note("tokenizer", "none to compare: give --tokenizer DIR")
        return
    try:
        renderer = load_renderer(source)
    except BridleError as error:
        yield failed("tokenizer", str(error), "Give the model's own tokenizer: --tokenizer DIR.")
        return
    plain = partial(renderer.tokenizer.encode, add_special_tokens=False)
    yield await compare_vocabulary(engine, lambda text: np.array(plain(text)), renderer.vocab_size)
    render = _render(renderer)
    yield await compare_rendering(engine, render)
    yield await compare_template(engine)
    if logprobs:
        yield await _recomputed(engine, info, render, source)


def failed(what: str, found: str, fix: str) -> Finding:
    """A finding that something could not be looked at."""
    from bridle.engines.probe import Finding

    return Finding(what, ok=False, needed=True, found=found, fix=fix)


def _render(renderer: PromptRenderer) -> Render:
    """Our rendering of OpenAI Chat messages, by the dialect that reads them."""
    import msgspec

    from bridle.dialects import DIALECTS
    from bridle.dialects.base import Route, RouteKind
    from bridle.types import JSON, Dialect

    def render(messages: list[JSON], tools: list[JSON]) -> Ids:
        body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
        route = Route(Dialect.OPENAI_CHAT, RouteKind.GENERATE)
        asked = DIALECTS[Dialect.OPENAI_CHAT].parse(route, msgspec.json.encode(body), {})
        return renderer.render(asked.messages, asked.tools, thinking=None)

    return render


async def _recomputed(engine: Engine, info: EngineInfo, render: Render, source: str) -> Finding:
    from bridle.engines.compare import recompute_logprobs

    folder = Path(info.tokenizer_dir or source)
    try:
        score = await asyncio.to_thread(_score, folder)
        return await recompute_logprobs(engine, info.logprob_mode, score, render(SAID, []))
    except (BridleError, ImportError) as error:
        return failed(
            "recomputed logprobs",
            str(error),
            "The model's folder must be on this machine, and torch installed: run "
            + install_extra("embedded"),
        )


def _score(folder: Path) -> Score:
    from bridle.embedded.model import PlainModel

    return PlainModel(folder).logprobs

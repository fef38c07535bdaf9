"""Roots by the engine's own chat template (`prompt = "engine"`).

The engine is asked for the ids of a root's messages and then samples under them, as it does under
any other ids of ours: budgets count them, a stream leaves live, an interrupted call goes on from
its tokens, on every route. That its chat route makes the same prompt is looked at when it starts
(`engines.compare.compare_template`). What extends a prompt is rendered here in any case: nothing
that was sampled is ever tokenised again.

The engine tokenises these texts, so whatever looks like a control token in them is parted before
(`PromptTokenizer.apart`), and the exchange says in how many texts (`markers_parted`).
Messages that the template refuses (a system message in the middle, for some) are rendered here;
the exchange says who rendered its root (`prompt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import structlog

from bridle.engines.base import Templating
from bridle.errors import EngineError
from bridle.gateway.faults import REFUSED
from bridle.prompting.messages import chat_tools, server_messages
from bridle.types import JSON, Message, ModelRequest

if TYPE_CHECKING:
    from bridle.prompting.renderer import PromptRenderer
    from bridle.types import Ids

log = structlog.get_logger()


class Parting:
    """Parts the markers in texts, and counts the texts that held any."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer
        self.count = 0

    def __call__(self, text: str) -> str:
        """Return the text as the model reads it, no part of it a control token."""
        made = self._renderer.apart(text)
        self.count += made != text
        return made


class Templated(NamedTuple):
    """Messages as the engine's template renders them."""

    ids: Ids
    parted: int
    """Number of texts that held what looks like a control token."""


class EngineTemplate:
    """The chat template of one engine."""

    def __init__(self, engine: Templating, renderer: PromptRenderer) -> None:
        self._engine = engine
        self._renderer = renderer

    async def prompt(self, messages: Sequence[Message], request: ModelRequest) -> Templated | None:
        """Return the ids of `messages`; `None` = the template refuses them.

        Raises `RenderError` for parts that are not text, `EngineError` if the engine fails.
        """
        parting = Parting(self._renderer)
        shown = server_messages(messages, escape=parting)
        tools = chat_tools(request.tools, parting)
        try:
            ids = await self._engine.template(
                shown, tools, template_arguments(self._renderer, request)
            )
        except EngineError as error:
            if error.status not in REFUSED:
                raise
            log.warning("template_refused", error=str(error))
            return None
        return Templated(ids, parting.count)


def template_arguments(renderer: PromptRenderer, request: ModelRequest) -> JSON:
    """Return the arguments of an engine's template besides messages and tools."""
    thinking = renderer.template_args(request)
    return {} if thinking is None else {"enable_thinking": thinking}

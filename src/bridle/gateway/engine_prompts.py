"""Prompts that the engine renders: roots by its own chat template, and messages with images.

With `prompt = "engine"` the engine is asked for the ids of a root's messages and then samples under
them, as it does under any other ids of ours: budgets count them, a stream leaves live, an
interrupted call goes on from its tokens, on every route. That its chat route makes the same prompt
is looked at when it starts (`engines.probe`). What extends a prompt is rendered here in any case:
nothing that was sampled is ever tokenised again. Messages that the template refuses (a system
message in the middle, for some) are rendered here; the exchange says who rendered its root
(`prompt`).

Only the engine's own processor knows how many tokens an image is. So a request that shows one is
not rendered here: its messages go to the chat route, whose prompt is a root (`image`), and the
engine is asked for that prompt first, so that budgets count it whole and capture knows where each
image stands. What comes after it extends it by ids like any other prompt, with the images beside
them, on an engine that takes both: placeholders are where they were, and the engine tells the ids
that it used. A new image extends where the engine's rendering begins with the very tokens of the
conversation so far; else it is a root again.

The engine tokenises these texts, so whatever looks like a control token in them is parted before
(`PromptTokenizer.apart`), and the exchange says in how many texts (`markers_parted`).

Images must come inline (`data:`): an engine that fetched URLs would be a way out of a sandbox.
Whatever an engine can't take is left to the renderer, which refuses it by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import structlog

from bridle.dialects.json_reader import without_lone_surrogates
from bridle.dialects.media import shown_block
from bridle.dialects.openai_chat_write import chat_part
from bridle.engines.base import Picture, Seeing, Seen, Templating
from bridle.errors import EngineError, RequestError
from bridle.gateway.faults import REFUSED
from bridle.prompting.canonical import results_in_call_order
from bridle.prompting.renderer import chat_tools, server_messages
from bridle.types import JSON, MediaPart, Message, ModelRequest

if TYPE_CHECKING:
    from bridle.gateway.models import Served
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
        whole = without_lone_surrogates(text)
        made = self._renderer.apart(whole)
        self.count += made != whole
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
        """Return the prompt ids that the engine's own template makes of `messages`; `None` = it
        refuses them.

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
    """Return the arguments that the request gives to the engine's chat template, besides messages
    and tools.
    """
    thinking = renderer.template_args(request)
    return {} if thinking is None else {"enable_thinking": thinking}


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """Messages with images, and the tokens that the engine said they become."""

    messages: list[JSON]
    """Messages as OpenAI Chat has them."""
    tools: list[JSON] | None
    arguments: JSON
    """For the engine's template."""
    ids: Ids
    """The whole prompt."""
    images: list[JSON]
    """Digest and media type of each image, in order; `start`, `length` and `grid` where the engine
    gave them."""
    parted: int
    """Number of texts that held what looks like a control token."""


def unplaced(images: Sequence[JSON]) -> list[JSON]:
    """Return the images without their positions in the prompt."""
    lost = {"start", "length"}
    return [{name: value for name, value in image.items() if name not in lost} for image in images]


async def show(served: Served, request: ModelRequest) -> Shown | None:
    """Return the engine's rendering of a request with images; `None` = it has no images, or the
    engine takes none.

    `RequestError` for images that are refused, with the reason where it is safe to tell.
    """
    if not media_of(request.messages) or not isinstance(served.engine, Seeing):
        return None
    ordered = results_in_call_order(request.messages)
    images = media_of(ordered)
    if not all(part.media_type.startswith("image/") for part in images):
        return None
    if not all(part.source.startswith("data:") for part in images):
        raise RequestError("images must be inline (base64), not URLs", param="messages")
    if request.prefill is not None:
        raise RequestError(
            "a request with images cannot end with the beginning of an answer: end it with a "
            "user's message",
            param="messages",
        )
    parting = Parting(served.renderer)
    messages = server_messages(ordered, escape=parting, media=chat_part)
    tools = chat_tools(request.tools, parting)
    arguments = template_arguments(served.renderer, request)
    seen = await _seen(served.engine, messages, tools, arguments)
    if seen is None:
        return None
    described = [{"digest": part.digest, "media_type": part.media_type} for part in images]
    if len(seen.places) == len(described):
        described = [image | place for image, place in zip(described, seen.places, strict=True)]
    return Shown(messages, tools, arguments, seen.ids, described, parting.count)


async def _seen(
    engine: Seeing, messages: list[JSON], tools: list[JSON] | None, arguments: JSON
) -> Seen | None:
    try:
        return await engine.see(messages, tools, arguments)
    except EngineError as error:
        if error.status not in REFUSED:
            raise
        log.warning("images_refused", error=str(error))
        message = "this model's server refused the images of this request"
        raise RequestError(message, param="messages") from error


def pictures(shown: Shown, images: Sequence[JSON]) -> tuple[Picture, ...] | None:
    """Return the images of the messages at the positions that `images` gives.

    `None` = a position is missing, or they are other images than the messages'.
    """
    urls = [
        part["image_url"]["url"]
        for message in shown.messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    digests = [[one["digest"] for one in listed] for listed in (images, shown.images)]
    if digests[0] != digests[1] or len(urls) != len(images):
        return None
    if not all("length" in one for one in images):
        return None
    return tuple(
        Picture(url, one["start"], one["length"]) for url, one in zip(urls, images, strict=True)
    )


def media_of(messages: Sequence[Message]) -> list[MediaPart]:
    """Return all parts of the messages that are not shown as text (images, files), in order."""
    return [
        part
        for message in messages
        for part in message.content
        if type(part) is MediaPart and shown_block(part) is None
    ]

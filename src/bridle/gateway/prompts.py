"""The ids that a call is sampled under, and what a reply without a template says.

Usually a prompt is the parent's, its output and the rendered new messages, or all messages rendered
anew. A prefilled answer continues the client's first words of the turn; its reply is the sampled
text as it is, but for tool calls.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from bridle.aio import run_shielded
from bridle.capture.records import no_ids
from bridle.engines.base import GenerateRequest
from bridle.errors import ContextOverflowError, RequestError
from bridle.gateway import faults
from bridle.gateway.budgets import takes_calls
from bridle.gateway.call import Call, Question
from bridle.gateway.engine_prompts import EngineTemplate, Shown, pictures
from bridle.gateway.recording import Prompted
from bridle.gateway.sampling import SampledReply
from bridle.prompting.canonical import messages_after
from bridle.prompting.prompt import PromptIds
from bridle.prompting.renderer import PromptRenderer, chat_tools, server_messages
from bridle.prompting.tokenizer import Allowance, count_against
from bridle.types import FinishReason, Message, ModelRequest, Reply, Sampling, TextPart

if TYPE_CHECKING:
    from bridle.capture.records import Exchange
    from bridle.types import Ids

T = TypeVar("T")

LONG_CHARS: Final = 1 << 16
"""Characters from which messages are rendered in a thread: on the loop they would hold up all other
calls for some 30 ms."""

MANY: Final = 500
"""Messages from which they are rendered in a thread."""

THREADS: Final = 2
"""Renderings in threads at a time: each takes up to 80 MB."""

PROMPT_TAIL = 64
"""Last prompt ids that a parser may need (whether reasoning is open where the reply begins)."""


class Prompts:
    """Makes the prompts of one gateway."""

    def __init__(
        self,
        renderer: PromptRenderer,
        template: EngineTemplate | None = None,
        *,
        context_length: int,
        pictures: bool = False,
    ) -> None:
        """`template` renders the roots; `None` = `renderer` does. `pictures`: see `EngineInfo`."""
        self._renderer = renderer
        self._context_length = context_length
        self._threads = asyncio.Semaphore(THREADS)
        self._template = template
        self._pictures = pictures

    async def prompted(
        self, question: Question, parent: Call | None, shown: Shown | None = None
    ) -> Prompted:
        """Return the prompt ids of a call: the parent's extended, else rendered anew.

        `parent` is the call that the question's placement names; `shown` is what the engine
        reported of messages with images. Raises `RenderError`, `EngineError` if the engine was to
        render and failed, or `RequestError` for a prefill that the model's template does not take.
        """
        request, placement = question.request, question.placement
        if shown is not None:
            return await self._among_images(question, parent, shown)
        messages = request.messages if request.prefill is None else request.messages[:-1]
        reason = placement.reason
        if parent is not None and parent.finish is FinishReason.ABORT:
            reason = reason or "partial"
        elif placement.extend and parent is not None and parent.prompt is not None:
            before, output_ids = parent.sampled()
            if placement.new_from > len(messages):
                # The client sends back the reply itself, to have it continued.
                if len(output_ids) and output_ids[-1] not in self._renderer.stop_token_ids:
                    return Prompted(before.extend(output_ids, no_ids()), parent, None)
                reason = "prefill"
            else:
                suffix = await self._suffix(question, parent, messages)
                if suffix is not None:
                    extended = before.extend(output_ids, suffix)
                    return Prompted(self._prefilled(extended, request), parent, None)
                reason = "unbridged"
        return await self._root(messages, request, reason or "first")

    def check_length(self, request: ModelRequest) -> None:
        """Raise `RequestError` for a request with more characters than the context's tokens can
        stand for.

        It is the provider's own error for a prompt that is too long.
        """
        least = characters(request.messages, request.tools_span)
        least = math.ceil(least / self._renderer.chars_per_token)
        if least > self._context_length:
            raise faults.overflow(least, self._context_length)

    async def _within_context(
        self, messages: Sequence[Message], tools: bytes | None, render: Callable[[], T]
    ) -> T:
        """Render these; in a thread if they are long. `RequestError` as soon as they are too long
        for the context.
        """
        if len(messages) <= MANY and characters(messages, tools) <= LONG_CHARS:
            return render()
        allowance = Allowance(self._context_length)

        def rendered() -> T:
            with count_against(allowance):
                return render()

        def stop() -> None:
            allowance.stopped = True

        try:
            async with self._threads:  # which a thread holds until it ends
                work = asyncio.to_thread(rendered)
                return await run_shielded(work, timeout_s=None, on_cancel=stop)
        except ContextOverflowError as error:
            raise faults.overflow(error.prompt_tokens, error.context_length) from None

    async def _suffix(
        self, question: Question, parent: Call, messages: tuple[Message, ...]
    ) -> Ids | None:
        """Return the ids that new `messages` add to the parent; `None` = they cannot extend it."""
        new = messages_after(messages, question.placement.new_from)
        return await self._within_context(new, None, lambda: self._extended(question, parent, new))

    def _extended(self, question: Question, parent: Call, new: Sequence[Message]) -> Ids | None:
        request, (before, output_ids) = question.request, parent.sampled()
        return self._renderer.extend(
            before, output_ids, new, request.tools, thinking=request.thinking
        )

    def extended_now(self, question: Question, parent: Call, size: int) -> Prompted | None:
        """Return the parent's prompt extended by the new messages, if that takes little time.

        `None` = `prompted` is to do it. `size` is the request's, in bytes. Raises `RenderError`.
        """
        new = messages_after(question.request.messages, question.placement.new_from)
        if len(new) > MANY or (size > LONG_CHARS and characters(new, None) > LONG_CHARS):
            return None
        request, (before, output_ids) = question.request, parent.sampled()
        suffix = self._renderer.extend(
            before, output_ids, new, request.tools, thinking=request.thinking
        )
        if suffix is None:
            return None
        return Prompted(before.extend(output_ids, suffix), parent, None)

    async def _among_images(
        self, question: Question, parent: Call | None, shown: Shown
    ) -> Prompted:
        """Return a prompt with images: the parent's extended where the engine takes both, else a
        root.
        """
        root = Prompted(PromptIds.root(shown.ids), None, "image", shown=shown, parted=shown.parted)
        placement = question.placement
        if not self._pictures or not placement.extend or parent is None or parent.prompt is None:
            return root
        if parent.finish is FinishReason.ABORT or placement.new_from > len(
            question.request.messages
        ):
            return root
        before, output_ids = parent.sampled()
        images, parted, suffix = parent.images, 0, None
        if len(images) == len(shown.images):
            suffix = await self._suffix(question, parent, question.request.messages)
        else:
            images, parted = shown.images, shown.parted
            sofar = np.concatenate([before.array(), output_ids])
            if np.array_equal(shown.ids[: len(sofar)], sofar):
                suffix = shown.ids[len(sofar) :]
        placed = pictures(shown, images)
        if suffix is None or placed is None:
            return root
        prompt = before.extend(output_ids, suffix)
        return Prompted(prompt, parent, None, images=images, pictures=placed, parted=parted)

    async def _root(
        self, messages: tuple[Message, ...], request: ModelRequest, reason: str
    ) -> Prompted:
        """Return all messages rendered, by the engine's template where that is wanted and takes
        them.
        """
        parted, rendered_by = 0, None
        if self._template is not None:
            rendered = await self._template.prompt(messages, request)
            rendered_by = "renderer" if rendered is None else "engine"
        if self._template is None or rendered is None:
            ids = await self._within_context(
                messages,
                request.tools_span,
                lambda: self._renderer.render(messages, request.tools, thinking=request.thinking),
            )
        else:
            ids, parted = rendered
        prompt = self._prefilled(PromptIds.root(ids), request)
        return Prompted(prompt, None, reason, rendered_by=rendered_by, parted=parted)

    def _prefilled(self, prompt: PromptIds, request: ModelRequest) -> PromptIds:
        """Return `prompt` with the client's beginning of the answer, if any, behind it.

        `RequestError` where the model's turns do not begin with text.
        """
        if request.prefill is None:
            return prompt
        begun = self._renderer.text_ids(request.prefill)
        read = self._renderer.parse(
            begun,
            tools=request.tools,
            prompt_tail=prompt.tail(PROMPT_TAIL),
            finish=FinishReason.LENGTH,
            stop_text=None,
        )
        if read.content.strip() != request.prefill.strip():
            message = "This model cannot go on from the beginning of an answer: a turn of its own "
            raise RequestError(message + "does not begin with text.", param="messages")
        return prompt.behind(begun)

    def plain_reply(self, request: ModelRequest, prompt: PromptIds, sampled: SampledReply) -> Reply:
        """Return the reply to a request whose reply the client began: sampled text, and calls after
        it.
        """
        assert request.prefill is not None
        ids, stop = sampled.output_ids, sampled.last.stop_text
        if len(ids) and ids[-1] in self._renderer.stop_token_ids:
            ids = ids[:-1]
        text = self._renderer.decode(ids)
        content = text.partition(stop)[0] if stop else text
        plain = Reply(content, None, (), sampled.finish, stop_text=stop)
        if not takes_calls(request):
            return plain
        return self._calls_behind(request.prefill, request, prompt, sampled) or plain

    def _calls_behind(
        self, begun: str, request: ModelRequest, prompt: PromptIds, sampled: SampledReply
    ) -> Reply | None:
        """Return the rest of a turn that the client began, where it holds calls; `None` = it holds
        none.

        The turn is parsed whole, as its family writes it; what was begun is not shown again.
        """
        ids = self._renderer.text_ids(begun)
        turn = self._renderer.parse(
            np.concatenate([ids, sampled.output_ids]),
            tools=request.tools,
            prompt_tail=prompt.tail(PROMPT_TAIL),
            finish=sampled.finish,
            stop_text=sampled.last.stop_text,
        )
        if not turn.tool_calls:
            return None
        _, found, rest = turn.content.partition(begun.strip() or "\0")
        return replace(turn, content=rest if found else turn.content)

    def with_logprobs(self, reply: Reply, sampled: SampledReply | Exchange) -> Reply:
        """Return the reply with the logprobs of its tokens, for a client that asked for them."""
        if len(sampled.logprobs) != len(sampled.output_ids):
            return reply
        ids = sampled.output_ids
        texts = [self._renderer.decode(ids[i : i + 1]) for i in range(len(ids))]
        token_logprobs = tuple(zip(texts, sampled.logprobs.tolist(), strict=True))
        return replace(reply, token_logprobs=token_logprobs)


def characters(messages: Sequence[Message], tools: bytes | None) -> int:
    """Return how many characters of messages and a tool list a prompt shows; images have none."""
    found = len(tools or b"")
    for message in messages:
        if message.reasoning:
            found += len(message.reasoning)
        for part in message.content:
            if type(part) is TextPart:
                found += len(part.text)
        for call in message.tool_calls:
            found += len(call.arguments)
    return found


def engine_request(
    call: Call, question: Question, prompted: Prompted, effective: Sampling
) -> GenerateRequest:
    """Return the request to the engine that samples `call`."""
    request, served = question.request, question.served
    text_only, shown = not served.info.token_in, prompted.shown
    messages, tools = (shown.messages, shown.tools) if shown is not None else (None, None)
    if messages is None and text_only:
        messages, tools = server_messages(request.messages), chat_tools(request.tools)
    return GenerateRequest(
        request_id=call.exchange_id,
        prompt=prompted.prompt,
        sampling=effective,
        session_id=call.session_id,
        model=served.model,
        messages=messages,
        tools=tools,
        calls=takes_calls(request),
        arguments=None if shown is None else shown.arguments,
        by_messages=shown is not None,
        pictures=prompted.pictures,
        grammar=call.grammar,
        stream=call.live is not None,
        keeps=request.stream,
    )

"""The pieces that Chat Completions replies are made of, streamed or whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bridle.dialects.base import Route, RouteKind
from bridle.dialects.reading import encode
from bridle.dialects.tools import freeform_input
from bridle.types import JSON, FinishReason, Reply, ToolCall, Usage


def finish_reason(reply: Reply) -> str:
    """OpenAI's word for how a reply ended; an aborted one is incomplete, so `length`."""
    if reply.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if reply.tool_calls else "stop"


def tool_call_json(call: ToolCall, freeform: Collection[str]) -> JSON:
    """One call as a message holds it."""
    if call.custom or call.name in freeform:
        text = call.arguments if call.custom else freeform_input(call.arguments)
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def logprobs_json(reply: Reply) -> JSON | None:
    """The logprobs of all sampled tokens, control tokens included; `None` = not asked for."""
    if reply.token_logprobs is None:
        return None
    told = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in reply.token_logprobs
    ]
    return {"content": told, "refusal": None}


def usage_json(usage: Usage) -> JSON:
    """Token counts. The details are always objects (trae-agent fails on null)."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def models_json(route: Route, names: Sequence[str], context_length: int) -> bytes:
    """OpenAI's model list, or the one model that the path names; the length is vLLM's addition."""

    def model(name: str) -> JSON:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "bridle",
            "max_model_len": context_length,
        }

    if route.kind is RouteKind.MODEL:
        return encode(model(route.model or ""))
    return encode({"object": "list", "data": [model(name) for name in names]})

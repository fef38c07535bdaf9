"""Every field that a request may have at its top, per dialect, and what becomes of it.

What would take context away from the model if it were ignored is refused. What asks for something
else that is not done is served, and its name stands in `ModelRequest.extra["unenforced"]`. A
field that stands in no table is served and its name stands in `extra["unknown"]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from bridle.errors import RequestError
from bridle.types import JSON, Dialect


class Use(StrEnum):
    """The treatment of a field."""

    USED = "used"
    HARMLESS = "harmless"
    """It says nothing about what the model sees or samples."""
    UNENFORCED = "unenforced"
    """It asks for something that is not done, unless its value asks for nothing."""
    REFUSED = "refused"
    """It names context that only the provider has."""


def _table(**words: str) -> dict[str, Use]:
    return {name: Use(use) for use, names in words.items() for name in names.split()}


FIELDS: dict[str, dict[str, Use]] = {
    Dialect.ANTHROPIC: _table(
        used="model system tool_choice max_tokens temperature top_p top_k stop_sequences stream "
        "thinking output_config output_format thread",
        harmless="metadata service_tier cache_control betas anthropic_beta anthropic_version "
        "billing_policy diagnostics inference_geo speed user_profile_id workspace_id fallbacks "
        "fallback_credit_token",
        unenforced="context_management compaction",
        refused="mcp_servers container",
    ),
    Dialect.OPENAI_CHAT: _table(
        used="model functions tool_choice function_call stream stream_options max_tokens "
        "max_completion_tokens temperature top_p top_k min_tokens stop stop_token_ids seed "
        "presence_penalty frequency_penalty response_format reasoning_effort enable_thinking "
        "chat_template_kwargs thinking reasoning logprobs n best_of parallel_tool_calls logit_bias "
        "min_p repetition_penalty",
        harmless="store metadata user prompt_cache_key prompt_cache_options prompt_cache_retention "
        "safety_identifier service_tier prediction moderation include_reasoning usage provider "
        "models route session_id trace cache_prompt request_id priority tool_stream "
        "separate_reasoning skip_special_tokens spaces_between_special_tokens",
        unenforced="length_penalty typical_p top_a verbosity "
        "modalities audio web_search_options top_logprobs ignore_eos bad_words allowed_token_ids "
        "guided_json guided_regex guided_choice guided_grammar structured_outputs transforms "
        "plugins thinking_budget reasoning_split truncate_prompt_tokens",
        refused="documents conversation previous_response_id mcp_servers",
    ),
    Dialect.OPENAI_RESPONSES: _table(
        used="model instructions tool_choice stream max_output_tokens temperature top_p top_k stop "
        "text reasoning include previous_response_id store parallel_tool_calls object",
        harmless="metadata client_metadata user prompt_cache_key prompt_cache_options "
        "prompt_cache_retention safety_identifier service_tier stream_options moderation "
        "access_programs max_tool_calls",
        unenforced="truncation context_management top_logprobs image",
        refused="background conversation prompt mcp_servers",
    ),
    Dialect.GOOGLE: _table(
        used="model systemInstruction toolConfig generationConfig",
        harmless="safetySettings labels store serviceTier",
        refused="cachedContent",
    ),
    "generationConfig": _table(
        used="temperature topP topK maxOutputTokens stopSequences seed presencePenalty "
        "frequencyPenalty responseMimeType responseSchema responseJsonSchema candidateCount "
        "thinkingConfig",
        harmless="serviceTier",
        unenforced="responseModalities responseLogprobs logprobs mediaResolution speechConfig "
        "imageConfig audioTimestamp enableEnhancedCivicAnswers routingConfig modelSelectionConfig "
        "generationOutputConfig",
    ),
}
"""By dialect: the fields beside messages and tools. Google's generation has a table of its own."""

_NOTHING: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "typical_p": (1,),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "responseModalities": (["TEXT"], ["text"]),
    "truncation": ("disabled",),
    "mediaResolution": ("MEDIA_RESOLUTION_UNSPECIFIED",),
}
"""Values that ask for nothing, beside null, false, zero and what is empty."""

_BETAS = """
advanced-tool-use advisor-tool afk-mode agent-memory auto-mode-classifier cache-diagnosis
cache-keepalive ccr-byoc claude-code claude-code-side-query code-execution compact computer-use
context-1m context-hint context-management dev-full-thinking effort environments
extended-cache-ttl fallback-credit fast-mode files-api fine-grained-tool-streaming inline-tools
interleaved-thinking managed-agents mcp-client mcp-servers message-batches message-threads
mid-conversation-output-config mid-conversation-system mid-conversation-system-clear-at
mid-conversation-tool-changes model-context-window-exceeded oauth output-128k output-300k pdfs
per-turn-control program-use-case-ids prompt-caching prompt-caching-evict prompt-caching-scope
redact-thinking request-tags responses responses_v1 responses_websockets resumption
server-side-fallback skills structured-outputs task-budgets thinking-binding-controls
thinking-display-updates thinking-resumption thinking-token-count timing token-counting
token-efficient-tools tool-examples tool-provenance tool-search-tool user-profiles web-fetch
web-search web-search-results-only
"""
BETAS = frozenset(_BETAS.split())
"""Names of beta headers, without their dates. Each only allows fields and blocks; those are read
by their own names."""

_DATE = re.compile(r"[-=]v?20\d\d-?\d\d-?\d\d$")


def unknown_betas(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The betas that a request's headers name and `BETAS` lacks; header names in lower case."""
    named = (headers.get(name, "") for name in ("anthropic-beta", "openai-beta"))
    betas = [beta.strip() for value in named for beta in value.split(",")]
    return tuple(beta for beta in betas if beta and _DATE.sub("", beta) not in BETAS)


def account(head: JSON, table: str, path: str = "") -> JSON:
    """Return the fields of `head` that have no effect: `unenforced`, `unknown`, if there are any.

    `table` is a key of `FIELDS`; `path` stands before the names. `RequestError` for a field that
    is refused.
    """
    uses = FIELDS[table]
    found: dict[str, list[str]] = {}
    for name, value in head.items():
        use = uses.get(name)
        if use in (Use.USED, Use.HARMLESS) or value is None or value == "":
            continue
        full = f"{path}{name}"
        if use is None:
            found.setdefault("unknown", []).append(full)
        elif _asks_nothing(name, value):
            continue
        elif use is Use.REFUSED:
            raise RequestError(f"'{full}' is not available here.", param=full)
        else:
            found.setdefault("unenforced", []).append(full)
    return dict(found)


def _asks_nothing(name: str, value: Any) -> bool:
    if not value or value in _NOTHING.get(name, ()):
        return True
    if name != "context_management" or not isinstance(value, dict):
        return False
    edits = value.get("edits")
    return not edits or (isinstance(edits, list) and all(map(_keeps_all, edits)))


def _keeps_all(edit: Any) -> bool:
    return isinstance(edit, dict) and edit.get("keep") in ("all", {"type": "all"})

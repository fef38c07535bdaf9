"""OpenAI's error shape, shared by Chat Completions and Responses.

Statuses, types and codes are those of OpenAI's error guide; what clients act on is the code
(Codex), the status (the SDKs) or words of the message (opencode, pi: `maximum context length is`,
`exceeds the context window`). `x-should-retry: false` keeps the SDKs from repeating what cannot
succeed.
"""

from __future__ import annotations

from bridle.dialects.base import retry_headers
from bridle.dialects.reading import encode
from bridle.errors import RequestError
from bridle.types import JSON

_SHAPES: dict[str, tuple[int, str, str | None]] = {
    "authentication_error": (401, "invalid_request_error", "invalid_api_key"),
    "permission_error": (403, "invalid_request_error", "permission_denied"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "request_too_large": (413, "invalid_request_error", "request_too_large"),
    "context_length_exceeded": (400, "invalid_request_error", "context_length_exceeded"),
    "rate_limit": (429, "rate_limit_error", "rate_limit_exceeded"),
    "session_busy": (429, "rate_limit_error", "rate_limit_exceeded"),
    "budget_exhausted": (429, "insufficient_quota", "insufficient_quota"),
    "overloaded": (503, "server_error", "server_is_overloaded"),
    "paused": (503, "server_error", "server_is_overloaded"),
    "engine_error": (500, "server_error", "server_error"),
    "engine_cut": (503, "server_error", "engine_cut"),
    "engine_reset": (503, "server_error", "engine_reset"),
    "engine_silent": (503, "server_error", "engine_silent"),
    "engine_garbled": (503, "server_error", "engine_garbled"),
    "engine_500": (503, "server_error", "engine_500"),
    "store_error": (503, "server_error", "store_error"),
}
"""Our code -> status, type and code as OpenAI says them."""


def error_object(error: RequestError, message: str) -> JSON:
    """The value under `error`."""
    _, kind, code = _SHAPES.get(error.code, (0, "invalid_request_error", None))
    return {"message": message, "type": kind, "param": error.param, "code": code}


def error_response(error: RequestError, message: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a refused request."""
    status = _SHAPES.get(error.code, (error.status, "", None))[0]
    headers = retry_headers(error)
    return status, headers, encode({"error": error_object(error, message)})


def chat_message(error: RequestError) -> str:
    """The text of an error, with Chat Completions' own words for an overflow."""
    if error.code != "context_length_exceeded" or error.context_length is None:
        return str(error)
    return (
        f"This model's maximum context length is {error.context_length} tokens. However, your "
        f"messages resulted in {error.prompt_tokens} tokens. Please reduce the length of the "
        "messages."
    )


def responses_message(error: RequestError) -> str:
    """The text of an error, with Responses' own words for an overflow."""
    if error.code != "context_length_exceeded":
        return str(error)
    numbers = ""
    if error.context_length is not None:
        numbers = f" ({error.prompt_tokens} tokens > {error.context_length} maximum)"
    return (
        "Your input exceeds the context window of this model. Please adjust your input and try "
        f"again.{numbers}"
    )

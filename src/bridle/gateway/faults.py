"""Failures in the form that a harness may see.

Errors from behind the gateway (engine, renderer, store, our own bugs) become a `RequestError` of
the kind whose meaning the client acts on: back off, compact, stop. What the engine said stands in
our log and in the session's result, and never reaches a harness.
"""

from __future__ import annotations

import traceback

from bridle.errors import (
    ContextOverflowError,
    EngineError,
    RenderError,
    RequestError,
    StoreError,
)
from bridle.gateway.keys import redact
from bridle.prompting.calls import Orphan
from bridle.types import without_user_info

REASON_CHARS = 300
"""Characters of an engine's error that a session's result shows."""

RETRY_AFTER_S = 1.0
"""Retry delay of a client after a refusal that passes by itself."""

FAILURES = {
    "engine_cut": "the model's server broke off its reply",
    "engine_reset": "the model's server cannot be reached",
    "engine_silent": "the model's server did not answer in time",
    "engine_500": "the model's server failed",
    "engine_garbled": "the model's server gave a reply that cannot be used",
}
"""Texts by the kind of an `EngineError`."""

NO_KEY = "the session's key is unknown or missing; send the key that its opening returned"
"""Text of a 401."""

REFUSED = frozenset({400, 413, 422})
"""Statuses by which an engine says that the request is at fault: sending it again changes nothing.
Others below 500 (keys, paths) are our own mistakes and are reported as failures."""


def request_error(error: BaseException) -> RequestError:
    """Return the error that a harness gets for `error`; a `RequestError` is returned as it is."""
    match error:
        case RequestError():
            return error
        case ContextOverflowError():
            return overflow(error.prompt_tokens, error.context_length)
        case EngineError():
            failed = _engine_failed(error)
            failed.reason = redact(without_user_info(str(error)))[:REASON_CHARS]
            return failed
        case StoreError():
            message = "store_error: the gateway cannot record calls now; try again later"
            return _passing(message, 503, "store_error")
        case RenderError():
            return RequestError(f"the messages cannot be shown to this model: {error}")
        case _:
            return RequestError(
                "internal error of the gateway; its log has more", status=500, code="engine_error"
            )


def without_frames(error: Exception) -> Exception:
    """Remove the tracebacks of an error and its causes, with all variables in them.

    The variables hold the call, whose error this is, with its prompt.
    """
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        earlier = one.__cause__ or one.__context__
        one.__traceback__ = one.__context__ = one.__cause__ = None
        one = earlier
    return error


def trace_of(error: BaseException) -> str:
    """Return a traceback as text without the values of variables, which may hold keys and
    prompts.
    """
    return redact("".join(traceback.format_exception(error)))


def _engine_failed(error: EngineError) -> RequestError:
    if error.status == 429:
        return _passing("the model is busy; try again later", 429, "rate_limit", error)
    if error.status in REFUSED:
        return RequestError("the model's server refused this request as invalid")
    if error.kind in FAILURES:
        message = f"{error.kind}: {FAILURES[error.kind]}"
        if error.retryable:
            return _passing(f"{message}; try again later", 503, error.kind, error)
        return RequestError(message, status=500, code=error.kind)
    if error.retryable:
        return _passing("the model is overloaded; try again later", 503, "overloaded", error)
    return RequestError("the model failed to answer", status=500, code="engine_error")


def _passing(
    message: str, status: int, code: str, cause: EngineError | None = None
) -> RequestError:
    asked_s = 0.0 if cause is None else cause.retry_after_s or 0.0
    wait_s = max(RETRY_AFTER_S, asked_s)
    return RequestError(message, status=status, code=code, retry_after_s=wait_s)


def overflow(prompt_tokens: int, context_length: int) -> RequestError:
    """Return the error for a prompt that leaves no room to sample, with both numbers for
    clients.
    """
    return RequestError(
        f"prompt is too long: {prompt_tokens} tokens > {context_length} maximum "
        f"(this model's maximum context length is {context_length} tokens)",
        code="context_length_exceeded",
        param="messages",
        prompt_tokens=prompt_tokens,
        context_length=context_length,
    )


def orphan(found: Orphan) -> RequestError:
    """Return the error for a tool result whose call is nowhere before it in the request."""
    named = f"the id {found.call_id!r}" if found.call_id else f"the name {found.name!r}"
    which = named if found.call_id or found.name else "neither an id nor a name"
    return RequestError(
        f"a tool result has {which}, but no earlier tool call in the request answers to it: a part "
        "of the conversation is missing. Send the whole conversation; to have such requests served "
        'as they are, set sampling.orphans = "serve" for the session'
    )


def unauthorized(message: str = NO_KEY) -> RequestError:
    """Return the error for a key that belongs to no open session."""
    return RequestError(message, status=401, code="authentication_error")


def session_ended() -> RequestError:
    """Return the error for a call to a sealed session, whose key is invalid."""
    return unauthorized("this session has ended; its key is no longer valid")


def spent(limit: str) -> RequestError:
    """Return the error for a session that has reached a limit; waiting does not help."""
    return RequestError(
        f"the session's budget of {limit} is used up", status=429, code="budget_exhausted"
    )


def paused() -> RequestError:
    """Return the error for a call while sampling is paused for a weight update; the client may
    retry.
    """
    return _passing("the model is paused; try again later", 503, "paused")


def shutting_down() -> RequestError:
    """Return the error for a call to a gateway that ends; another one may take over."""
    return RequestError("the gateway is shutting down", status=503, code="overloaded")


def client_left() -> RequestError:
    """Return the error for a call whose clients have all left; no client reads it."""
    return RequestError("nobody waits for this call", status=499, code="engine_error")

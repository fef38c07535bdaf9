"""One error per boundary that Bridle crosses; there is no deeper tree.

Code beyond a boundary (an engine adapter, a runtime, an evaluator plug-in) raises ordinary
exceptions; `boundary()` classifies them once, where the boundary is crossed. A failed session is a
value (`bridle.types.Cause`), so only our own bugs escape as anything else.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import unquote, urlsplit

T = TypeVar("T")


def install_extra(extra: str) -> str:
    """Return the command that installs an optional part of Bridle, for error messages."""
    from importlib.metadata import distribution

    return f"pip install {requirement(distribution('bridle').read_text('direct_url.json'), extra)}"


def requirement(direct_url: str | None, extra: str) -> str:
    """Return the words after `pip install` that add an extra to where Bridle was installed from.

    `direct_url` is pip's record of a folder, an archive or a repository (PEP 610); `None` = Bridle
    came from a package index.
    """
    if direct_url is None:
        return f"'bridle[{extra}]'"
    facts = json.loads(direct_url)
    if facts.get("dir_info", {}).get("editable"):
        return f"-e '{unquote(urlsplit(facts['url']).path)}[{extra}]'"
    vcs = facts.get("vcs_info", {}).get("vcs")
    return f"'bridle[{extra}] @ {vcs + '+' if vcs else ''}{facts['url']}'"


class BridleError(Exception):
    """Base of all errors that Bridle raises on purpose; its text is meant for a user."""


class ConfigError(BridleError):
    """A config value, task file, flag or plug-in name is wrong. The text names where and what."""


class Problems:
    """Collects errors of several checks, so that a user sees all of them at once."""

    def __init__(self) -> None:
        self.found: list[BridleError] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within the context, an error of Bridle's is added to the list instead of raised."""
        try:
            yield
        except BridleError as error:
            self.found += getattr(error, "parts", (error,))

    def tried(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`; `None` where its error was added to the list."""
        with self.noting():
            return make()
        return None  # type: ignore[unreachable]  # mypy: `noting` never suppresses

    def raise_any(self) -> None:
        """Raise the errors of the list: a single one as it is, several as one that lists each text
        once.

        That one is a `ConfigError` where one of them is. An empty list raises nothing.
        """
        texts = dict.fromkeys(str(error) for error in self.found)
        if not texts:
            return
        first = next((one for one in self.found if isinstance(one, ConfigError)), self.found[0])
        if len(texts) == 1:
            raise first
        listed = "".join(f"\n- {text}" for text in texts)
        every = type(first)(f"{len(texts)} problems; nothing was started:{listed}")
        every.parts = tuple(self.found)  # type: ignore[attr-defined]  # for an outer collection
        raise every


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for an address that cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        why = "the port is in use; choose another, or 0 for any"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "this machine does not have the address; choose another host"
    else:
        why = error.strerror or str(error)
    return ConfigError(f"cannot listen on {host}:{port}: {why}")


class EngineError(BridleError):
    """The inference engine failed or answered what cannot be used.

    `retryable` says whether the same call may be tried again (overload, dead replica).
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = False,
        status: int | None = None,
        retry_after_s: float | None = None,
        kind: str = "engine_error",
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.kind = kind
        """`engine_cut` (a reply broke off), `engine_reset` (no connection, or one that ended before
        a reply), `engine_silent`, `engine_500` (another 5xx than 503), `engine_garbled` (a
        reply that reports what cannot have been sampled), or `engine_error`."""
        self.status = status
        """HTTP status that the engine answered with; `None` = no answer."""
        self.retry_after_s = retry_after_s
        """Seconds after which the engine wants the retry; `None` = it did not say."""


class ContextOverflowError(EngineError):
    """The prompt leaves no room to sample in the model's context."""

    def __init__(self, prompt_tokens: int, context_length: int, requested: int | None) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens; the model's context length is {context_length}"
        )
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length
        self.requested = requested


class RenderError(BridleError):
    """Messages could not be turned into prompt ids, or no renderer fits the tokenizer."""


class StoreError(BridleError):
    """Capture could not be written or read (disk full, torn file, newer format)."""


class StateError(BridleError):
    """The rollout server's database cannot be used at the moment; the same may succeed later."""


class ServerError(BridleError):
    """A rollout server refused or failed a client's request."""

    def __init__(self, message: str, *, status: int | None = None, code: str = "error") -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of its answer; `None` = there was none."""
        self.code = code
        """Kind of refusal, as its answer names it."""


class RuntimeFailure(BridleError):
    """A sandbox could not be started, used or stopped; infrastructure, never the harness."""


class NodeLostError(BridleError):
    """A machine that computes sessions does not answer, or is gone with what it was doing."""

    def __init__(self, message: str, *, may_return: bool = False) -> None:
        super().__init__(message)
        self.may_return = may_return
        """True if the same machine may answer again soon, with its ended sessions."""


class HarnessError(BridleError):
    """A harness could not be installed or started, or is not known."""


class EvaluatorError(BridleError):
    """The evaluator itself failed; the session's reward is unknown."""


class TrainingError(BridleError):
    """A training cannot begin or continue: no data, unknown ids, a loss that is not a number."""


class RequestError(BridleError):
    """A harness's request is refused; dialects dress it in the provider's own shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        param: str | None = None,
        retry_after_s: float | None = None,
        prompt_tokens: int | None = None,
        context_length: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """`invalid_request_error`, `authentication_error`, `permission_error`, `not_found`,
        `thread_not_found`, `request_too_large`, `context_length_exceeded`, `rate_limit`,
        `session_busy` (too much of the session's own in hand), `overloaded`, a kind of
        `EngineError`, `budget_exhausted`, `paused`."""
        self.param = param
        """Path of the offending field, e.g. `messages[2].content`."""
        self.retry_after_s = retry_after_s
        self.prompt_tokens = prompt_tokens
        """With `context_length_exceeded`: the prompt's length, for the provider's own wording."""
        self.context_length = context_length
        """With `context_length_exceeded`: how many tokens there may be."""
        self.reason = ""
        """Failure behind the gateway, for whoever runs it; it is never sent to the harness."""

    @property
    def passes(self) -> bool:
        """Return whether the failure is on Bridle's side, so that a retry of the request may
        succeed.
        """
        return self.code in {"overloaded", "paused", "store_error"} or self.code.startswith(
            "engine_"
        )


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group, so that a caller can handle it like a single one."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def root_cause(error: BaseException) -> str:
    """Return the first cause of `error` without paths or addresses, for callers without a token.

    It is the text of its `errno`, or SQLite's message, or else its class.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error) if isinstance(error, sqlite3.Error) else type(error).__name__


class boundary:  # noqa: N801 - used as a function
    """Turn any ordinary exception inside into `error`, saying what was being done.

    Bridle's own errors and cancellation pass through untouched. A class of its own, because it
    stands around every step of a call: a fifth of what a generator costs.
    """

    __slots__ = ("_doing", "_error")

    def __init__(self, error: type[BridleError], doing: str) -> None:
        self._error = error
        self._doing = doing

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: object
    ) -> None:
        if kind is None or not isinstance(cause, Exception) or isinstance(cause, BridleError):
            return
        raise self._error(f"{self._doing}: {kind.__name__}: {cause}") from cause

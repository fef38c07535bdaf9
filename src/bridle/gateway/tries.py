"""The tries of one session: calls whose reply was lost, tries that were refused, and who joins.

SDKs number their retries but send no id of a call, so tries are counted per question and user
agent. A retry takes a lost call first and gets its reply; else it takes a refused try and is a new
sample; else it waits a moment, in case the connection of its first try is about to close, and is a
new sample then. A call whose client still waits is joined by its own idempotency key only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from hashlib import blake2b
from typing import Final

import orjson

from bridle.errors import RequestError
from bridle.gateway.call import Asked, Call, Stage
from bridle.prompting.canonical import Canonical
from bridle.types import ModelRequest

CLOSING_S: Final = 0.25
"""Longest wait of a retry for the connection of its first try to close."""

RETRIED: Final = frozenset({408, 409, 429})
"""Statuses below 500 after which the SDKs ask again by themselves."""


def question_key(request: ModelRequest, canonical: Canonical, template_args: Hashable) -> bytes:
    """16 bytes over all that makes two calls samples of one question; `stream` is no part of it."""
    sampling = request.sampling
    asked = (
        request.model,
        request.tool_choice,
        request.response_schema,
        request.logprobs,
        request.prefill,
        sampling.max_tokens,
        sampling.stop,
        sampling.seed,
    )
    arguments = _NOTHING
    if template_args is not None:
        arguments = repr(template_args).encode("utf-8", "surrogatepass")
    try:
        asked_json = orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # a lone surrogate, an integer beyond 64 bits
        asked_json = repr(asked).encode("utf-8", "surrogatepass")
    whole = canonical.chain[-1] + canonical.tools_digest + arguments + asked_json
    return blake2b(whole, digest_size=16).digest()


_NOTHING: Final = repr(None).encode()


class Tries:
    """The undelivered calls and the refused tries of one session. Lives on the gateway's loop."""

    def __init__(self) -> None:
        self._open: dict[bytes, list[Call]] = {}
        """Calls that are not delivered, by question, oldest first."""
        self._refused: Counter[tuple[bytes, str | None, int]] = Counter()
        """Refused tries by question, user agent and the number that their retry will have."""
        self._by_idempotency: dict[str, Call] = {}
        """The newest call of each idempotency key."""
        self._changed: asyncio.Event | None = None
        """Set, and dropped, when a client is detached from a call; made by the first who waits."""

    def begin(self, call: Call) -> None:
        """Register a call that may be joined until it is delivered."""
        key = call.question_key
        self._open[key] = [*self._open[key], call] if key in self._open else [call]

    def named(self, call: Call, idempotency_key: str) -> None:
        """Note the idempotency key that a client of `call` sent."""
        call.idempotency_keys.add(idempotency_key)
        self._by_idempotency[idempotency_key] = call

    def same_key(self, question: bytes, asked: Asked) -> Call | None:
        """Return the call of the same idempotency key and question, delivered or not."""
        call = self._by_idempotency.get(asked.idempotency_key or "")
        return call if call is not None and call.question_key == question else None

    def end(self, call: Call) -> None:
        """Remove a call that is delivered or failed: nobody joins it any more."""
        key = call.question_key
        if (found := self._open.get(key)) is None:
            return
        if left := found[1:] if found[0] is call else [one for one in found if one is not call]:
            self._open[key] = left
        else:
            del self._open[key]

    def failed(self, call: Call) -> None:
        """Note that a call failed; a client that waits must still get the error."""
        self.end(call)
        if not call.clients:
            self._refuse(call.question_key, call.asked.user_agent, call.retry_count)

    def refused(self, question: bytes, asked: Asked, error: RequestError) -> None:
        """Note that a client got `error`; a retry after that is a new sample."""
        if error.status >= 500 or error.status in RETRIED:
            self._refuse(question, asked.user_agent, asked.retry_count)

    def _refuse(self, question: bytes, user_agent: str | None, retry_count: int) -> None:
        self._refused[question, user_agent, retry_count + 1] += 1

    def detached(self) -> None:
        """Wake those that wait: a client has left a call, or has its reply."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def find(self, question: bytes, asked: Asked) -> Call | None:
        """Return the call that a request joins; `None` = there is none now.

        Of several lost calls, the one whose next retry this is, then the newest.
        """
        if not (undelivered := self._open.get(question)):
            return None
        found = [
            call
            for call in reversed(undelivered)
            if call.stage is not Stage.FAILED and call.error is None and _is_own(call, asked)
        ]
        expected = asked.retry_count - 1
        return min(found, key=lambda call: call.retry_count != expected, default=None)

    async def waited(self, question: bytes, asked: Asked) -> bool:
        """Return whether a retry had to wait for the connection of its first try to close.

        It need not where `find` finds a call, where a try of it was refused (which it takes), and
        where no call like its own has a client.
        """
        if asked.retry_count == 0 or self.find(question, asked) is not None:
            return False
        if self._take_refused((question, asked.user_agent, asked.retry_count)):
            return False
        if not self._may_close(question, asked):
            return False
        try:
            async with asyncio.timeout(CLOSING_S):
                while self._may_close(question, asked) and self.find(question, asked) is None:
                    self._changed = self._changed or asyncio.Event()
                    await self._changed.wait()
        except TimeoutError:
            pass  # its first try came to nothing that we know of
        return True

    def _take_refused(self, refused: tuple[bytes, str | None, int]) -> bool:
        """Remove such a refused try; return whether there was one."""
        left = self._refused[refused] - 1
        if left > 0:
            self._refused[refused] = left
        else:
            del self._refused[refused]
        return left >= 0

    def _may_close(self, question: bytes, asked: Asked) -> bool:
        """Return whether the client of some call could be the one that asks again."""
        return any(
            call.clients > 0 and call.asked.user_agent == asked.user_agent
            for call in self._open.get(question, ())
        )


def _is_own(call: Call, asked: Asked) -> bool:
    """Return whether `asked` may be a further try of `call`."""
    if asked.idempotency_key is not None and call.idempotency_keys:
        return asked.idempotency_key in call.idempotency_keys
    agent = call.asked.user_agent
    return call.clients == 0 and (agent is None or agent == asked.user_agent)

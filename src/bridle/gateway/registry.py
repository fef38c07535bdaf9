"""The sessions of a gateway: who may call, how much, and what has come of it.

A session is opened with a key of its own and ends by being sealed: from that moment its key is
dead. Of the key only the hash is kept, also in the store, so that a session goes on after its
gateway was killed and started again.

`Tries` are the tries of one session: calls whose reply was lost, tries that were refused, and who
joins. SDKs number their retries but send no id of a call, so tries are counted per question and
user agent. A retry takes a lost call first and gets its reply; else it takes a refused try and is a
new sample; else it waits a moment, in case the connection of its first try is about to close, and
is a new sample then. A call whose client still waits is joined by its own idempotency key only.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import orjson
from pydantic import TypeAdapter, ValidationError

from bridle.capture.records import Outcome, SessionRecord
from bridle.config import CallRule, Limits, SamplingPolicy, explain
from bridle.dialects.history import RequestHistory
from bridle.errors import ConfigError, RequestError
from bridle.gateway import faults
from bridle.gateway.budgets import SamplingPlan, TokenAccount
from bridle.gateway.call import Asked, Call, Question, Stage
from bridle.gateway.keys import PREFIX, key_digest
from bridle.gateway.replay import Replay
from bridle.gateway.responses import Shelf
from bridle.harness_rules import KindRule
from bridle.prompting.canonical import AtomMemo, Canonical
from bridle.prompting.conversation import Conversation
from bridle.prompting.turns import Lineage
from bridle.types import JSON, Message, ModelRequest

if TYPE_CHECKING:
    from bridle.gateway.linear import Tip

CLOSING_S: Final = 0.25
"""Longest wait of a retry for the connection of its first try to close."""

RETRIED: Final = frozenset({408, 409, 429})
"""Statuses below 500 after which the SDKs ask again by themselves."""


def question_key(request: ModelRequest, canonical: Canonical, template_args: Hashable) -> bytes:
    """Return 16 bytes of a hash over all that makes two calls samples of one question.

    `stream` is no part of it.
    """
    whole = canonical.chain[-1] + question_rest(request, canonical.tools_digest, template_args)
    return blake2b(whole, digest_size=16).digest()


def question_rest(request: ModelRequest, tools_digest: bytes, template_args: Hashable) -> bytes:
    """Return the part of a question's hash that covers everything besides the messages."""
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
    return tools_digest + arguments + asked_json


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
        """Register a call that retries may join until its reply is delivered."""
        key = call.question_key
        self._open[key] = [*self._open[key], call] if key in self._open else [call]

    def named(self, call: Call, idempotency_key: str) -> None:
        """Record the idempotency key that a client of the call sent."""
        call.idempotency_keys |= {idempotency_key}
        self._by_idempotency[idempotency_key] = call

    def same_key(self, question: bytes, asked: Asked) -> Call | None:
        """Return the call with the same idempotency key and question, delivered or not."""
        call = self._by_idempotency.get(asked.idempotency_key or "")
        return call if call is not None and call.question_key == question else None

    def end(self, call: Call) -> None:
        """Remove a call that is delivered, failed or cancelled: no retry joins it any more."""
        key = call.question_key
        if (found := self._open.get(key)) is None:
            return
        if left := found[1:] if found[0] is call else [one for one in found if one is not call]:
            self._open[key] = left
        else:
            del self._open[key]

    def failed(self, call: Call) -> None:
        """Record that a call failed; a client that waits must still get the error."""
        self.end(call)
        if not call.clients:
            self._refuse(call.question_key, call.asked.user_agent, call.retry_count)

    def refused(self, question: bytes, asked: Asked, error: RequestError) -> None:
        """Record that a client got `error`; a retry after that is a new sample."""
        if error.status >= 500 or error.status in RETRIED:
            self._refuse(question, asked.user_agent, asked.retry_count)

    def _refuse(self, question: bytes, user_agent: str | None, retry_count: int) -> None:
        self._refused[question, user_agent, retry_count + 1] += 1

    def detached(self) -> None:
        """Wake the requests that wait, because a client has left a call or has its reply."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def find(self, question: bytes, asked: Asked) -> Call | None:
        """Return the call that a retry joins; `None` = there is none now.

        Of several calls without a client, the one whose next retry this is, then the newest.
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
        """Wait until the connection of a retry's first try closes; return whether it had to wait.

        It need not where `find` finds a call, where a try of it was refused (that refusal is then
        used up), and where no call like its own has a client.
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


SESSION_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")

ENDED_KEYS: Final = 10_000
"""Keys of deleted sessions that still get an error that says so; older ones are unknown."""

HEADS: Final = 16
"""Heads of a session's requests that are known at a time."""

FACTS: Final = "facts"
"""Key of an outcome's metadata under which a deleted session's facts stand."""

STORED_AS: Final = "gateway"
"""Key of a session record's metadata under which the gateway keeps what it needs after a crash."""


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """A new session for its opener, with the key, which is shown only here."""

    session_id: str
    key: str
    base_urls: dict[str, str]
    """Base URL per family of clients: `anthropic`, `openai`, `google`."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """Results of a session's calls so far."""

    session_id: str
    calls: int
    """Generation requests that were answered or refused, joined retries included."""
    turns: int
    """Committed exchanges."""
    delivered: int
    """Exchanges whose reply the harness received."""
    failed_last: bool
    """True if the last reply that the harness got from the model was an error."""
    limit: str | None
    """The session limit that a call was refused for (`turns`, `tokens`, `seconds`)."""
    tokens: int
    """Sampled tokens, committed."""
    last_error: str | None
    """Text of the last error that the harness got, and what the engine said in brackets; `None` =
    none."""
    last_error_code: str | None
    """Its kind (`bridle.errors.RequestError.code`); `None` = none."""
    sealed: bool


@dataclass(slots=True)
class InHand:
    """Resources that a session's requests use at the moment."""

    requests: int = 0
    """Those that are being read or answered."""
    size: int = 0
    """Bytes of their bodies."""
    captured: int = 0
    """Bytes of its requests and replies that capture has."""
    refused: int = 0
    """Bytes of bodies that were read and not sampled, since the session's memos were emptied."""
    heads: deque[object] = field(default_factory=lambda: deque(maxlen=HEADS))
    """Their heads that are known (`bridle.gateway.plain`), the newest last."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a long body is parsed."""


class GatewaySession:
    """One session: its conversation, its calls, its counters. Lives on the gateway's loop.

    `ConfigError` for `kind_rules` in the record's metadata that are none.
    """

    tip: Tip | None = None
    """The last turn, if the next one may go on from it without a search."""
    newest: tuple[Call, Question, tuple[Message, ...]] | None = None
    """The last reply that the conversation learned of, as its harness will send it back, until
    `tip_of` asks for it.
    """

    def __init__(self, record: SessionRecord, *, sampling: SamplingPolicy, limits: Limits) -> None:
        self.record = record
        self.session_id = record.session_id
        self.limits = limits
        self.is_limited = limits != Limits()
        self.kind_rules = _kind_rules(record.metadata.get("kind_rules", ()))
        self.plan = SamplingPlan(sampling)
        self.account = TokenAccount(limits.max_tokens)
        self.conversation = Conversation(on_rewrite=sampling.on_rewrite)
        self.lineage = Lineage()
        self.atoms = AtomMemo()
        """Memo of `canonical`."""
        self.messages = RequestHistory()
        """Memo of the dialects: each raw message is split, hashed and decoded once."""
        self.stored: set[bytes] = set()
        """Digests of the bodies that the store has."""
        self.shelf = Shelf()
        """Replies that can be named by their id."""
        self.tries = Tries()
        self.calls: dict[str, Call] = {}
        """Calls in flight and committed, by exchange id; failed ones are not kept."""
        self.running: set[Call] = set()
        """Those of them that are neither committed nor failed."""
        self.replying: dict[asyncio.Task[Any], Call] = {}
        """Handlers that wait for a call or write its reply."""
        self.counted = True
        """False until the facts of an old session are read from the store."""
        self.replay: Replay | None = None
        """The captured replies that it is answered with first, if it is a fork."""
        self.restored = True
        """False until an old session's exchanges are read back."""
        self.in_hand = InHand()
        self.number = 0
        """Its place in the order in which the gateway knew its sessions."""
        self.sealed = False
        self.ended: asyncio.Event | None = None
        """Set when what a seal waits for is over; `None` = not sealed by this process."""
        self.first_call_at: float | None = None
        """By the monotonic clock; `None` before its first call."""
        self._unpaired: set[bytes] = set()
        """Calls without a result that were counted, by their links of the chain."""
        self.requests = 0
        self.begun = 0
        """Calls that were begun, failed ones included; salts the seeds."""
        self.next_index = 0
        """Order of commit of the next exchange."""
        self.turns = self.tokens = self.delivered = 0
        self.failed_last = False
        self.limit: str | None = None
        self.limited = asyncio.Event()  # set once `limit` is
        self.last_error: tuple[str, str] | tuple[None, None] = None, None  # text and code

    def seconds(self) -> float:
        """Return the seconds since the session's first call."""
        now = time.monotonic()
        if self.first_call_at is None:
            self.first_call_at = now
        return now - self.first_call_at

    def facts(self) -> SessionFacts:
        """Return the session's results so far: counts, the limit reached and the last error."""
        return SessionFacts(
            session_id=self.session_id,
            calls=self.requests,
            turns=self.turns,
            delivered=self.delivered,
            failed_last=self.failed_last,
            limit=self.limit,
            tokens=self.tokens,
            last_error=self.last_error[0],
            last_error_code=self.last_error[1],
            sealed=self.sealed,
        )

    def check(self, asked: Canonical) -> None:
        """Raise `RequestError` for a tool result whose call the request does not show.

        Sessions that allow such requests are not checked.
        """
        if asked.pairing.orphans and self.plan.refuses_orphans:
            raise faults.orphan(asked.pairing.orphans[0])

    def new_unpaired(self, asked: Canonical) -> int:
        """Count the calls without a result in `asked` that no committed request showed before."""
        before = len(self._unpaired)
        self._unpaired.update(asked.pairing.unpaired)
        return len(self._unpaired) - before

    def note_limit(self, limit: str) -> None:
        """Record that a call was refused for this limit (`turns`, `tokens`, `seconds`)."""
        self.limit = limit
        self.limited.set()

    def note_error(self, error: RequestError) -> None:
        """Record that the last reply to the harness is an error."""
        self.failed_last = True
        text = f"{error} ({error.reason})" if error.reason else str(error)
        self.last_error = text, error.code

    def forget_conversation(self) -> None:
        """Free the memory that only an open session needs."""
        self.conversation = Conversation()
        self.tip = self.newest = None
        self.calls.clear()
        self.tries = Tries()
        self.atoms = AtomMemo()
        self.messages = RequestHistory()
        self.shelf = Shelf()
        self.stored.clear()


class Registry:
    """All sessions of a gateway, by id and by the hash of their key."""

    def __init__(self) -> None:
        self._by_id: dict[str, GatewaySession] = {}
        self._by_key: dict[bytes, tuple[bytes, GatewaySession]] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._opened = 0

    def __iter__(self) -> Iterator[GatewaySession]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: GatewaySession, digest: bytes) -> None:
        """Register a session under the hash of its key."""
        self._opened += 1
        session.number = self._opened
        self._by_id[session.session_id] = session
        self._by_key[digest] = (digest, session)

    def remove(self, session: GatewaySession, digest: bytes) -> None:
        """Remove a session that could not be opened, or is over."""
        del self._by_id[session.session_id]
        del self._by_key[digest]
        if session.sealed:
            self._ended[digest] = None
            if len(self._ended) > ENDED_KEYS:
                self._ended.popitem(last=False)

    def page(self, after: int, limit: int) -> list[GatewaySession]:
        """Return up to `limit` sessions with numbers above `after`, oldest first."""
        rest = (session for session in self._by_id.values() if session.number > after)
        return list(islice(rest, limit))

    def get(self, session_id: str) -> GatewaySession | None:
        """Return the session of that id, sealed or not; `None` if there is none."""
        return self._by_id.get(session_id)

    def check_new_id(self, session_id: str) -> None:
        """Raise `ConfigError` if a new session cannot have this id."""
        if session_id in self._by_id:
            raise ConfigError(
                f"session {session_id!r} exists already; give the new session another id"
            )
        if not SESSION_ID.fullmatch(session_id) or session_id.startswith(PREFIX):
            raise ConfigError(
                f"session id {session_id!r} is not valid: letters, digits and . _ : - only, at "
                f"most 200, not beginning with {PREFIX!r}"
            )

    def _of_key(self, key: str) -> GatewaySession | None:
        digest = key_digest(key)
        known = self._by_key.get(digest)
        if known is None or not hmac.compare_digest(known[0], digest):
            return None
        return known[1]

    def authenticate(self, path_token: str | None, keys: Sequence[str]) -> GatewaySession:
        """Return the open session that the path and the keys of a request name.

        `path_token` is what follows `/s/`: a session id, or a key; `None` = no such prefix. Keys
        beside a key in the path may be anything that names no other session (clients that want one
        get a dummy). Raises a 401 `RequestError` when nothing, or more than one session, is named.
        """
        if path_token is not None and path_token.startswith(PREFIX):
            keys = (path_token, *keys)
            path_token = None
            if self._of_key(keys[0]) is None and key_digest(keys[0]) not in self._ended:
                raise faults.unauthorized()
        named = {session.session_id: session for key in keys if (session := self._of_key(key))}
        if not named and any(key_digest(key) in self._ended for key in keys):
            raise faults.session_ended()
        if len(named) != 1:
            raise faults.unauthorized()
        (session,) = named.values()
        if path_token is not None and path_token != session.session_id:
            raise faults.unauthorized("the key belongs to another session than the one in the URL")
        if session.sealed:
            raise faults.session_ended()
        return session


def new_session_id() -> str:
    """Return a new id for a session that was opened without one."""
    return f"s-{secrets.token_hex(8)}"


def stored_settings(digest: bytes, sampling: SamplingPolicy, limits: Limits) -> JSON:
    """Return the gateway's settings of a session as its record stores them."""
    return {
        "key_sha256": digest.hex(),
        "sampling": sampling.model_dump(mode="json"),
        "limits": limits.model_dump(mode="json"),
    }


def facts_of(outcome: Outcome | None) -> SessionFacts | None:
    """Return the results of a session that was deleted, from its outcome; `None` = it was not
    deleted.
    """
    kept = None if outcome is None else outcome.metadata.get(FACTS)
    return None if kept is None else SessionFacts(**kept)


_CALL_RULES: Final = TypeAdapter(tuple[CallRule, ...])


def _kind_rules(declared: object) -> tuple[KindRule, ...]:
    try:
        rules = _CALL_RULES.validate_python(declared)
    except ValidationError as error:
        raise explain(error, "metadata.kind_rules") from None
    return tuple(KindRule.declared(**rule.model_dump()) for rule in rules)

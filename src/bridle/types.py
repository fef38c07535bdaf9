"""The vocabulary every room shares: pure data, no I/O, no clock.

Three kinds of data live in Bridle. What crosses a wire is read as plain JSON in the room that owns
the wire. What stays inside is one of the frozen dataclasses below. What we own at an edge (config,
task files, HTTP bodies) is a pydantic model in `bridle.config` or `bridle.server`.

Token ids are one-dimensional `int32` arrays, logprobs one-dimensional `float32` arrays in nats, and
all times are seconds. `None` always means "not given", never zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, dataclass_transform
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Quoted, because numpy loads where it is used.
Ids: TypeAlias = "npt.NDArray[np.int32]"
"""Token ids, shape (T,), int32."""

Logprobs: TypeAlias = "npt.NDArray[np.float32]"
"""Natural-log probabilities of sampled tokens, shape (T,), float32."""

JSON: TypeAlias = dict[str, Any]
"""A JSON object as decoded; only its owner knows its keys."""

C = TypeVar("C")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(*, eq: bool = True) -> Callable[[type[C]], type[C]]:
    """Return a class decorator: `dataclass(slots=True, eq=eq)` that type checkers take for frozen.

    For the forty or so objects that each model call makes: the type checker refuses a change of a
    field, but nothing does so at run time, because a frozen object takes four times as long to
    make.
    """
    return dataclass(slots=True, eq=eq, unsafe_hash=eq)


USER_INFO: Final = re.compile(r"://[^/@\"\s]*@")


def without_user_info(text: str) -> str:
    """Return a text whose URLs have no user names and passwords, so that others may see it."""
    return USER_INFO.sub("://", text)


def is_server_url(text: str) -> bool:
    """Return whether a text is an http:// or https:// URL with a host and, if any, a valid port."""
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna")  # refuses `a..b`, as every connection does
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:
        return False


def one_line(data: bytes) -> bytes:
    """Return JSON text with U+2028, U+2029 and U+0085 escaped, because some clients end a line
    there.
    """
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data.replace(b"\xc2\x85", b"\\u0085") if b"\xc2\x85" in data else data


def first_difference(one: Ids, two: Ids) -> int:
    """Return the first position at which two id arrays differ; the shorter's length if neither
    does.
    """
    shared = min(len(one), len(two))
    (different,) = (one[:shared] != two[:shared]).nonzero()
    return int(different[0]) if len(different) else shared


class Dialect(StrEnum):
    """One provider's wire format, which `bridle.dialects` has in a file of this name."""

    ANTHROPIC = "anthropic"
    """Anthropic Messages."""
    OPENAI_CHAT = "openai_chat"
    """OpenAI Chat Completions."""
    OPENAI_RESPONSES = "openai_responses"
    """OpenAI Responses."""
    GOOGLE = "google"
    """Google generateContent."""


class Kind(StrEnum):
    """Purpose of a model call. Decides which calls train by default."""

    AGENT = "agent"
    """The agent itself; the default."""
    SUBAGENT = "subagent"
    """An agent that the agent started."""
    COMPACTION = "compaction"
    """The call that writes a summary of the conversation."""
    SIDE = "side"
    """Titles, routers, quota probes, memory extraction, judges."""


class FinishReason(StrEnum):
    """Reasons why sampling ended, as the engine knows them; dialects translate."""

    STOP = "stop"
    """The end token, or a stop string or stop token, was sampled."""
    LENGTH = "length"
    """The output budget or the context was used up."""
    ABORT = "abort"
    """The engine gave the call up before its end."""


class LogprobMode(StrEnum):
    """Distribution that a logprob belongs to."""

    PROCESSED = "processed"
    """The distribution that was sampled from: after temperature, top-k and top-p."""
    RAW = "raw"
    """The model's own softmax, before any sampling parameter."""
    NONE = "none"
    """The engine gave no logprobs (`--allow-untokenized` only)."""


class DeliveryState(StrEnum):
    """Delivery of a reply after its commit."""

    DELIVERED = "delivered"
    """All of it was written to a live connection, or a later request shows it."""
    CUT = "cut"
    """Part of it was written before the connection went."""
    ABANDONED = "abandoned"
    """The client had gone before anything was written, and nobody claimed it."""
    SUPERSEDED = "superseded"
    """All of it was written, but its client never had it and asked again, as it said."""


class SessionStatus(StrEnum):
    """Status of a session; `bridle.node.session` has the transitions."""

    REGISTERED = "REGISTERED"
    INITIALIZING = "INITIALIZING"
    READY = "READY"
    RUNNING = "RUNNING"
    BUILDING = "BUILDING"
    EVALUATING = "EVALUATING"
    COMPLETED = "COMPLETED"
    TIMEOUT = "TIMEOUT"
    ERROR = "ERROR"
    CANCELLED = "CANCELLED"


class Cause(StrEnum):
    """Causes why a session did not complete (law 5: never folded into a reward)."""

    INFRASTRUCTURE = "infrastructure"
    """Runtime, engine, store or machine failed; the session may be run again."""
    HARNESS_CRASH = "harness_crash"
    """The harness ended with a non-zero exit code or by a signal."""
    HARNESS_NO_CALL = "harness_no_call"
    """The harness ended without one delivered turn."""
    HARNESS_MODEL_ERROR = "harness_model_error"
    """The harness exited 0, but its last word from the model was an error."""
    TIMEOUT = "timeout"
    """A stage's budget ran out; the result names the stage."""
    LIMIT = "limit"
    """A limit of the session (turns, tokens) or of its runtime (memory, storage, processes) ended
    it; the result names the limit."""
    EVALUATOR = "evaluator"
    """The evaluator itself failed; the reward is unknown, not 0."""
    CANCELLED = "cancelled"
    """Someone asked for it to end."""


class Role(StrEnum):
    """Role of a message in the internal format."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@record()
class TextPart:
    """Text, byte for byte as the harness sent it."""

    text: str


@record()
class MediaPart:
    """An image, document, audio or unknown content block, kept in place."""

    media_type: str
    """MIME type as given, or `application/json` for a block we do not know."""
    digest: str
    """Hex digest of the decoded bytes, of the URL, or of the sorted JSON."""
    source: str
    """A data URL, a URL, or the block's own JSON."""


Part: TypeAlias = TextPart | MediaPart


@record()
class ToolCall:
    """One call that an assistant turn makes."""

    id: str | None
    """The id on the wire; `None` where the dialect has none."""
    name: str
    arguments: str
    """The argument JSON exactly as it came (or a custom tool's raw input); may be malformed."""
    custom: bool = False
    """True for a freeform tool, whose `arguments` are not JSON."""


@record()
class Message:
    """One message of a conversation, in place, losing nothing that the model must see."""

    role: Role
    content: tuple[Part, ...] = ()
    reasoning: str | None = None
    """Reasoning text that came back with an assistant message; evidence, never a key."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """For role `tool`: which call this answers; `None` means by position."""
    name: str | None = None
    """For role `tool`: the tool's name, where the dialect gives it."""
    issued_ids: tuple[str, ...] = ()
    """Other values in this message that we may have issued (item ids, signatures)."""
    unknown: tuple[str, ...] = field(default=(), compare=False)
    """Names of what stood in it and reached nobody, for the record; never a key."""

    @property
    def text(self) -> str:
        """Text parts of the message, joined with nothing between."""
        return "".join([part.text for part in self.content if isinstance(part, TextPart)])


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the harness offers to the model."""

    name: str
    description: str | None
    parameters: JSON | None
    """JSON schema of the arguments; `None` where the dialect allows none."""
    strict: bool = False


@record()
class Sampling:
    """Sampling parameters; `None` = not asked for. Names and meaning are vLLM's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 = all tokens."""
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    """Token id, as text -> what is added to its logit."""


SHAPING = (
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "logit_bias",
)
"""Fields of `Sampling` that make the sampled distribution another than the model's."""


@record()
class VersionSpan:
    """Output tokens `start <= i < end` were sampled under policy `version`."""

    version: int
    start: int
    end: int


@record()
class Reply:
    """An assistant turn as parsed from sampled ids, before any dialect dresses it."""

    content: str
    """Visible text; may be empty."""
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    """Calls with ids that we issue. Arguments that are no JSON stand as they were sampled; blocks
    without a readable name or end stay in `content`."""
    finish_reason: FinishReason
    tokens_unseen: int = 0
    """Sampled tokens that no visible part shows (text that a parser dropped)."""
    stop_text: str | None = None
    """The stop string that ended it, for dialects that name it; `None` = none did."""
    reasoning_tokens: int = 0
    """Sampled tokens inside the reasoning, without what opens and closes it."""
    calls_unread: int = 0
    """Calls without a readable name or end; they stand in `content` as sampled."""
    calls_as_text: int = 0
    """Calls that were sampled where none was wanted; they stand in `content` as sampled."""
    token_logprobs: tuple[tuple[str, float], ...] | None = None
    """Text and logprob of each sampled token, for a client that asked; `None` = it did not."""


@record()
class Usage:
    """Token counts, as every dialect reports them; always what was really used."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@record()
class ModelRequest:
    """One model call of a harness, normalised by its dialect."""

    dialect: Dialect
    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    sampling: Sampling
    """The sampling that the harness requested, before policies apply."""
    stream: bool
    tool_choice: Literal["auto", "none", "required"] | str = "auto"
    """`auto`, `none`, `required`, or the name of the one tool that must be called."""
    response_schema: JSON | None = None
    """JSON schema that the answer must meet; `None` = free text. `{}` = any JSON object."""
    thinking: bool | None = None
    """True = the request switches thinking on, false = off; `None` = it does not say."""
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    head: bytes = b"{}"
    """The request's JSON without its messages and tools, for the record."""
    message_spans: tuple[bytes, ...] = ()
    """Raw JSON of each message or item, in order; what capture stores by content hash."""
    span_digests: tuple[bytes, ...] = ()
    """16-byte content digest of each span (`bridle.dialects.base.content_digest`)."""
    span_lengths: tuple[int, ...] = ()
    """For each span, how many of `messages` it gave, in order; sums to `len(messages)` less the
    leading messages that came from `head` (`head_messages`)."""
    head_messages: int = 0
    """Number of leading messages that came from the head (system prompt, instructions)."""
    tools_span: bytes | None = None
    """Raw JSON of the tool list; `None` = none sent."""
    prefill: str | None = None
    """Text that begins the answer, as the last message gives it; the reply continues from it."""
    logprobs: bool = False
    """True if the client wants the logprobs of what was sampled."""
    include_usage: bool = False
    """OpenAI Chat streams: whether a usage chunk was asked for."""
    extra: JSON = field(default_factory=dict)
    """Data that only this dialect's own encoder needs (e.g. custom tool names), and, for the
    record, `removed`: what `bridle.dialects.fields` rules took away, as `{rule name: [what,
    ...]}`."""

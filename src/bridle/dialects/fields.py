"""The treatment of the fields of a request and its messages, by the tables that each dialect has.

A field is refused if the model would lack context without it. A field that asks for something else
that is not done is served, and its name is in `ModelRequest.extra["unenforced"]`. The name of a
field that is in no table is in `extra["unknown"]`, or in `Message.unknown`.

Named and audited rules (`NoiseRule`) take noise out of a request before the model sees it. Each
rule says what it removes and why that means nothing to the model. The removed texts are in
`ModelRequest.extra["removed"][rule]`, for the exchange's record and for `bridle.harness_rules`; the
record has the original request, too.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from bridle.dialects.ids import is_signature, standard_base64
from bridle.dialects.json_reader import number_at, texts_at, whole_at
from bridle.errors import RequestError
from bridle.types import JSON, Message, Sampling


@dataclass(frozen=True, slots=True)
class NoiseRule:
    """One kind of thing that is removed."""

    name: str
    what: str
    why: str


BILLING = NoiseRule(
    "claude_billing_header",
    "the first system block of a Messages request, if its text starts with "
    "`x-anthropic-billing-header:`",
    "Claude Code writes its version and a checksum of the prompt there for its provider's "
    "accounting. It differs between the conversations of one group, says nothing to the model, and "
    "spoils the shared prefix.",
)
SERVER_TOOLS = NoiseRule(
    "server_tools",
    "tools that the provider itself would run (web search, code execution, Google built-ins)",
    "Only the provider can run them; a model that was shown one would call what nobody answers.",
)
RULES: dict[str, NoiseRule] = {rule.name: rule for rule in (BILLING, SERVER_TOOLS)}
"""Every rule by its name."""


def split_billing(texts: Sequence[str]) -> tuple[int, dict[str, list[str]]]:
    """Return how many leading system blocks are billing headers, and their texts by rule.

    These blocks (`BILLING`) differ in every request and would spoil shared prefixes.
    """
    if texts and texts[0].startswith("x-anthropic-billing-header:"):
        return 1, {BILLING.name: [texts[0]]}
    return 0, {}


class Use(StrEnum):
    """The treatment of a field."""

    USED = "used"
    HARMLESS = "harmless"
    """It says nothing about what the model sees or samples."""
    UNENFORCED = "unenforced"
    """It asks for something that is not done, unless its value asks for nothing."""
    REFUSED = "refused"
    """It names context that only the provider has, or asks for no sample."""


def table(**words: str) -> dict[str, Use]:
    """Return a table of fields: `used="model stream"` says that these two are used."""
    return {name: Use(use) for use, names in words.items() for name in names.split()}


_NOTHING: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "typical_p": (1,),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "responseModalities": (["TEXT"], ["text"]),
    "truncation": ("disabled",),
    "mediaResolution": ("MEDIA_RESOLUTION_UNSPECIFIED",),
}
"""Values that ask for nothing, as do null, false, zero and what is empty."""

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

_SNAKE = re.compile(r"_([a-z])")
_DATE = re.compile(r"[-=]v?20\d\d-?\d\d-?\d\d$")


def unknown_betas(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the beta features in a request's headers (names in lower case) that the gateway does
    not know.
    """
    named = [headers[name] for name in ("anthropic-beta", "openai-beta") if name in headers]
    if not named:
        return ()
    betas = [beta.strip() for value in named for beta in value.split(",")]
    return tuple(beta for beta in betas if beta and _DATE.sub("", beta) not in BETAS)


def ignored_fields(head: JSON, uses: Mapping[str, Use], path: str = "") -> JSON:
    """Return the fields of a request that have no effect, by kind: `unenforced` and `unknown`.

    `path` precedes the names. `RequestError` for a field that is refused.
    """
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
            raise RequestError(
                f"'{full}' is not supported by this gateway; remove it from the request.",
                param=full,
            )
        else:
            found.setdefault("unenforced", []).append(full)
    return dict(found)


def _asks_nothing(name: str, value: Any) -> bool:
    if name == "web_search_options":  # it asks by being there
        return False
    if name == "generate":  # a warm-up, after which nothing is to be sampled
        return value is not False
    if not value or value in _NOTHING.get(name, ()):
        return True
    if name != "context_management" or not isinstance(value, dict):
        return False
    edits = value.get("edits")
    return not edits or (isinstance(edits, list) and all(map(_keeps_all, edits)))


def _keeps_all(edit: Any) -> bool:
    return isinstance(edit, dict) and edit.get("keep") in ("all", {"type": "all"})


FORMATS = ("json_schema", "json_object", "text")
"""Formats of replies that OpenAI's dialects enforce."""


def note_unknown_value(value: Any, known: Collection[str], name: str, ineffective: JSON) -> None:
    """Add the field `name` to the `unenforced` ones of `ineffective` unless its value is null or
    known.
    """
    if value is not None and value not in known:
        ineffective.setdefault("unenforced", []).append(name)


_BOUNDS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 2),
    "min_p": (0, 1),
}
_LEAST = {"top_k": -1, "max_tokens": 1, "min_tokens": 0, "seed": None}


def read_sampling(head: JSON, names: Mapping[str, str], path: str = "", **more: Any) -> Sampling:
    """Return a request's sampling parameters.

    `names` has the wire's name of each one that the dialect knows. `more` are parameters that the
    dialect reads itself.
    """
    for ours, name in names.items():
        if ours in _BOUNDS:
            least, most = _BOUNDS[ours]
            more[ours] = number_at(head, name, path, least=least, most=most)
        elif ours == "stop":
            more[ours] = texts_at(head, name, path)
        else:
            more[ours] = whole_at(head, name, path, least=_LEAST[ours])
    if more.get("top_k") == 0:
        more["top_k"] = -1
    return Sampling(**more)


# ---- inside messages


def members(common: str, **kinds: str) -> dict[str, frozenset[str]]:
    """Return a dialect's `WireFormat.members`; `common` are names that every kind has."""
    return {kind: frozenset(f"{common} {names}".split()) for kind, names in kinds.items()}


_INSIDE = frozenset(
    {"content", "output", "tool_calls", "function", "custom", "function_call", "image_url", "file"}
    | {"input_audio", "parts", "inlineData", "fileData", "functionCall", "functionResponse"}
)
"""Keys of such objects."""

_OPAQUE = {
    "reasoning": ("encrypted_content", ("summary", "content")),
    "thinking": ("signature", ("thinking",)),
    "redacted_thinking": ("data", ()),
    "parts": ("thoughtSignature", ("thought",)),
}
"""Reasoning that only its provider can read: its key, and the keys that its text would have."""

_NO_REASONING = ("skip_thought_signature_validator", "context_engineering_is_the_way_to_go")
"""Signatures that Google documents for turns of other models."""
_NO_REASONING_BASE64 = {base64.b64encode(text.encode()).decode() for text in _NO_REASONING}


def watch_members(
    known: Mapping[str, frozenset[str]], read: Callable[[JSON, str], tuple[Message, ...]]
) -> Callable[[JSON, str], tuple[Message, ...]]:
    """Return `read` changed so that its first message records the members of the wire message that
    are not `known` (`WireFormat.members`).
    """
    common = known["message"]
    flat = {str, type(None)}

    def reads(value: JSON, path: str) -> tuple[Message, ...]:
        messages = read(value, path)
        if (
            "type" not in value
            and value.keys() <= common
            and flat.issuperset(map(type, value.values()))
        ):
            return messages
        unknown: list[str] = []
        _note_unknown(known, value, "message", unknown)
        if not unknown or not messages:
            return messages
        return (replace(messages[0], unknown=tuple(unknown)), *messages[1:])

    return reads


def _note_unknown(
    tables: Mapping[str, frozenset[str]], value: JSON, key: str, found: list[str]
) -> None:
    """Add the names of what is not known of an object and of those inside it."""
    named = value.get("type")
    kind = named if isinstance(named, str) and named else key
    known = tables.get(kind)
    if "parts" in tables:
        value = camel(value)
    if known is None or (kind == "parts" and not known & value.keys()):
        return
    for name, item in value.items():
        if item and name not in known:
            found.append(f"{kind}.{name}")
        if name in _INSIDE:
            for inner in item if type(item) is list else (item,):
                if type(inner) is dict:
                    _note_unknown(tables, inner, name, found)
    if kind not in _OPAQUE:
        return
    sealed, texts = _OPAQUE[kind]
    opaque = value.get(sealed)
    if isinstance(opaque, str) and opaque and not any(value.get(text) for text in texts):
        found += [f"{kind}.{sealed}"] if _is_foreign(opaque) else []


def _is_foreign(opaque: str) -> bool:
    """Return whether a signature of another provider replaces reasoning."""
    mark = standard_base64(opaque)
    return not (opaque in _NO_REASONING or mark in _NO_REASONING_BASE64 or is_signature(mark))


def camel(value: JSON) -> JSON:
    """Return the object with its own keys in camelCase; objects inside it are unchanged."""
    if "_" not in "".join(value):
        return value
    return {_SNAKE.sub(lambda found: found[1].upper(), key): item for key, item in value.items()}

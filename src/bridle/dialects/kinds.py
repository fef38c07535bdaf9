"""Kinds of call (agent, sub-agent, compaction, side), read from headers and shapes.

Rules are tried in order and the first that applies decides; `agent` is the default, and having no
tools is no rule by itself. A rule that reads contents counts for the harnesses that it was read
from only: a task about titles or commit messages looks the same. They know
the marks that harnesses put on the wire (recorded November 2026), and read what noise rules removed
from `ModelRequest.extra["removed"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TypeAlias

import msgspec

from bridle.dialects.noise import BILLING, SERVER_TOOLS
from bridle.types import Dialect, Kind, ModelRequest, Role

Headers: TypeAlias = Mapping[str, str]
"""Request headers with lower-case names."""


@dataclass(frozen=True, slots=True)
class KindRule:
    """One mark by which a kind of call is known."""

    name: str
    kind: Kind
    why: str
    applies: Callable[[Headers, ModelRequest], bool]
    harnesses: frozenset[str] = frozenset()
    """Harnesses whose calls it was read from; of others it says nothing. Empty = any: the mark is a
    header or field that only its harness sends."""
    by_head: bool = False
    """Whether it looks at headers and `ModelRequest.extra` only."""

    @classmethod
    def declared(
        cls,
        name: str,
        kind: Kind,
        *,
        system_contains: str | None = None,
        last_user_contains: str | None = None,
        model: str | None = None,
        user_agent: str | None = None,
    ) -> KindRule:
        """A rule of a user's own (`bridle.config.CallRule`): all marks that are given must hold."""

        def applies(headers: Headers, request: ModelRequest) -> bool:
            return (
                (system_contains or "") in _system_text(request)
                and (last_user_contains or "") in _last_user_text(request)
                and fnmatchcase(request.model, model or "*")
                and (user_agent or "").lower() in headers.get("user-agent", "").lower()
            )

        return cls(name, kind, "Declared for the session's harness.", applies)


def _removed(request: ModelRequest, rule: str) -> list[str]:
    found: list[str] = request.extra.get("removed", {}).get(rule, [])
    return found


def _last_user_text(request: ModelRequest) -> str:
    """The text of the last message, if the user says it."""
    last = request.messages[-1]
    return last.text if last.role is Role.USER else ""


def _system_text(request: ModelRequest) -> str:
    """The text of the first message, if it is the system's."""
    first = request.messages[0]
    return first.text if first.role is Role.SYSTEM else ""


def _holds(text: str, marks: Iterable[str]) -> bool:
    """Return whether one of the marks stands in a text."""
    return any(map(text.__contains__, marks))


def _codex_turn(headers: Headers) -> str | None:
    """`request_kind` in Codex's turn metadata; `None` where there is none or it is no JSON."""
    told = headers.get("x-codex-turn-metadata")
    if told is None:
        return None
    try:
        metadata = msgspec.json.decode(told)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    found = metadata.get("request_kind") if isinstance(metadata, dict) else None
    return found if isinstance(found, str) else None


def _is_codex_compaction(headers: Headers, request: ModelRequest) -> bool:
    if "x-codex-turn-metadata" in headers and _codex_turn(headers) == "compaction":
        return True
    if "x-openai-subagent" in headers and headers["x-openai-subagent"] == "compact":
        return True
    return "dress" in request.extra and bool(getattr(request.extra["dress"], "compacts", False))


ASKS_FOR_SUMMARY = (
    "CONTEXT CHECKPOINT COMPACTION",  # Codex
    "Respond with TEXT ONLY",  # Claude Code
    "the component that summarizes",  # Qwen Code
    "a summarization agent creating a context checkpoint",  # Hermes Agent
)
"""In the last message of a user, whatever the tools."""
SUMMARISES = (
    "<state_snapshot>",  # Gemini CLI
    "tasked with summarizing conversations",  # older opencode and pi
    "a context summarization a",  # opencode (agent), pi (assistant)
    "context-aware state summary",  # OpenHands
    "Summarize the provided coding session",  # Cline
)
"""In the system text of a call without tools."""


def _is_summary(headers: Headers, request: ModelRequest) -> bool:
    del headers
    text = _last_user_text(request)
    if _holds(text, ASKS_FOR_SUMMARY):
        return True
    if text.startswith("Please create a detailed summary"):  # Copilot
        return True
    if request.tools:
        return False
    system = _system_text(request)
    return _holds(system, SUMMARISES) or "<state_snapshot>" in text


def _is_subagent(headers: Headers, request: ModelRequest) -> bool:
    del request
    return (
        "x-claude-code-agent-id" in headers
        or "x-codex-parent-thread-id" in headers
        or "x-parent-session-id" in headers
        or headers.get("x-interaction-type") == "conversation-subagent"
        or headers.get("x-openai-subagent") not in (None, "compact", "review")
    )


def _is_billed_subagent(headers: Headers, request: ModelRequest) -> bool:
    del headers
    if not request.extra.get("removed"):
        return False
    removed = _removed(request, BILLING.name)
    billed = "".join(removed).replace(" ", "") if removed else ""
    return "cc_is_subagent" in billed and "cc_is_subagent=false" not in billed


def _is_title(headers: Headers, request: ModelRequest) -> bool:
    del headers
    if request.tools:
        return False
    wanted = (request.response_schema or {}).get("properties")
    if isinstance(wanted, dict) and list(wanted) == ["title"]:
        return True
    return _system_text(request).startswith("You are a title generator")


def _is_name(headers: Headers, request: ModelRequest) -> bool:
    del headers
    asks = _system_text(request) == "Generate concise conversation titles."
    return asks and not request.tools


def _is_hello(headers: Headers, request: ModelRequest) -> bool:
    del headers
    says = _last_user_text(request) == "Please say 'hello, world'"
    return says and len(request.messages) == 1 and not request.tools


def _is_router(headers: Headers, request: ModelRequest) -> bool:
    del headers
    wanted = (request.response_schema or {}).get("properties")
    if request.tools or not isinstance(wanted, dict):
        return False
    return "model_choice" in wanted or "next_speaker" in wanted


REMEMBERS = (
    "managed memory extraction",  # Qwen Code, after a turn
    "a managed memory dream",  # Qwen Code, between sessions
    "saving one explicit durable memory",  # Qwen Code, by its `remember` command
)
"""In the system text or the last message of a user; such an agent has tools of its own."""


def _is_memory(headers: Headers, request: ModelRequest) -> bool:
    del headers
    system, text = _system_text(request), _last_user_text(request)
    return _holds(system, REMEMBERS) or _holds(text, REMEMBERS)


def _is_commit_message(headers: Headers, request: ModelRequest) -> bool:
    del headers
    return not request.tools and "Git commit messages" in _system_text(request)


SEARCHERS = ("claude-cli/", "GeminiCLI")
"""Beginnings of the user agents whose harnesses search by a request of its own."""


def _is_search(headers: Headers, request: ModelRequest) -> bool:
    ours = headers.get("user-agent", "").startswith(SEARCHERS)
    return ours and not request.tools and bool(_removed(request, SERVER_TOOLS.name))


def _is_probe(headers: Headers, request: ModelRequest) -> bool:
    del headers
    return (
        request.dialect is Dialect.ANTHROPIC
        and request.sampling.max_tokens == 1
        and not request.tools
        and len(request.messages) == 1
    )


def _of(names: str) -> frozenset[str]:
    return frozenset(names.split())


USER_AGENTS: Mapping[str, frozenset[str]] = {
    "claude-cli": _of("claude_code claude_agent_sdk qwen_code"),
    "codex": _of("codex"),
    "geminicli": _of("gemini_cli"),
    "qwencode": _of("qwen_code"),
    "opencode": _of("opencode"),
    "cline": _of("cline"),
    "copilot": _of("copilot"),
    "openhands": _of("openhands"),
    "openclaw": _of("openclaw"),
    "hermes": _of("hermes"),
    "aider": _of("aider"),
}
"""Mark in a user agent -> the harnesses that send it. Several speak as a bare SDK: they are
known by their session's harness only."""


RULES: tuple[KindRule, ...] = (
    KindRule(
        "codex_compaction",
        Kind.COMPACTION,
        "Codex says so in its turn metadata, or asks for a compaction item.",
        _is_codex_compaction,
        by_head=True,
    ),
    KindRule(
        "summary_request",
        Kind.COMPACTION,
        "The last words, or the system text of a call without tools, ask for the summary in which "
        "the conversation goes on (Claude Code, Cline, Codex, Copilot, Gemini CLI, Hermes, "
        "openclaw, opencode, OpenHands, pi, Qwen Code).",
        _is_summary,
        _of(
            "claude_code claude_agent_sdk cline codex copilot gemini_cli hermes openclaw opencode "
            "openhands pi qwen_code"
        ),
    ),
    KindRule(
        "title",
        Kind.SIDE,
        "A title for the session (Claude Code, opencode).",
        _is_title,
        _of("claude_code claude_agent_sdk opencode"),
    ),
    KindRule(
        "conversation_name",
        Kind.SIDE,
        "A name for the conversation (gptme).",
        _is_name,
        _of("gptme"),
    ),
    KindRule(
        "summaries_probe",
        Kind.SIDE,
        "One greeting asks whether reasoning summaries are served (Inspect).",
        _is_hello,
        _of("inspect_ai"),
    ),
    KindRule(
        "router",
        Kind.SIDE,
        "One JSON call chooses a model, or asks who speaks next (Gemini CLI, Qwen Code).",
        _is_router,
        _of("gemini_cli qwen_code"),
    ),
    KindRule(
        "memory",
        Kind.SIDE,
        "An agent beside it keeps memories (Qwen Code).",
        _is_memory,
        _of("qwen_code"),
    ),
    KindRule(
        "commit_message",
        Kind.SIDE,
        "A commit message for what was done (aider).",
        _is_commit_message,
        _of("aider"),
    ),
    KindRule(
        "search",
        Kind.SIDE,
        "The only tool is one that the provider would run: a search as a request of its own "
        "(Claude Code, Gemini CLI).",
        _is_search,
        _of("claude_code claude_agent_sdk gemini_cli"),
    ),
    KindRule(
        "quota_probe",
        Kind.SIDE,
        "One token of one message without tools.",
        _is_probe,
        _of("claude_code claude_agent_sdk"),
    ),
    KindRule(
        "subagent_header",
        Kind.SUBAGENT,
        "A header names the parent or the sub-agent (Claude Code, Codex, opencode, Copilot).",
        _is_subagent,
        by_head=True,
    ),
    KindRule(
        "billed_subagent",
        Kind.SUBAGENT,
        "Claude Code's billing block marks its sub-agents.",
        _is_billed_subagent,
        by_head=True,
    ),
)
"""All rules, in the order in which they are tried."""


def kind_of(
    headers: Headers,
    request: ModelRequest,
    harness: str | None = None,
    declared: Sequence[KindRule] = (),
) -> tuple[Kind, str | None]:
    """The kind of a call and the rule that decided; `None` = the default.

    Rules that the session `declared` come first. Packaged rules that read contents apply to the
    harnesses that they were read from only: by the name of the session's `harness`, or by the user
    agent.
    """
    for rule in (*declared, *_rules_of(headers.get("user-agent", ""), harness)):
        if rule.applies(headers, request):
            return rule.kind, rule.name
    return Kind.AGENT, None


def decided_by_head(headers: Headers, harness: str | None, declared: Sequence[KindRule]) -> bool:
    """Return whether requests with one head and one `ModelRequest.extra` are of one kind."""
    rules = (*declared, *_rules_of(headers.get("user-agent", ""), harness))
    return all(rule.by_head for rule in rules)


@lru_cache(maxsize=64)
def _rules_of(agent: str, harness: str | None) -> tuple[KindRule, ...]:
    """The packaged rules for a user agent and the session's harness."""
    agent = agent.lower()
    callers = {harness}.union(*(names for mark, names in USER_AGENTS.items() if mark in agent))
    return tuple(rule for rule in RULES if not rule.harnesses or rule.harnesses & callers)

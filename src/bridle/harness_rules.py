"""Facts about harnesses that the gateway and the adapters share: one row per harness.

A row has the harness's adapter, its user agents, its kinds of call, its noise, its shell tool. The
adapter, which installs and starts the program, is in `bridle.harnesses`. Adding a harness is its
adapter and its row.

Rules classify a call as agent, sub-agent, compaction or side call. Their texts and headers are
those of requests that were recorded in November 2026. A rule reads what the dialects' noise rules
removed from `ModelRequest.extra["removed"]`.

A prompt is compared with its capture here, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, TypeAlias

import msgspec

from bridle.dialects.fields import BILLING, SERVER_TOOLS
from bridle.types import Dialect, Kind, ModelRequest, Role

Headers: TypeAlias = Mapping[str, str]
"""Request headers with lower-case names."""

Applies: TypeAlias = Callable[[Headers, ModelRequest], bool]
"""Test of a rule."""


@dataclass(frozen=True, slots=True)
class KindRule:
    """A test of one request that decides its kind of call."""

    name: str
    kind: Kind
    applies: Applies
    universal: bool = False
    """True if it is tried for every harness, because it looks at a header or field that no other
    program sends. A rule that reads contents is tried for the harnesses whose rows name it only: a
    task about titles or commit messages looks the same."""

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
        """Return a user's own rule (`bridle.config.CallRule`): every given condition must hold."""

        def applies(headers: Headers, request: ModelRequest) -> bool:
            return (
                (system_contains or "") in system_text(request)
                and (last_user_contains or "") in last_user_text(request)
                and fnmatchcase(request.model, model or "*")
                and (user_agent or "").lower() in headers.get("user-agent", "").lower()
            )

        return cls(name, kind, applies)


@dataclass(frozen=True, slots=True)
class Varying:
    """A text that a harness writes anew in each run."""

    name: str
    pattern: re.Pattern[str]
    remedy: str = ""
    """Setting with which it is the same in each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRules:
    """The row of one harness."""

    adapter: str | None = None
    """`module:Class` of its adapter; `None` = Bridle does not run it, but recognises its calls."""
    user_agents: tuple[str, ...] = ()
    """Parts of the `User-Agent` headers that it sends, in lower case. Several harnesses send that
    of a bare SDK: they are recognised by the session's harness only."""
    kinds: tuple[KindRule, ...] = ()
    """Rules about the contents of its calls."""
    summary_requests: tuple[str, ...] = ()
    """Texts of the last user message by which it asks for a summary of the conversation."""
    summary_prompts: tuple[str, ...] = ()
    """Texts of the system message of such a call, where it has no tools."""
    noise: tuple[Varying, ...] = ()
    shell_tools: tuple[str, ...] = ()
    """Names of its tools that run a command, in lower case, the preferred one first."""


def last_user_text(request: ModelRequest) -> str:
    """Return the text of the last message if it is a user's, else an empty text."""
    last = request.messages[-1]
    return last.text if last.role is Role.USER else ""


def system_text(request: ModelRequest) -> str:
    """Return the text of the first message if it is the system's, else an empty text."""
    first = request.messages[0]
    return first.text if first.role is Role.SYSTEM else ""


VARYING = (
    Varying("session_folder", re.compile(r"/bridle-[a-z0-9_]{8}/[0-9a-f]{8}\b")),
    Varying(
        "date",
        re.compile(
            r"(?i)\b(?:current|today's)[ _]date(?:time| and time)?(?:>|:| is:?) ?"
            r"(?:\d{4}-\d\d-\d\d(?:T[\d:.]+(?:Z|[+-]\d\d:\d\d)?)?|\w+,? \w+ \d+,? \d{4})"
        ),
    ),
)
"""Texts of many harnesses in which a fork may differ from its capture: the folder of a session in
runtime `local`, and the date of the run."""

CAUSES = (
    Varying("an address in memory", re.compile(r"\b0x[0-9a-fA-F]{6,}\b"), "print another text"),
    Varying(
        "a temporary path",
        re.compile(r"/tmp/[\w.-]+|\btmp[a-z0-9_]{8}\b"),  # noqa: S108 - is searched for
        "use a fixed path, such as one in the work folder",
    ),
    Varying(
        "a random id",
        re.compile(r"\b(?=[a-f-]*\d)(?=[\d-]*[a-f])[0-9a-f]{6,}(?:-[0-9a-f]{4,12})*\b"),
        "seed the program, or have it use a fixed id",
    ),
    Varying(
        "a clock",
        re.compile(
            r"\b\d{4}-\d\d-\d\d(?:[T ]\d?\d:\d\d[\d:.,]*Z?)?|\b\d?\d:\d\d(?::\d\d)?(?:[.,]\d+)?"
            r"|\b1[6-9]\d{8}(?:\d{3})?(?:\.\d+)?\b"
        ),
        "run the program under `faketime`",
    ),
    Varying(
        "a duration",
        re.compile(r"\b\d+(?:\.\d+)? ?(?:ns|us|ms|s|sec|secs|seconds?|minutes?)\b"),
        "have the program print no durations",
    ),
)
"""Usual causes of texts that are not the same in two runs of a program."""


def likely_cause(old: str, new: str) -> str | None:
    """Return why two texts of requests differ, and the setting that makes them equal; `None` =
    unknown.
    """
    if sorted(re.findall(r"\w+", old)) == sorted(re.findall(r"\w+", new)):
        return "the order of words (of a set?); set `agent.env.PYTHONHASHSEED` for a Python program"
    names = differing(old, new, CAUSES)
    found = [rule for rule in CAUSES if rule.name in (names or ())]
    return "; ".join(f"{rule.name}: {rule.remedy}" for rule in found) or None


def differing(old: str, new: str, rules: Sequence[Varying]) -> tuple[str, ...] | None:
    """Return the names of the rules whose varying parts are all that two texts differ in.

    `None` = they differ in more.
    """
    names: list[str] = []
    for rule in rules:
        if rule.pattern.findall(old) != rule.pattern.findall(new):
            names.append(rule.name)
        old, new = (rule.pattern.sub(f"<{rule.name}>", text) for text in (old, new))
    return tuple(names) if old == new else None


def _contains(text: str, marks: Iterable[str]) -> bool:
    return any(map(text.__contains__, marks))


def _removed(request: ModelRequest, rule: str) -> list[str]:
    found: list[str] = request.extra.get("removed", {}).get(rule, [])
    return found


def _schema_fields(request: ModelRequest) -> list[str]:
    """Return the fields of the JSON reply that a call without tools asks for."""
    fields = (request.response_schema or {}).get("properties")
    return list(fields) if isinstance(fields, dict) and not request.tools else []


def _rule(name: str, kind: Kind, *, universal: bool = False) -> Callable[[Applies], KindRule]:
    """Return the decorator that makes a rule of its test."""
    return lambda applies: KindRule(name, kind, applies, universal)


# ---- compaction


def _codex_request_kind(headers: Headers) -> str | None:
    """Return `request_kind` of Codex's turn metadata; `None` = there is none, or it is no JSON."""
    try:
        metadata = msgspec.json.decode(headers["x-codex-turn-metadata"])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    kind = metadata.get("request_kind") if isinstance(metadata, dict) else None
    return kind if isinstance(kind, str) else None


@_rule("codex_compaction", Kind.COMPACTION, universal=True)
def _codex_compaction(headers: Headers, request: ModelRequest) -> bool:
    """Return whether Codex says so in its turn metadata, or asks for a compaction item."""
    if "x-codex-turn-metadata" in headers and _codex_request_kind(headers) == "compaction":
        return True
    if "x-openai-subagent" in headers and headers["x-openai-subagent"] == "compact":
        return True
    return "dress" in request.extra and bool(getattr(request.extra["dress"], "compacts", False))


@_rule("summary_request", Kind.COMPACTION)
def _summary(_: Headers, request: ModelRequest) -> bool:
    """Return whether it asks for the summary with which the conversation continues.

    The last user message does, or the system message of a call without tools.
    """
    text = last_user_text(request)
    if _contains(text, _SUMMARY_REQUESTS):
        return True
    if text.startswith("Please create a detailed summary"):  # Copilot
        return True
    if request.tools:
        return False
    # Gemini CLI asks in the user's message, too.
    return _contains(system_text(request), _SUMMARY_PROMPTS) or "<state_snapshot>" in text


# ---- side calls


@_rule("title", Kind.SIDE)
def _title(_: Headers, request: ModelRequest) -> bool:
    if request.tools:
        return False
    starts = system_text(request).startswith("You are a title generator")
    return _schema_fields(request) == ["title"] or starts


@_rule("conversation_name", Kind.SIDE)
def _name(_: Headers, request: ModelRequest) -> bool:
    """Return whether it asks for a name of the conversation (gptme)."""
    asks = system_text(request) == "Generate concise conversation titles."
    return asks and not request.tools


@_rule("summaries_probe", Kind.SIDE)
def _hello(_: Headers, request: ModelRequest) -> bool:
    """Return whether it is Inspect's greeting, which shows whether summaries are served."""
    says = last_user_text(request) == "Please say 'hello, world'"
    return says and len(request.messages) == 1 and not request.tools


@_rule("router", Kind.SIDE)
def _router(_: Headers, request: ModelRequest) -> bool:
    """Return whether its JSON reply chooses a model, or who speaks next."""
    return not {"model_choice", "next_speaker"}.isdisjoint(_schema_fields(request))


_MEMORY_AGENTS = (
    "managed memory extraction",  # after a turn
    "a managed memory dream",  # between sessions
    "saving one explicit durable memory",  # by the `remember` command
)


@_rule("memory", Kind.SIDE)
def _memory(_: Headers, request: ModelRequest) -> bool:
    """Return whether the system or the user speaks to an agent of its memory, which has tools."""
    texts = system_text(request), last_user_text(request)
    return any(_contains(text, _MEMORY_AGENTS) for text in texts)


@_rule("commit_message", Kind.SIDE)
def _commit(_: Headers, request: ModelRequest) -> bool:
    return not request.tools and "Git commit messages" in system_text(request)


@_rule("search", Kind.SIDE)
def _search(headers: Headers, request: ModelRequest) -> bool:
    """Return whether it is a search by itself: its only tool is one that the provider would run."""
    sender = headers.get("user-agent", "").startswith(("claude-cli/", "GeminiCLI"))
    return sender and not request.tools and bool(_removed(request, SERVER_TOOLS.name))


@_rule("quota_probe", Kind.SIDE)
def _probe(_: Headers, request: ModelRequest) -> bool:
    """Return whether it asks for one token after one message, without tools."""
    return (
        request.dialect is Dialect.ANTHROPIC
        and request.sampling.max_tokens == 1
        and not request.tools
        and len(request.messages) == 1
    )


# ---- sub-agents


@_rule("subagent_header", Kind.SUBAGENT, universal=True)
def _subagent(headers: Headers, _: ModelRequest) -> bool:
    """Return whether a header names the parent or the sub-agent."""
    return (
        "x-claude-code-agent-id" in headers
        or "x-codex-parent-thread-id" in headers
        or "x-parent-session-id" in headers  # opencode
        or headers.get("x-interaction-type") == "conversation-subagent"  # Copilot
        or headers.get("x-openai-subagent") not in (None, "compact", "review")  # Codex
    )


@_rule("billed_subagent", Kind.SUBAGENT, universal=True)
def _billed(_: Headers, request: ModelRequest) -> bool:
    """Return whether Claude Code's billing block marks it as a sub-agent's."""
    if not request.extra.get("removed"):
        return False
    removed = _removed(request, BILLING.name)
    billed = "".join(removed).replace(" ", "") if removed else ""
    return "cc_is_subagent" in billed and "cc_is_subagent=false" not in billed


KIND_RULES: Final = (
    *(_codex_compaction, _summary, _title, _name, _hello, _router, _memory, _commit, _search),
    *(_probe, _subagent, _billed),
)
"""All rules, in the order in which they are tried."""

# ---- harnesses

_CLAUDE_KINDS = (_summary, _title, _search, _probe, _subagent, _billed)
_PI_SUMMARY = "a context summarization a"

HARNESS_RULES: Final[dict[str, HarnessRules]] = {
    "aider": HarnessRules(
        adapter="bridle.harnesses.aider:Aider",
        user_agents=("aider",),
        kinds=(_commit,),
    ),
    "claude_agent_sdk": HarnessRules(
        adapter="bridle.harnesses.sdk_agents:ClaudeAgentSdk",
        user_agents=("claude-cli",),
        kinds=_CLAUDE_KINDS,
        summary_requests=("Respond with TEXT ONLY",),
        shell_tools=("bash",),
    ),
    "claude_code": HarnessRules(
        adapter="bridle.harnesses.claude_code:ClaudeCode",
        user_agents=("claude-cli",),
        kinds=_CLAUDE_KINDS,
        summary_requests=("Respond with TEXT ONLY",),
        shell_tools=("bash",),
    ),
    "cline": HarnessRules(
        adapter="bridle.harnesses.cline:Cline",
        user_agents=("cline",),
        kinds=(_summary,),
        summary_prompts=("Summarize the provided coding session",),
        shell_tools=("run_commands", "execute_command"),
    ),
    "codex": HarnessRules(
        adapter="bridle.harnesses.codex:Codex",
        user_agents=("codex",),
        kinds=(_codex_compaction, _summary, _subagent),
        summary_requests=("CONTEXT CHECKPOINT COMPACTION",),
        noise=(
            Varying("exec_result", re.compile(r"Chunk ID: [0-9a-f]{6}\nWall time: [\d.]+ seconds")),
        ),
        shell_tools=("shell", "exec_command", "shell_command", "local_shell"),
    ),
    "command": HarnessRules(adapter="bridle.harnesses.command:CommandHarness"),
    "copilot": HarnessRules(
        adapter="bridle.harnesses.copilot:Copilot",
        user_agents=("copilot",),
        kinds=(_summary, _subagent),
        noise=(Varying("session_id", re.compile(r"/session-state/[0-9a-f-]{36}")),),
        shell_tools=("bash", "run_in_terminal"),
    ),
    "function": HarnessRules(adapter="bridle.harnesses.function:FunctionHarness"),
    "gemini_cli": HarnessRules(
        adapter="bridle.harnesses.gemini_cli:GeminiCli",
        user_agents=("geminicli",),
        kinds=(_summary, _router, _search),
        summary_prompts=("<state_snapshot>",),
        shell_tools=("run_shell_command",),
    ),
    "google_adk": HarnessRules(
        adapter="bridle.harnesses.sdk_agents:GoogleAdk", shell_tools=("bash",)
    ),
    "gptme": HarnessRules(kinds=(_name,)),
    "hermes": HarnessRules(
        adapter="bridle.harnesses.hermes:Hermes",
        user_agents=("hermes",),
        kinds=(_summary,),
        summary_requests=("a summarization agent creating a context checkpoint",),
        shell_tools=("terminal",),
    ),
    "inspect_ai": HarnessRules(kinds=(_hello,)),
    "mini_swe_agent": HarnessRules(
        adapter="bridle.harnesses.mini_swe_agent:MiniSweAgent", shell_tools=("bash",)
    ),
    "openai_agents": HarnessRules(
        adapter="bridle.harnesses.sdk_agents:OpenaiAgents", shell_tools=("bash",)
    ),
    "openclaw": HarnessRules(
        adapter="bridle.harnesses.pi:Openclaw",
        user_agents=("openclaw",),
        kinds=(_summary,),
        summary_prompts=(_PI_SUMMARY,),
        noise=(
            Varying("clock", re.compile(r"\[\w{3} \d{4}-\d\d-\d\d \d\d:\d\d \w+\]")),
            Varying(
                "session_id", re.compile(r"\b(?:agent:main:explicit:|sessionId=)[0-9a-f-]{36}")
            ),
        ),
        shell_tools=("exec",),
    ),
    "opencode": HarnessRules(
        adapter="bridle.harnesses.opencode:Opencode",
        user_agents=("opencode",),
        kinds=(_summary, _title, _subagent),
        # The second is that of older versions.
        summary_prompts=(_PI_SUMMARY, "tasked with summarizing conversations"),
        shell_tools=("bash",),
    ),
    "openhands": HarnessRules(
        adapter="bridle.harnesses.sdk_agents:Openhands",
        user_agents=("openhands",),
        kinds=(_summary,),
        summary_prompts=("context-aware state summary",),
        shell_tools=("terminal", "execute_bash"),
    ),
    "pi": HarnessRules(
        adapter="bridle.harnesses.pi:Pi",
        kinds=(_summary,),
        # The second is that of older versions.
        summary_prompts=(_PI_SUMMARY, "tasked with summarizing conversations"),
        shell_tools=("bash",),
    ),
    "qwen_code": HarnessRules(
        adapter="bridle.harnesses.gemini_cli:QwenCode",
        user_agents=("claude-cli", "qwencode"),
        kinds=(_summary, _router, _memory),
        summary_requests=("the component that summarizes",),
        shell_tools=("run_shell_command",),
    ),
}
"""By the harness's short name, in the order of the alphabet."""

_SUMMARY_REQUESTS = tuple(
    {mark: None for row in HARNESS_RULES.values() for mark in row.summary_requests}
)
_SUMMARY_PROMPTS = tuple(
    {mark: None for row in HARNESS_RULES.values() for mark in row.summary_prompts}
)


# ---- kinds of calls


def kind_of(
    headers: Headers,
    request: ModelRequest,
    harness: str | None = None,
    declared: Sequence[KindRule] = (),
) -> tuple[Kind, str | None]:
    """Return the kind of a model call and the name of the rule that decided; `None` = the default.

    Rules that the session `declared` come first. A built-in rule that reads contents is tried only
    where the session's `harness` or the user agent names a harness whose row has it.
    """
    for rule in (*declared, *_rules_of(headers.get("user-agent", ""), harness)):
        if rule.applies(headers, request):
            return rule.kind, rule.name
    return Kind.AGENT, None


def decided_by_head(headers: Headers, harness: str | None, declared: Sequence[KindRule]) -> bool:
    """Return whether all requests with these headers and equal fields besides messages are of one
    kind.
    """
    rules = (*declared, *_rules_of(headers.get("user-agent", ""), harness))
    return all(rule.universal for rule in rules)


@lru_cache(maxsize=64)
def _rules_of(agent: str, harness: str | None) -> tuple[KindRule, ...]:
    agent = agent.lower()
    senders = {
        name
        for name, row in HARNESS_RULES.items()
        if name == harness or any(mark in agent for mark in row.user_agents)
    }
    own = {rule.name for name in senders for rule in HARNESS_RULES[name].kinds}
    return tuple(rule for rule in KIND_RULES if rule.universal or rule.name in own)

"""Agent loops that run against the gateway, and the facts that each leaves.

A row is a program of `programs/` with its arguments, the environment that it needs (a lock in
`locks/`), the script of the engine, and the result: conversations, turns and forks. The suite
asserts every row on a real run; `scripts/make_harness_table` writes the rows to docs/harnesses.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Turns = Sequence[Mapping[str, Any]]
Script = list[dict[str, Any]]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


COUNT: Turns = [
    {
        "reasoning": "I need both cities.",
        "content": "Let me look.",
        "tool_calls": [call("population", city="Oslo")],
    },
    {
        "reasoning": "Bergen is missing.",
        "tool_calls": [call("population", city="Bergen"), call("add", a=717710, b=0)],
    },
    {"tool_calls": [call("add", a=717710, b=291940)]},
]
"""Three turns with tools: text beside a call, two parallel calls, a call alone."""
SHELL = {"content": "```shell\necho 1009650\n```"}
TOTAL = {"content": "Together 1009650."}
AGAIN: Turns = [
    {"reasoning": "Asked again.", "tool_calls": [call("population", city="Oslo")]},
    {"content": "Oslo alone has 717710."},
]
"""The turns of the second question."""
WHOLE: Turns = [*COUNT, TOTAL, *AGAIN]


def plain(*turns: Mapping[str, Any]) -> Script:
    """A script that plays `turns` in every conversation."""
    return [{"turns": [*turns]}]


def team(lead: Turns, worker: Turns, skip: int) -> Script:
    """A script for a lead that hands over to a worker, who sees `skip` turns of the lead."""
    return [
        {"when": {"tools_include": "transfer_to_counter"}, "turns": list(lead)},
        {"when": {"tools_include": "population"}, "turns": list(worker), "skip": skip},
    ]


SUMMARY: Script = [
    {"when": {"user_contains": "Context Extraction"}, "turns": [{"content": "Oslo: 717710."}]},
    {"when": {"user_contains": "summary of the conversation"}, "turns": list(AGAIN), "skip": 1},
    {"turns": list(WHOLE)},
]


CODE: Turns = [
    {"content": "Thought: look.\n<code>\nprint(population(city='Oslo'))\n</code>"},
    {"content": "Thought: add.\n<code>\nfinal_answer(add(717710, 291940))\n</code>"},
]


EDITOR = "str_replace_based_edit_tool"
CODING: Turns = [
    {
        "reasoning": "A file first.",
        "content": "I write it.",
        "tool_calls": [call(EDITOR, command="create", path="a.py", file_text="print(717710)\n")],
    },
    {
        "tool_calls": [
            call("bash", command="python3 -V && cat a.py"),
            call(EDITOR, command="view", path="a.py"),
        ]
    },
    {"reasoning": "Hm.", "tool_calls": [call("bash", command="cat missing.py")]},
    {
        "content": "Not there.",
        "tool_calls": [
            call(EDITOR, command="str_replace", path="a.py", old_str="717710", new_str="1009650")
        ],
    },
    TOTAL,
]
CLICKS: Turns = [
    {"reasoning": "Look.", "tool_calls": [call("computer", action="screenshot")]},
    *(
        {
            "content": f"{x}.",
            "tool_calls": [call("computer", action="left_click", coordinate=[x, 9])],
        }
        for x in range(5)
    ),
    {"tool_calls": [call("bash", command="echo done")]},
    TOTAL,
]


def fields(**texts: str) -> dict[str, str]:
    """A reply in the text protocol of DSPy."""
    parts = [f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in texts.items()]
    return {"content": "".join(parts) + "[[ ## completed ## ]]"}


def step(tool: str, arguments: str) -> dict[str, str]:
    return fields(next_thought="Go on.", next_tool_name=tool, next_tool_args=arguments)


DSPY: Script = [
    {
        "when": {"system_contains": "`reasoning`"},
        "turns": [fields(reasoning="Seen.", answer="717710")],
    },
    {"when": {"user_contains": "observation_0"}, "turns": [step("finish", "{}")]},
    {"turns": [step("population", '{"city": "Oslo"}')]},
]


@dataclass(frozen=True, slots=True)
class Facts:
    """Results of a run that docs/harnesses.md states."""

    calls: int = 6
    conversations: int = 1
    """Roots that continue nothing."""
    verbatim: int = 15
    """Assistant turns that were shown as the ids that were sampled."""
    shown: int = 15
    """Assistant turns shown, over all calls."""
    forks: Mapping[str, int] = field(default_factory=dict)
    """Reason of a root after the first of its conversation -> how many."""
    habits: Mapping[str, int] = field(default_factory=dict)
    """What the program did to its history at forks -> how often."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens that do not train, by reason."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One program, and the facts that its session must leave."""

    program: str
    lock: str = "agents"
    """Name of the lock of its environment; JavaScript's begin with `npm`."""
    arguments: tuple[str, ...] = ()
    script: Script = field(default_factory=lambda: plain(*WHOLE))
    sees: bool = False
    """Whether the model takes images."""
    harness: str | None = None
    """The harness of its session, where packaged kind rules are for it."""
    says: str = "717710"
    """Text that the program prints when it has done its work."""
    facts: Facts = Facts()
    unknown: Mapping[str, int] = field(default_factory=dict)
    """`stats.unknown`: fields that the provider's API does not have."""
    note: str = ""
    """The reason of each fork."""

    @property
    def name(self) -> str:
        stem, _, kind = self.program.partition(".")
        language = "JavaScript" if kind == "mjs" else "Python"
        return " ".join([stem.replace("_", "-"), f"({language})", *self.arguments])


CHANGED = {"history_changed": 1}
NEW_SYSTEM = {"system_changed": 1}
OWN_PROMPT = "Each agent has a system prompt and tools of its own."
ONE_QUESTION = Facts(calls=4, verbatim=6, shown=6)
BOTH = (("py", "agents"), ("mjs", "npm"))
LOOPS: Sequence[Loop] = (
    Loop("anthropic_tool_runner.py", says="1009650", facts=ONE_QUESTION),
    Loop("anthropic_tool_runner.mjs", "npm", says="1009650", facts=ONE_QUESTION),
    Loop(
        "anthropic_quickstart.py",
        arguments=("coding",),
        script=plain(*CODING),
        says="1009650",
        facts=Facts(calls=5, verbatim=10, shown=10),
    ),
    Loop(
        "anthropic_quickstart.py",
        arguments=("computer",),
        script=plain(*CLICKS),
        sees=True,
        says="1009650",
        facts=Facts(calls=8, verbatim=28, shown=28, forks={"image": 7}),
        note="Prompts with images are rendered whole.",
    ),
    Loop("openai_run_tools.mjs", "npm"),
    Loop("google_genai_chat.py"),
    *(
        Loop("pydantic_ai_agent.py", arguments=(api,))
        for api in ("chat", "responses", "anthropic", "google")
    ),
    *(Loop("langchain_agent.py", arguments=(api,)) for api in ("chat", "responses", "anthropic")),
    *(
        Loop(
            "langchain_agent.py",
            arguments=(api, "summary"),
            script=SUMMARY,
            facts=Facts(
                calls=7, conversations=2, verbatim=7, shown=9, forks=CHANGED, habits={"summary": 1}
            ),
            note="Its middleware asks for a summary, which replaces all but the last reply.",
        )
        for api in ("chat", "responses", "anthropic")
    ),
    Loop(
        "langgraph_router.py",
        script=[
            {"when": {"tools_include": "population"}, "turns": list(WHOLE)},
            {"turns": [{"content": '{"specialist": "cities"}'}]},
        ],
        facts=Facts(
            calls=8, conversations=2, verbatim=15, shown=19, forks=CHANGED, habits=NEW_SYSTEM
        ),
        note="The router asks about the whole history under another system prompt.",
    ),
    Loop(
        "langgraph_supervisor_team.py",
        script=team([{"tool_calls": [call("transfer_to_counter")]}, TOTAL], [*COUNT, TOTAL], 1),
        says="1009650",
        facts=Facts(verbatim=7, shown=13, forks=CHANGED, habits=NEW_SYSTEM),
        note=OWN_PROMPT,
    ),
    *(
        Loop("ai_sdk_agent.mjs", "npm", arguments=(api,))
        for api in ("chat", "responses", "anthropic")
    ),
    *(
        Loop("ai_sdk_6_agent.mjs", "npm-ai-6", arguments=(api,))
        for api in ("chat", "responses", "anthropic")
    ),
    *(
        Loop(f"openai_agents_run.{kind}", lock, arguments=(api,))
        for kind, lock in BOTH
        for api in ("chat", "responses")
    ),
    *(
        Loop(
            f"openai_agents_run.{kind}",
            lock,
            arguments=(api, "handoff"),
            script=team([{"tool_calls": [call("transfer_to_counter")]}], WHOLE, 1),
            facts=Facts(calls=7, shown=21, forks=CHANGED, habits=NEW_SYSTEM),
            note=OWN_PROMPT,
        )
        for kind, lock in BOTH
        for api in ("chat", "responses")
    ),
    Loop("google_adk_agent.py", "agents-adk"),
    Loop("google_adk_agent.mjs", "npm"),
    Loop(
        "crewai_crew.py",
        "agents-crewai",
        says="1009650",
        facts=Facts(calls=8, conversations=2, verbatim=12, shown=12),
    ),
    Loop("semantic_kernel_agent.py"),
    *(Loop("agno_agent.py", arguments=(api,)) for api in ("chat", "responses")),
    Loop("autogen_agent.py"),
    Loop("strands_agent.py", "agents-adk", arguments=("chat",)),
    Loop(
        "strands_agent.py",
        "agents-adk",
        arguments=("anthropic",),
        facts=Facts(calls=7, verbatim=19, shown=19),
        note="Its client asks the second question once more, on a new event loop.",
    ),
    Loop("genkit_generate.mjs", "npm-genkit"),
    Loop("mastra_agent.mjs", "npm"),
    Loop(
        "smolagents_agent.py",
        arguments=("tools",),
        script=plain(*COUNT, {"tool_calls": [call("final_answer", answer="1009650")]}),
        says="1009650",
        facts=Facts(calls=4, verbatim=0, shown=6, forks={"calls_as_text": 3}),
        note="It sends its tool calls back as text.",
    ),
    Loop(
        "smolagents_agent.py",
        arguments=("code",),
        script=plain(*CODE),
        says="1009650",
        facts=Facts(calls=2, verbatim=0, shown=1, forks={"text_appended": 1}),
        note="It appends the closing tag of its code block to the reply.",
    ),
    Loop(
        "dspy_react.py",
        "agents-litellm",
        script=DSPY,
        facts=Facts(calls=3, conversations=3, verbatim=0, shown=0),
        note="It writes its history into the user message of a new conversation.",
    ),
    Loop(
        "qwen_agent_assistant.py",
        unknown={"message.extra": 5, "message.id": 5},
        note="It adds fields of its own to messages, which `stats.unknown` names.",
    ),
    Loop(
        "gptme_run.py",
        "agents-gptme",
        script=plain(SHELL, TOTAL),
        harness="gptme",
        says="1009650",
        facts=Facts(
            calls=5,
            conversations=2,
            verbatim=3,
            shown=6,
            forks=CHANGED,
            habits=NEW_SYSTEM,
            excluded={"kind": 15},
        ),
        note="Its system prompt changes after the first reply; a side call names the conversation.",
    ),
    Loop(
        "inspect_task.py",
        harness="inspect_ai",
        script=plain(*COUNT, {"tool_calls": [call("submit", answer="1009650")]}),
        says="1009650",
        facts=Facts(calls=5, conversations=2, verbatim=6, shown=6, excluded={"kind": 40}),
        note="A side call greets the model before the task.",
    ),
    Loop("litellm_proxy.py", "agents-litellm"),
)


def section() -> str:
    """The section of docs/harnesses.md about these programs."""
    lines = [
        "## Agent loops\n",
        "The table shows what programs on provider SDKs and agent frameworks do with their",
        "history, in their locked versions. Each program answers two questions with two",
        "tools; Anthropic's computer-use quickstart works with its bash, editor and computer",
        "tools. `make test-agents` asserts each row on a real run. **verbatim** counts the",
        "assistant turns that a prompt has as the very ids that were sampled, of all that",
        "were shown; **habits** says how a program changed its history where it starts a new",
        "trace. In every row no sampled token is lost or counted twice.\n",
        "| program | calls | conversations | verbatim / shown | forks | habits | excluded | note |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for loop in LOOPS:
        facts = loop.facts
        cells = [
            loop.name,
            facts.calls,
            facts.conversations,
            f"{facts.verbatim} / {facts.shown}",
            _counts(facts.forks),
            _counts(facts.habits),
            _counts(facts.excluded),
            loop.note,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "none"

"""The rows of the table harness x dialect, what is known of them, and the script of their faults.

A session does one step after the other; each writes a file of its own name, and says so in its
output. The script finds its place by those outputs, not by counting: a program may keep half a
reply as a message of its own, or throw one away.
"""

import os
from dataclasses import dataclass, field
from typing import Any

from bridle.config import AgentSpec
from bridle.errors import ConfigError
from bridle.harnesses import HARNESSES, open_harness
from bridle.types import Dialect

ROWLESS = ("command", "function")
ONE_ROW = ("openclaw",)
"""Programs whose start takes so long that one wire format must do for most columns."""
Row = tuple[str, str]
"""Harness, dialect."""

MINI_ENDS = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
NEVER_STREAMS = "It does not stream; the cut is one of a JSON body, in the middle."
HAS_NO_STREAM = "It does not stream."


@dataclass(frozen=True)
class Fails:
    """An ending that is the program's own."""

    exit_code: int
    note: str


NO_RETRY = "It repeats no call of the model: exit code {}."
BEGUN = "It repeats no call whose stream has begun: exit code {}."
ONE_PARSER = (
    "It asks again, but reads the new stream as the rest of the broken one, and ends with exit "
    "code 1."
)

FAILS: dict[tuple[Row, str], Fails] = {
    **{
        (("google_adk", "google"), column): Fails(code, NO_RETRY.format(code))
        for column, code in (
            ("500", 4), ("429", 4), ("late_error", 4), ("cut_before", 1), ("cut_after", 1),
        )
    },
    **{
        (("openai_agents", dialect), column): Fails(code, BEGUN.format(code))
        for dialect, late in (("openai_chat", 4), ("openai_responses", 1))
        for column, code in (("late_error", late), ("cut_before", 4), ("cut_after", 4))
    },
    **{
        (("gemini_cli", "google"), column): Fails(code, BEGUN.format(code))
        for column, code in (("late_error", 0), ("cut_before", 1), ("cut_after", 1))
    },
    (("cline", "anthropic"), "late_error"): Fails(1, BEGUN.format(1)),
    (("cline", "anthropic"), "cut_before"): Fails(1, ONE_PARSER),
    (("cline", "anthropic"), "cut_after"): Fails(1, ONE_PARSER),
    (("cline", "google"), "cut_before"): Fails(1, ONE_PARSER),
    (("cline", "openai_responses"), "late_error"): Fails(1, BEGUN.format(1)),
}  # fmt: skip
"""What ends a program."""

FORKS: dict[Row, tuple[str, ...]] = {
    ("aider", "openai_chat"): ("foreign",),
    ("cline", "google"): ("text_appended", "changed"),
    ("cline", "openai_chat"): ("text_appended", "changed"),
    ("cline", "openai_responses"): ("text_appended", "changed"),
    ("codex", "openai_responses"): ("partial",),
    ("openclaw", "google"): ("history_changed",),
    ("openclaw", "openai_responses"): ("history_changed",),
    **{("opencode", str(dialect)): ("text_appended", "history_changed") for dialect in Dialect},
    ("qwen_code", "anthropic"): ("history_changed",),
    ("qwen_code", "google"): ("history_changed",),
    ("qwen_code", "openai_chat"): ("history_changed",),
}
"""Why a call may start anew: after a cut the program changed what was said (openclaw in two wire
formats also after a 500 or 429, when it tells its task again); aider's examples."""

OWN_WAIT: set[Row] = {("openclaw", "google")}
"""Programs that wait a time of their own after a 429, here 0.9 s and more, whatever it asks for."""

KEPT = (
    "What it got of the broken reply may stay in its history; the calls after it then start a new "
    "trace."
)

NOTES: dict[tuple[Row, str], str] = {
    **{(row, "cut_after"): KEPT for row in FORKS if row[0] != "aider"},
    **{(("mini_swe_agent", str(d)), "cut_before"): NEVER_STREAMS for d in Dialect},
    (("openhands", "openai_chat"), "cut_before"): NEVER_STREAMS,
    (("openhands", "anthropic"), "cut_before"): NEVER_STREAMS,
}


@dataclass(frozen=True)
class Case:
    """One row, and the settings it is run with."""

    harness: str
    dialect: str
    settings: dict[str, Any] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    """Columns that it does not have, with the reason."""
    streams: bool = True
    """Whether it asks for streams."""

    def __str__(self):
        return "-".join(self.row)

    @property
    def row(self) -> Row:
        """Its place in the table."""
        return self.harness, self.dialect

    @property
    def agent(self) -> dict[str, Any]:
        """Fields of `AgentSpec`."""
        fields: dict[str, Any] = {"settings": self.settings}
        if self.row == ("cline", "google"):
            # Of a name that it does not know it takes the tools away.
            fields["model_name"] = "gemini-3-bridle"
        return fields


def wanted(harness: str) -> bool:
    """Return whether this run tries it: `BRIDLE_TEST_HARNESSES` may name a few, comma-separated."""
    named = os.environ.get("BRIDLE_TEST_HARNESSES")
    return named is None or harness in named.split(",")


def cases() -> list[Case]:
    """A case for each row; where a program can stream, it does."""
    found = []
    for name in HARNESSES:
        for dialect in Dialect:
            if name in ROWLESS or (name in ONE_ROW and open_harness(name).dialect != dialect):
                continue
            settings: dict[str, Any] = {"api": str(dialect)}
            try:
                open_harness(AgentSpec(harness=name, settings=settings))
            except ConfigError:
                settings = {}
                if open_harness(name).dialect != dialect:
                    continue
            if name in {"google_adk", "openai_agents"}:
                settings["stream"] = True
            streams = name not in {"mini_swe_agent", "openhands"}
            without = {} if streams else dict.fromkeys(("cut_after", "late_error"), HAS_NO_STREAM)
            if name == "aider":
                settings["files"] = ["start.txt"]
            found.append(Case(name, str(dialect), settings, without, streams))
    return found


def faulty_steps(harness: str, columns: tuple[str, ...], *, slow_s: float) -> list[dict[str, Any]]:
    """Conversations of a script: a step without a fault, then one with the fault of each column.

    Each step is a turn with one command, which writes `<column>.txt`; after the last the program
    ends. Cuts are made on the way and are nothing to the script. aider goes through one column.
    """
    late = "I think about it for a while, and say a few words more than are needed for it."
    faults: dict[str, dict[str, Any]] = {
        "slow": {"delay_s": slow_s},
        # The gateway itself tries three times.
        "500": {"fault": 500, "fault_times": 3},
        "429": {"fault": 429, "fault_times": 3},
        # Not a status after which the gateway itself goes on with the reply.
        "late_error": {
            "content": late, "fault": 501, "fault_times": 1, "fault_after": 6, "delay_s": 0.4,
        },
    }  # fmt: skip
    names = ("start", *columns)
    if harness == "aider":  # one call: files as text
        files = "\n\n".join(f"{name}.txt\n```\nx\n```" for name in names)
        return [{"turns": [{**faults.get(columns[0], {}), "content": files}]}]
    turns = [
        {
            "content": f"I make {name}.",
            "shell": [f"echo x > {name}.txt; echo did-{name}"],
            **faults.get(name, {}),
        }
        for name in names
    ]
    end: dict[str, Any] = {"content": "All files are there."}
    if harness == "mini_swe_agent":
        end["shell"] = [MINI_ENDS]
    found: list[dict[str, Any]] = [{"turns": [turns[0]]}]
    for name, turn in zip(names, [*turns[1:], end], strict=True):
        found.append({"when": {"results_contain": f"did-{name}"}, "turns": [turn]})
    return found[::-1]

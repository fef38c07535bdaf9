"""Four real programs, one for each dialect, side by side: the work that every engine is held to.

Each does ten turns of work or more; three of them start two agents at once in one turn, the fourth
fills its context and compacts.
"""

from tests.real_clients import test_harness_compaction as compaction
from tests.real_clients import test_harness_subagents as agents
from tests.real_clients.side_by_side import Ran, Run, never_forked, succeeded
from tests.real_clients.work import TEN, the_files_are_right

from bridle.types import Kind

WITH_AGENTS = {
    "claude_code": "anthropic",
    "codex": "openai_responses",
    "gemini_cli": "google",
}
COMPACTS = ("pi", "openai_chat")
DONE = 'test "$(cat on.txt)" = "a b"'


def filling(number: int) -> str:
    """Return what each turn of the compacting program prints: 4,000 tokens, and 13,000 characters.

    Pi counts characters to see whether there is enough to be summed up.
    """
    return f"seq -f 'and the other that was in the %g' {number}000 {number}360"


LINES = 900
"""Lines of the longest output that the others see; Gemini CLI shows all of it."""


def rollouts() -> list[Run]:
    """A run of each program."""
    made = " && ".join(f'test "$(cat {part}.txt)" = é' for part in agents.PARTS)
    check = f"{made} && {the_files_are_right()}"
    return [
        *(
            Run(
                name,
                dialect,
                agents.script(name, dialect, lines=LINES),
                check,
                agents.SETTINGS.get(name, {}),
            )
            for name, dialect in WITH_AGENTS.items()
        ),
        Run(*COMPACTS, compaction.script(COMPACTS[0], filling), DONE),
    ]


def compacts(ran: Ran) -> bool:
    """Return whether it is the program that compacts."""
    return ran.run.harness == COMPACTS[0]


def check(ran: Ran) -> None:
    """The work is done; nothing forked but where the program compacts, and all of it trains."""
    succeeded(ran)
    assert set(ran.stats["drift"]) == {"exact"}, ran.table()
    assert ran.stats["tokens_excluded"] == {}, ran.table()
    if compacts(ran):
        compaction.compacted(ran)
        return
    never_forked(ran, roots={Kind.AGENT: 1, Kind.SUBAGENT: 2})
    assert sorted(map(len, ran.roots())) == [3, 3, TEN + 2], ran.table()

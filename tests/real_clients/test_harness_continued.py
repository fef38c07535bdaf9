"""A program that is started again in a session, and goes on from what it said before."""

import shlex
from dataclasses import replace

import pytest
from tests.real_clients.real import did_its_work, run

from bridle.harnesses.claude_code import ClaudeCode
from bridle.prompting.renderer import load_renderer
from bridle.types import Kind

pytestmark = [
    pytest.mark.harnesses,
    pytest.mark.drawn_with("claude_code"),
    pytest.mark.timeout(1800),
]

AGAIN = "Now [again]."
TURNS = [
    {"reasoning": "One file.", "content": "I make it.", "shell": ["echo hello > made.txt"]},
    {"content": "It is there."},
    {"content": "Another one.", "shell": ["cat made.txt made.txt > more.txt"]},
    {"reasoning": "All is there.", "content": "Both are there."},
]


class Continued(ClaudeCode):
    """`claude -p`, then `claude -p -c` with another instruction, in the same folder and home."""

    def launch(self, context):
        first = super().launch(context)
        line = shlex.join(first.command)
        both = f"{line} && exec {line} -c < <(printf %s {shlex.quote(AGAIN)})"
        return replace(first, command=("bash", "-c", both))


async def test_a_continued_claude_code_session_extends_the_earlier_trace(tmp_path):
    """The second process has the history from a file; its turns extend the first one's ids."""
    result, exchanges = await run(
        tmp_path,
        None,
        agent={"import_path": f"{__name__}:Continued"},
        check='test "$(cat more.txt)" = "$(printf "hello\\nhello")"',
        turns=TURNS,
    )
    did_its_work(result, exchanges, calls=len(TURNS))
    asked = load_renderer("builtin").decode(exchanges[2].suffix_ids)
    assert AGAIN in asked, asked
    assert [e.kind for e in exchanges] == [Kind.AGENT] * len(TURNS)

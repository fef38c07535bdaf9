"""Every block of commands on a page is run by a test, or says why it is not; those are counted.

Blocks `sh` and `console` are run (`test_commands.py`, `test_tutorial.py`, `scripts/dist`, ...). Any
other block with a command has `<!-- no-run: reason -->` in the line before it. The page of
benchmarks has one for all its blocks.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"benchmarks.md", "cli.md", "mistakes.md"}
"""Measurements, and pages that a script writes from real runs."""
FIRST = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [
    page for page in (*FIRST, *sorted((ROOT / "docs").rglob("*.md"))) if page.name not in LEFT_OUT
]
MARK = r"(<!-- no-run: [^\n]+ -->\n)?"
BLOCK = re.compile(rf"^{MARK}```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:bridle|make|docker|kubectl|sbatch|pip|uvx?|ray|python3?"
    r"|vllm|curl|prometheus|git|npm|apt) .*$",
    re.MULTILINE,
)
RUN = {"sh", "console"}
NO_RUN_AT_MOST = 0.1
"""Share of the printed commands that are not run."""


def blocks(page):
    """(Is it marked, its language, its commands) of each block with commands."""
    for mark, language, text in BLOCK.findall(page.read_text()):
        if commands := COMMAND.findall(text):
            yield bool(mark), language, commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_of_commands_in_the_docs_is_run_or_marked_as_not_run(page):
    for marked, language, commands in blocks(page):
        assert marked is (language not in RUN), commands


def test_the_share_of_docs_commands_that_are_not_run_is_bounded():
    found = [(marked, len(commands)) for page in PAGES for marked, _, commands in blocks(page)]
    left_out, whole = sum(count for marked, count in found if marked), sum(n for _, n in found)

    assert whole > 80
    assert left_out / whole < NO_RUN_AT_MOST, f"{left_out} of {whole}"

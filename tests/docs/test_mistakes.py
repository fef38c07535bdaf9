"""The page of mistakes says what the commands say now, for a drawn fifth of them."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "mistakes.md").read_text()
DRAW = int(os.environ.get("BRIDLE_TEST_DRAW", "0")) % 5


def test_the_page_has_every_mistake_in_its_order(load_script):
    script = load_script("make_mistakes")
    rows = PAGE.removeprefix(script.HEAD).splitlines()

    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in script.MISTAKES]


@pytest.mark.timeout(120)
def test_a_mistake_has_the_message_and_the_code_of_the_page(load_script):
    script = load_script("make_mistakes")
    drawn = [*script.MISTAKES][DRAW::5]

    assert drawn
    assert [row for row in map(script.row, drawn) if row not in PAGE.splitlines()] == []

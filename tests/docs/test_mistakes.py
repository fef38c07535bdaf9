"""The page of mistakes says what the commands say now."""

from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "mistakes.md"


@pytest.mark.timeout(120)
def test_the_mistakes_page_has_the_message_and_exit_code_of_every_mistake(load_script):
    script = load_script("make_mistakes")

    assert len(script.MISTAKES) == 40
    assert all(fix for _, fix in script.MISTAKES.values())
    assert script.page().splitlines() == PAGE.read_text().splitlines()

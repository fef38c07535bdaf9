"""Each family behaves as docs/reference/families.md says."""

from pathlib import Path

from tests.prompting.families import SAME, STEPS, UNTRIED, page, rows

from bridle.prompting.family import family_names

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"


def test_the_families_reference_page_is_up_to_date():
    assert PAGE.read_text() == page(), (
        "python -m tests.prompting.families > docs/reference/families.md"
    )


def test_every_family_but_one_is_listed_and_most_steps_are_the_same_ids():
    found = rows()
    assert {*found, *UNTRIED} == set(family_names())
    assert sum(result == SAME for row in found.values() for result in row.values()) > 3 * len(found)
    assert all(list(row) == list(STEPS) for row in found.values())


def test_qwen3_extensions_equal_a_new_rendering_except_after_a_tool_loop():
    row = rows()["qwen3"]
    assert [step for step, result in row.items() if result != SAME] == ["after a loop, user"]

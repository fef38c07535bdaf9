import pytest

from bridle.harness_rules.table import VARYING, differing


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<current_date>2026-11-23</current_date>", "<current_date>2026-11-24</current_date>"),
        (
            "<current_datetime>2026-11-23T19:42:16.551+00:00</",
            "<current_datetime>2026-11-23T19:43:01.002+00:00</",
        ),
        ("Today's date is 2026-11-23.", "Today's date is 2026-12-01."),
        ("Today's date is Monday, November 23, 2026 (", "Today's date is Tuesday, May 5, 2026 ("),
        ("current date and time is: 2026-11-23T19:46", "current date and time is: 2026-11-24T19:4"),
    ],
)  # fmt: skip
def test_the_date_of_a_run_is_a_named_text(old, new):
    assert differing(old, new, VARYING) == ("date",)
    assert differing(old, f"{new}!", VARYING) is None
    assert differing("released 2026-11-23", "released 2026-11-24", VARYING) is None


def test_texts_that_are_the_same_differ_in_nothing():
    text = "in /tmp/bridle-abcdefgh/0a1b2c3d/work, Today's date is 2026-11-23"
    assert differing(text, text, VARYING) == ()

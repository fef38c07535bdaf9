import pytest

from bridle.harness_rules import VARYING, differing, likely_cause


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
def test_texts_that_differ_only_in_the_current_date_differ_in_noise_date(old, new):
    assert differing(old, new, VARYING) == ("date",)
    assert differing(old, f"{new}!", VARYING) is None
    assert differing("released 2026-11-23", "released 2026-11-24", VARYING) is None


def test_identical_texts_have_no_differing_noise():
    text = "in /tmp/bridle-abcdefgh/0a1b2c3d/work, Today's date is 2026-11-23"
    assert differing(text, text, VARYING) == ()


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ("built at 12:04:59.1 in x", "built at 12:05:01.7 in x", "a clock: run"),
        ("on 2026-11-23 10:00", "on 2026-11-24 9:59", "a clock: run"),
        ("mtime 1764000000.25", "mtime 1764000003", "a clock: run"),
        ("wrote /tmp/tmpab12cd34/x", "wrote /tmp/tmpzz12cd34/x", "a temporary path: use"),
        ("task 3f9a1c", "task 77e0b2", "a random id: seed"),
        ("<Node at 0x7f3a2b1c00>", "<Node at 0x7f3a2b1d40>", "an address in memory: print"),
        ("3 passed in 0.12s", "3 passed in 1.4s", "a duration: have"),
        ("{'b', 'a', 'c'}\nend", "{'b', 'c', 'a'}\nend", "the order of words"),
        ("b a c\nend", "c b a\nend", "the order of words"),
        ("one", "two", None),
    ],
)
def test_likely_cause_of_differing_texts_is_named_with_advice(old, new, cause):
    found = likely_cause(old, new)
    assert (found or "").startswith(cause or "")
    assert (found is None) == (cause is None)


def test_several_likely_causes_of_differing_texts_are_named_together():
    found = likely_cause("3 passed in 0.12s at 10:00", "3 passed in 0.2s at 10:01")
    assert found is not None
    assert "a clock" in found
    assert "a duration" in found
    assert likely_cause("3 passed in 0.12s", "2 passed in 0.2s") is None

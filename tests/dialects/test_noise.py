import pytest

from bridle.dialects.noise import (
    BILLING,
    RULES,
    SERVER_TOOLS,
    VARYING,
    allow_removed,
    differing,
    split_billing,
)
from bridle.errors import RequestError

HEADER = "x-anthropic-billing-header: cc_version=0.0.0;"


def test_every_rule_tells_what_and_why():
    for name, rule in RULES.items():
        assert name == rule.name
        assert rule.what
        assert rule.why


def test_only_a_first_billing_block_is_removed():
    assert split_billing([HEADER, "you are"], RULES) == (1, {BILLING.name: [HEADER]})
    assert split_billing(["you are", HEADER], RULES) == (0, {})
    assert split_billing([], RULES) == (0, {})
    assert split_billing([HEADER], {SERVER_TOOLS.name}) == (0, {})


def test_tools_of_the_provider_are_dropped_or_refused():
    allow_removed({SERVER_TOOLS.name: ["web_search"]}, RULES, "tools")
    allow_removed({}, (), "tools")
    with pytest.raises(RequestError, match="web_search"):
        allow_removed({SERVER_TOOLS.name: ["web_search"]}, {BILLING.name}, "tools")


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

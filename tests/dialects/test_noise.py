import pytest

from bridle.dialects.noise import BILLING, RULES, SERVER_TOOLS, allow_removed, split_billing
from bridle.errors import RequestError

HEADER = "x-anthropic-billing-header: cc_version=0.0.0;"


def test_noise_rules_say_what_they_remove_and_why():
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

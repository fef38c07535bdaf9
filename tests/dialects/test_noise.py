from bridle.dialects.fields import BILLING, RULES, split_billing

HEADER = "x-anthropic-billing-header: cc_version=0.0.0;"


def test_noise_rules_say_what_they_remove_and_why():
    for name, rule in RULES.items():
        assert name == rule.name
        assert rule.what
        assert rule.why


def test_only_a_first_billing_block_is_removed():
    assert split_billing([HEADER, "you are"]) == (1, {BILLING.name: [HEADER]})
    assert split_billing(["you are", HEADER]) == (0, {})
    assert split_billing([]) == (0, {})

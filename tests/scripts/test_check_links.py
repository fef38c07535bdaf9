"""scripts/check_links finds links that lead nowhere, and only those."""

import pytest


@pytest.fixture
def findings(findings_in):
    other = {"docs/other.md": "# The `other` page, here\n"}
    return lambda text: findings_in("check_links", {**other, "docs/page.md": text})


@pytest.mark.parametrize(
    "target",
    ["other.md", "./other.md#the-other-page-here", "#mine", "../docs", "https://example.org/x"],
)
def test_a_link_that_leads_somewhere_is_no_finding(findings, target):
    assert findings(f"## Mine\n\nSee [this]({target}).\n") == []


def test_a_link_to_no_file_is_found(findings):
    assert findings("[x](gone.md)") == ["docs/page.md: links to gone.md, which does not exist"]


@pytest.mark.parametrize("target", ["other.md#gone", "#gone"])
def test_a_link_to_no_heading_is_found(findings, target):
    (found,) = findings(f"[x]({target})")
    assert found == f"docs/page.md: links to {target}, which has no such heading"


def test_code_holds_no_links(findings):
    assert findings("`[x](a.md)`\n\n```md\n[x](b.md)\n# no heading\n```\n") == []

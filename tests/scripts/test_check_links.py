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
def test_a_working_link_is_not_reported(findings, target):
    assert findings(f"## Mine\n\nSee [this]({target}).\n") == []


def test_a_link_to_a_missing_file_is_reported(findings):
    assert findings("[x](gone.md)") == ["docs/page.md: links to gone.md, which does not exist"]


@pytest.mark.parametrize("target", ["other.md#gone", "#gone"])
def test_a_link_to_a_missing_heading_is_reported(findings, target):
    (found,) = findings(f"[x]({target})")
    assert found == f"docs/page.md: links to {target}, which has no such heading"


def test_links_and_headings_in_code_blocks_are_not_checked(findings):
    assert findings("`[x](a.md)`\n\n```md\n[x](b.md)\n# no heading\n```\n") == []

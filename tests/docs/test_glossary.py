"""The glossary names each term once, and only terms that the code or another page uses."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TERMS = [
    term.strip()
    for row in re.findall(r"(?m)^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text())
    if row not in {"term", "---"}
    for term in row.split(",")
]


def test_the_glossary_has_each_term_once():
    assert len(TERMS) > 50
    assert [term for term, count in Counter(TERMS).items() if count > 1] == []


def test_each_glossary_term_is_used_in_code_or_docs():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "glossary.md"]
    files = [*pages, *(ROOT / "src").rglob("*.py")]
    text = " ".join(path.read_text() for path in files).lower()
    assert [term for term in TERMS if term.lower() not in text] == []

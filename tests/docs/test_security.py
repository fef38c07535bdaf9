"""The tests that the security page names exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def _tests_in(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {one.name for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, kinds)}


def _rows() -> list[str]:
    """Rows of the tables below "Promises", without their heads."""
    section = PAGE.read_text().split("\n## Promises\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [row for row in rows if not row.startswith(("| promise |", "|---"))]


def test_every_row_of_the_security_page_names_a_test():
    assert [row for row in _rows() if not NAMED.search(row.rpartition(" | ")[2])] == []


def test_every_test_that_the_security_page_names_exists():
    named = NAMED.findall(PAGE.read_text())

    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (path := ROOT / "tests" / file).is_file() or test not in _tests_in(path)
    ]

    assert named
    assert missing == []

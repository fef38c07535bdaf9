"""Every error text of the troubleshooting page is one that the code can say."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TEXTS = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
HOLE = "…"


def said(node: ast.expr) -> str | None:
    """A string of the code, with `…` where a value is put in and without backticks."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("`", "")
    if isinstance(node, ast.JoinedStr):
        return "".join(
            HOLE if isinstance(part, ast.FormattedValue) else str(part.value)  # type: ignore[attr-defined]
            for part in node.values
        ).replace("`", "")
    return None


@pytest.fixture(scope="module")
def strings():
    trees = (ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr))
    return {text for node in nodes if (text := said(node))}


def test_the_troubleshooting_page_has_more_than_20_error_texts():
    assert len(TEXTS) > 20


@pytest.mark.parametrize("text", TEXTS)
def test_each_error_text_of_the_troubleshooting_page_is_in_the_code(text, strings):
    assert any(text in one for one in strings)

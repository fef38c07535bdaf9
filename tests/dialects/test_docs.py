"""The page on dialects says what the code does."""

import json
import re
from pathlib import Path

import pytest

from bridle.dialects import DIALECTS
from bridle.dialects.fields import RULES as NOISE_RULES
from bridle.errors import RequestError
from bridle.harness_rules import KIND_RULES
from bridle.types import Dialect

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "dialects.md").read_text()


def rows(heading):
    """The cells of the table under a heading, without its first two lines."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_docs_tables_list_every_rule_in_order():
    assert [row[0].strip("`") for row in rows("What is removed")] == list(NOISE_RULES)
    result = [(row[0].strip("`"), row[1]) for row in rows("What kind of call it is")]
    assert result == [(rule.name, rule.kind.value) for rule in KIND_RULES]


def test_docs_stream_table_lists_every_dialect():
    assert {row[0].strip("`") for row in rows("Streams")} == {dialect.value for dialect in Dialect}


@pytest.mark.parametrize("row", rows("Errors"), ids=lambda row: row[0])
def test_errors_match_the_docs_table(row):
    error = RequestError("why", code=row[0].strip("`"))
    columns = (Dialect.OPENAI_CHAT, Dialect.ANTHROPIC, Dialect.GOOGLE)
    for dialect, cell in zip(columns, row[1:], strict=True):
        status, _, body = DIALECTS[dialect].error(error)
        result = re.fullmatch(r"(\d+) `(\w+)`", cell)
        assert result is not None
        shown = json.loads(body)["error"]
        assert status == int(result[1])
        assert result[2] in (shown.get("code"), shown.get("type"), shown.get("status"))

"""scripts/make_harness_table: records of cells become the page, and the page is read back."""

import json

import pytest


@pytest.fixture
def table(load_script):
    return load_script("make_harness_table")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cells.jsonl"


@pytest.fixture
def full(table, path):
    """A record of every cell."""
    for column in table.COLUMNS:
        for row in table.rows_of(column):
            table.record(*row, column, path=path)
    return path


def test_every_packaged_harness_has_a_table_row_for_each_of_its_dialects(table):
    rows = table.rows()

    assert ("claude_code", "anthropic") in rows
    assert ("claude_code", "google") not in rows
    assert [dialect for name, dialect in rows if name == "cline"] == [
        "anthropic", "openai_chat", "openai_responses", "google",
    ]  # fmt: skip
    assert {name for name, _ in rows} == set(table.HARNESSES) - set(table.ROWLESS)


def test_some_columns_are_tried_with_a_few_harnesses_that_cover_every_dialect(table, full):
    assert table.rows_of("plain") == table.rows()
    some = table.rows_of("404")
    assert set(some) == table.SOME
    assert {dialect for _, dialect in some} == set(table.Dialect)
    page = table.page(table.recorded(full))
    wrong = page.partition("## A turn that is wrong")[2].partition("\n## ")[0]
    assert wrong.count("\n| ") == 1 + len(some)
    with pytest.raises(ValueError, match="aider"):
        table.record("aider", "openai_chat", "404", path=full)


def test_the_last_record_of_a_table_cell_counts(table, path):
    table.record("codex", "openai_responses", "plain", "broken", path=path)
    table.record("codex", "openai_responses", "plain", path=path)

    assert table.recorded(path)["codex", "openai_responses", "plain"].outcome == "ok"


def test_a_record_of_another_harness_version_is_ignored(table, path):
    table.record("codex", "openai_responses", "plain", path=path)
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, "version": "0.1"}) + "\n")

    assert table.recorded(path) == {}


@pytest.mark.parametrize(
    "cell",
    [
        ("codex", "google", "plain"),
        ("codex", "openai_responses", "tea"),
        ("codex", "openai_responses", "plain", "fine"),
        ("codex", "openai_responses", "plain", "fails"),
        ("codex", "openai_responses", "plain", "n/a"),
    ],
)
def test_a_record_of_an_unknown_cell_or_without_its_reason_is_refused(table, path, cell):
    with pytest.raises(ValueError, match="codex"):
        table.record(*cell, path=path)


def test_table_cells_that_are_broken_or_without_a_result_are_missing(table, full):
    table.record("codex", "openai_responses", "slow", "broken", path=full)
    cells = table.recorded(full)
    del cells["aider", "openai_chat", "plain"]

    assert table.missing(cells) == [
        ("aider", "openai_chat", "plain"),
        ("codex", "openai_responses", "slow"),
    ]
    assert table.missing(cells, ["pi", "aider"]) == [("aider", "openai_chat", "plain")]


def test_the_harness_page_has_every_recorded_cell_and_each_note_once(table, full):
    for column in ("cut_before", "cut_after"):
        table.record("openhands", "anthropic", column, "n/a", "It never streams.", path=full)
    cells = table.recorded(full)
    page = table.page(cells)

    assert page.count("It never streams.") == 1
    assert table.read(page)["openhands", "anthropic", "cut_after"] == (
        "n/a", "It never streams.", table.version("openhands"),
    )  # fmt: skip
    assert table.read(page).keys() == cells.keys()
    assert table.differences(cells, page) == []


def test_a_cell_that_differs_from_the_harness_page_is_reported(table, full):
    page = table.page(table.recorded(full))
    table.record("pi", "openai_chat", "slow", "fails", "It sleeps.", path=full)

    (line,) = table.differences(table.recorded(full), page)

    assert line.startswith("pi, openai_chat, slow: the run says fails (It sleeps.); the page ok")


def test_the_harness_page_has_the_rows_of_the_agent_loops(table):
    assert table.agent_loops() in table.PAGE.read_text(encoding="utf-8")

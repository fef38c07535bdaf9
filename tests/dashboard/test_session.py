"""A session's conversation tree, exchanges and tokens."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import numpy as np
from tests.dashboard.house import busy, write

from bridle.dashboard.folder import CapturedRun
from bridle.dashboard.session import CELLS, PAGE, compare, composition, token_page
from bridle.dashboard.summaries import measured_of
from bridle.trajectory.sample import MaskReason, Trace
from bridle.types import DeliveryState


def opened(folder, made):
    asyncio.run(write(folder, made))
    return reopened(folder, made.session_id)


def reopened(folder, session_id):
    with closing(CapturedRun(folder / "capture.sqlite", ".")) as run:
        return run.session(session_id)


def test_session_rows_have_fate_depth_new_tokens_and_delivery_of_each_exchange(tmp_path):
    session = opened(tmp_path, busy())

    rows = {row.exchange.exchange_id: row for row in session.rows(0, 100)}

    assert len(rows) == session.size == 7
    assert rows["a1"].fate == "trained"
    assert rows["a3"].fate == "unresolved"
    assert rows["title"].fate == "kind"
    assert (rows["a1"].is_root, rows["a2"].is_root) == (True, False)
    assert (rows["a1"].new, rows["a2"].new) == (40, 9)
    assert rows["a2"].delivery.state is DeliveryState.DELIVERED
    assert rows["a2"].speakers == "user"
    assert rows["a2"].said.startswith("a2: ")
    assert {row.depth for row in rows.values()} == {0, 1}


def test_a_page_of_session_rows_is_a_slice_of_the_whole_tree(tmp_path):
    session = opened(tmp_path, busy())
    whole = [row.exchange.exchange_id for row in session.rows(0, 100)]

    assert [row.exchange.exchange_id for row in session.rows(2, 3)] == whole[2:5]
    assert session.place(whole[4]) == 4
    assert session.place("none") is None


def test_exchange_detail_has_messages_traces_and_neighbours(tmp_path):
    session = opened(tmp_path, busy())

    detail = session.detail("a2")

    assert [one["role"] for one in detail.earlier] == ["system", "user", "assistant"]
    assert [one["role"] for one in detail.added] == ["user"]
    assert detail.reply[0]["content"].startswith("a2: ")
    assert (detail.before, detail.after) == ("a1", "sub")
    assert detail.fork == []
    assert detail.missing is None
    number, at = detail.traces[0]
    trace = session.trajectory.traces[number]
    assert "a2" in trace.exchange_ids
    assert at == 12 + 40 + 9
    assert session.detail("none") is None


def test_exchange_detail_names_the_recorded_parent_of_a_fork(tmp_path):
    session = opened(tmp_path, busy())

    assert "recorded with parent None, continues b3" in "\n".join(session.detail("short").fork)


def test_raw_request_and_reply_are_the_captured_bytes(tmp_path):
    made = busy()
    session = opened(tmp_path, made)

    assert session.raw("a2", "reply") == made.exchanges[1].reply
    assert session.raw("a1", "request").startswith(b'{"messages":[{"role": "system"')
    assert session.raw("none", "reply") is None


def test_damaged_texts_and_rows_are_reported_and_do_not_fail(tmp_path):
    asyncio.run(write(tmp_path, busy()))
    with closing(sqlite3.connect(tmp_path / "capture.sqlite")) as connection, connection:
        connection.execute("UPDATE exchanges SET texts = x'09' WHERE exchange_id = 'a1'")
        connection.execute("UPDATE exchanges SET kind = 'odd' WHERE exchange_id = 'b3'")
    session = reopened(tmp_path, "busy")

    rows = {row.exchange.exchange_id: row for row in session.rows(0, 100)}

    assert rows["a1"].said == ""
    assert "cannot read" in session.detail("a2").missing
    assert {lost.exchange_id: lost.sampled for lost in session.lost} == {"b3": 4}


def test_session_measures_come_from_its_trajectory(tmp_path):
    measured = measured_of(opened(tmp_path, busy()).trajectory)

    assert measured.versions == (7, 7)
    assert measured.trained + sum(measured.excluded.values()) == 12 + 8 + 7 + 3 + 9 + 4 + 6
    assert measured.turns >= 4


def test_composition_of_a_trace_counts_every_token(tmp_path):
    session = opened(tmp_path, busy())
    trace = session.trajectory.traces[0]

    assert sum(composition(trace).values()) == len(trace.prompt_ids) + len(trace.response_ids)


def trace(prompt=3, reasons=(0, 0, 1, 4), logprobs=(-0.05, -5.0, 0.0, 0.0)):
    size = len(reasons)
    return Trace(
        "t", np.arange(prompt, dtype=np.int32), np.arange(size, dtype=np.int32),
        (np.array(reasons) == 0).astype(np.uint8), np.array(logprobs, dtype=np.float32),
        np.array([7 if reason == 0 else -1 for reason in reasons], dtype=np.int32),
        np.array(reasons, dtype=np.uint8), ("x",), (2,), "stop", "raw",
    )  # fmt: skip


def test_token_page_shows_whether_each_token_trains_and_why_not():
    page = token_page(trace(), 0, lambda ids: "<a>" if ids[0] else "\n")

    assert [token.style for token in page.tokens] == [
        "prompt", "prompt", "prompt", "on l0", "on l4", "prompt", "off",
    ]  # fmt: skip
    assert page.tokens[0].text == "⏎\n"
    assert "policy version 7" in page.tokens[3].title
    assert "logprob -0.0500 (p 0.951)" in page.tokens[3].title
    assert page.tokens[6].title.endswith(f"not trained: {MaskReason.ABANDONED.key}")
    assert [token.ends for token in page.tokens] == [None] * 4 + ["x"] + [None] * 2


def test_token_page_without_a_tokenizer_shows_ids():
    page = token_page(trace(), 0, None)

    assert not page.has_text
    assert page.tokens[2].text == "2 "


def test_token_pages_cover_a_long_trace_and_its_strip_links_to_them():
    size = 3 * PAGE
    long = trace(prompt=0, reasons=(0,) * size, logprobs=(-0.5,) * size)

    first, middle, last = (token_page(long, at, None) for at in (0, PAGE, 2 * PAGE))

    assert (first.before, first.after) == (None, PAGE)
    assert (middle.before, middle.after, middle.last) == (0, 2 * PAGE, 2 * PAGE)
    assert (len(last.tokens), last.after) == (PAGE, None)
    assert len(first.cells) == CELLS
    assert {cell.page for cell in first.cells} == {0, PAGE, 2 * PAGE}
    assert 60 < sum(cell.here for cell in first.cells) < 70
    assert [cell.here for cell in last.cells][-1]


def test_token_page_of_an_empty_trace_is_empty():
    page = token_page(trace(prompt=0, reasons=(), logprobs=()), 5, None)

    assert (page.start, page.end, page.total, page.tokens, page.cells) == (0, 0, 0, [], [])


CALL = {"name": "bash", "arguments": "ls"}
START = [{"role": "system", "content": "Fix."}, {"role": "user", "content": "totals.py"}]


def replies(*texts):
    """Return a conversation whose replies call a tool under random ids."""
    calls = [{"id": f"call-{id(texts)}", "function": CALL}]
    return [*START, *({"role": "assistant", "content": t, "tool_calls": calls} for t in texts)]


def test_comparison_of_conversations_ignores_tool_call_ids():
    found = compare(replies("Look first."), replies("Look first."))

    assert (found.is_equal, found.equal) == (True, 3)


def test_comparison_of_conversations_finds_the_first_different_text():
    found = compare(replies("Look.", "Run the test."), replies("Look.", "Run the linter."))

    assert (found.is_equal, found.equal) == (False, 3)
    assert found.before.endswith("Run the ")
    assert [text.partition("\n")[0] for text in found.texts] == ["test.", "linter."]


def test_comparison_with_a_longer_conversation_shows_its_first_extra_message():
    longer = replies("Look.", "Done.")
    found = compare(longer[:-1], longer)

    assert found.equal == 3
    assert found.messages == (None, longer[-1])

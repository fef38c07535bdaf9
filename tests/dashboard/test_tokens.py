"""Tokens: colours, reasons, pages."""

import numpy as np

from bridle.dashboard.tokens import CELLS, PAGE, token_page
from bridle.trajectory.sample import MaskReason, Trace


def trace(prompt=3, reasons=(0, 0, 1, 4), logprobs=(-0.05, -5.0, 0.0, 0.0)):
    size = len(reasons)
    return Trace(
        "t", np.arange(prompt, dtype=np.int32), np.arange(size, dtype=np.int32),
        (np.array(reasons) == 0).astype(np.uint8), np.array(logprobs, dtype=np.float32),
        np.array([7 if reason == 0 else -1 for reason in reasons], dtype=np.int32),
        np.array(reasons, dtype=np.uint8), ("x",), (2,), "stop", "raw",
    )  # fmt: skip


def test_a_token_says_whether_it_trains_and_why_not():
    page = token_page(trace(), 0, lambda ids: "<a>" if ids[0] else "\n")

    assert [token.style for token in page.tokens] == [
        "prompt", "prompt", "prompt", "on l0", "on l4", "prompt", "off",
    ]  # fmt: skip
    assert page.tokens[0].text == "⏎\n"
    assert "policy version 7" in page.tokens[3].title
    assert "logprob -0.0500 (p 0.951)" in page.tokens[3].title
    assert page.tokens[6].title.endswith(f"does not train: {MaskReason.ABANDONED.key}")
    assert [token.ends for token in page.tokens] == [None] * 4 + ["x"] + [None] * 2


def test_without_a_tokenizer_ids_are_shown():
    page = token_page(trace(), 0, None)

    assert not page.has_text
    assert page.tokens[2].text == "2 "


def test_pages_cover_a_long_trace_and_its_strip_leads_to_them():
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


def test_an_empty_trace_is_an_empty_page():
    page = token_page(trace(prompt=0, reasons=(), logprobs=()), 5, None)

    assert (page.start, page.end, page.total, page.tokens, page.cells) == (0, 0, 0, [], [])

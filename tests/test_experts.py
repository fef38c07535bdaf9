"""Rows of experts keep their places through every form that they take."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.experts import (
    KEY,
    Experts,
    as_rows,
    complete_rows,
    merge_rows,
    npy_rows,
    npy_text,
    pack,
    reply_extra,
    unpack,
)


def rows_of(tokens, most=200, seed=0):
    drawn = np.random.default_rng(seed).integers(0, most, (tokens, 3, 2))
    return drawn.astype(np.int16)


@given(
    st.integers(0, 9), st.integers(0, 1000), st.sampled_from([8, 256, 257, 32_768]), st.booleans()
)
def test_packed_expert_rows_survive_a_round_trip(tokens, start, most, gaps):
    rows = rows_of(tokens, most, start)
    if gaps:
        rows[::2] = -1
    for again in (unpack(pack(Experts(start, rows))), Experts(start, npy_rows(npy_text(rows)))):
        assert again.start == start
        assert again.rows.dtype == np.int16
        assert np.array_equal(again.rows, rows)


def test_packed_expert_ids_take_a_byte_or_less_each():
    assert len(pack(Experts(0, rows_of(1000)))) < 1000 * 6 * 1.01
    assert len(pack(Experts(0, rows_of(1000, 8)))) < 1000 * 6 * 0.6


def with_width(packed, size):
    """The packed rows, whose head tells that a number has `size` bytes."""
    return packed[:12] + bytes([size]) + packed[13:]


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"x",
        pack(Experts(0, rows_of(4)))[:-2],
        with_width(pack(Experts(0, rows_of(4))), 3),
        with_width(pack(Experts(0, rows_of(4))), 2),
    ],
)
def test_bytes_that_are_no_packed_experts_are_refused(packed):
    with pytest.raises(ValueError, match="the stored expert numbers are damaged"):
        unpack(packed)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (np.zeros((2, 3), np.int16), "of shape \\(tokens, layers, experts per token\\)"),
        (np.zeros((2, 3, 1)), "of shape \\(tokens, layers, experts per token\\)"),
        (np.full((1, 1, 1), 40_000), "got 40000 to 40000"),
        (np.full((1, 1, 1), -2), "got -2 to -2"),
    ],
)
def test_arrays_of_invalid_shape_or_expert_ids_are_refused(values, fault):
    with pytest.raises(ValueError, match=fault):
        as_rows(values)


def archive():
    """Base64 of a `.npz` file."""
    file = io.BytesIO()
    np.savez(file, rows_of(2))
    return base64.b64encode(file.getvalue()).decode()


def header(*shape):
    """Base64 of a `.npy` file that claims a shape and has no data."""
    file = io.BytesIO()
    fields = {"descr": "<i2", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, fields)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    "text",
    [
        *("", "AAAA", "!", archive(), archive()[:40]),
        *(header(3, 1, 1), header(10**12, 4, 2), header(10**18, 9, 9)),
    ],
)
def test_an_npy_text_without_the_rows_of_its_header_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        npy_rows(text)


PARTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), max_size=5)


@given(PARTS, st.integers(0, 15))
def test_merged_expert_rows_are_those_of_the_first_part_with_the_token(spans, tokens):
    parts = [Experts(start, rows_of(size, seed=n)) for n, (start, size) in enumerate(spans)]
    found: Any = merge_rows(parts, tokens)
    assert (found is None) is (not parts)
    for at in range(tokens if parts else 0):
        known = [p.rows[at - p.start] for p in parts if p.start <= at < p.start + len(p.rows)]
        assert np.array_equal(found[at], known[0] if known else np.full((3, 2), -1))


def test_merged_expert_rows_take_unknown_rows_from_the_next_part():
    first = rows_of(3)
    first[1] = -1
    found: Any = merge_rows([Experts(0, first), Experts(0, rows_of(3, seed=1))], 3)
    assert np.array_equal(found[1], rows_of(3, seed=1)[1])
    assert np.array_equal(found[[0, 2]], rows_of(3)[[0, 2]])


def test_expert_rows_of_a_reply_are_aligned_by_its_last_token():
    rows = rows_of(9)
    asked = reply_extra(rows[4:], asked=4, tokens=10)[KEY]
    ignored = reply_extra(rows, asked=4, tokens=10)[KEY]
    for experts in (asked, ignored):
        assert experts.start == 4
        assert np.array_equal(experts.rows, rows[4:])
    for wrong in (rows[5:], rows[:-1], rows[:0]):
        assert list(reply_extra(wrong, asked=4, tokens=10)) == [f"{KEY}_dropped"]


def test_complete_rows_returns_none_when_any_row_but_the_last_is_unknown():
    rows = rows_of(4)
    rows[-1] = -1
    known: Any = complete_rows(rows)
    assert np.array_equal(known, rows[:-1])
    rows[1] = -1
    assert complete_rows(rows) is None
    assert complete_rows(None) is None

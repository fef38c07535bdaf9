"""Routed experts: for each token that went through a mixture-of-experts model, who computed it.

A row belongs to a position: the experts that the token at that position went to, in each layer with
experts, shape (layers, top_k). The last token of a reply never goes through the model, so its row
comes with the next call, as the row before that call's new ids. Engines give rows from a position
on; a trainer that replays them computes what the engine computed, even where its own router would
choose others.

A reply has its rows as `Experts`, a capture as the bytes of `pack`, a trace as one array over all
its tokens (`merge_rows`), in which -1 stands where nothing is known.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bridle.errors import TrainingError
from bridle.types import JSON

Rows: TypeAlias = npt.NDArray[np.int16]
"""Shape (tokens, layers, top_k), int16; -1 = not known."""

KEY = "routed_experts"
"""Name of `Experts` in `GenerateChunk.extra`."""

_HEAD = struct.Struct("<IIHHB")
"""Start, rows, layers, top_k, bytes of a number."""


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """Rows of consecutive positions of a prompt and its output."""

    start: int
    """Position of the first row."""
    rows: Rows


def as_rows(values: npt.NDArray[np.integer]) -> Rows:
    """Return an engine's expert numbers as rows, one per token. `ValueError` unless they
    are such.
    """
    if values.ndim != 3 or values.dtype.kind not in "iu":
        raise ValueError(
            "expected expert numbers as integers of shape (tokens, layers, experts per token), "
            f"got shape {values.shape} of {values.dtype}"
        )
    if values.size and not -1 <= int(values.min()) <= int(values.max()) < 1 << 15:
        raise ValueError(
            f"expert numbers must be from -1 to 32767, got {values.min()} to {values.max()}"
        )
    return values.astype(np.int16, copy=False)


def npy_rows(text: str) -> Rows:
    """Return the rows of experts in a base64 text of a `.npy` file, as vLLM sends it.

    `ValueError` for anything else.
    """
    try:
        # Not `np.load`, which takes archives too.
        return as_rows(np.lib.format.read_array(io.BytesIO(base64.b64decode(text))))
    except (EOFError, MemoryError) as error:  # a header may claim any shape
        raise ValueError(f"not a .npy file of expert numbers: {error}") from None


def npy_text(rows: Rows) -> str:
    """Return rows of experts as the base64 text of a `.npy` file, as vLLM sends it."""
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def reply_extra(rows: Rows, *, asked: int, tokens: int) -> JSON:
    """Return the `extra` of a reply with routed experts, whose prompt and output have `tokens` ids.

    The rows end before its last token; they begin at the position `asked`, or, where the server has
    no such setting, at the first token. Other numbers of rows cannot be placed: they are dropped,
    and `routed_experts_dropped` says so.
    """
    start = tokens - 1 - len(rows)
    if start not in {0, asked}:
        return {f"{KEY}_dropped": f"{len(rows)} rows for the tokens {asked} to {tokens - 1}"}
    return {KEY: Experts(asked, rows[asked - start :])}


def merge_rows(parts: Iterable[Experts], tokens: int) -> Rows | None:
    """Return one row of experts for each of `tokens` positions, from several parts at positions.

    The first part that has a row of a position counts. `None` without any. Rows behind the last
    position, and parts of another shape than the first, are left out.
    """
    found: Rows | None = None
    known = np.zeros(tokens, np.bool_)
    for part in parts:
        if found is None:
            found = np.full((tokens, *part.rows.shape[1:]), -1, np.int16)
        if part.rows.shape[1:] != found.shape[1:]:
            continue
        rows = part.rows[max(0, -part.start) : max(0, tokens - part.start)]
        at = slice(max(0, part.start), max(0, part.start) + len(rows))
        new = ~known[at]
        found[at][new] = rows[new]
        known[at][new & is_known(rows)] = True
    return found


def is_known(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return for each token whether any of its experts is known, shape (tokens,)."""
    known: npt.NDArray[np.bool_] = np.logical_or.reduce(rows >= 0, axis=(1, 2))
    return known


def complete_rows(rows: Rows | None) -> Rows | None:
    """Return the experts of all tokens but the last, for a trainer that needs those of every token.

    `None` if those of one are not known.
    """
    if rows is None or not is_known(rows[:-1]).all():
        return None
    return rows[:-1]


def pack(experts: Experts) -> bytes:
    """Return experts as bytes, as few as the numbers allow."""
    rows = experts.rows
    small = not rows.size or (int(rows.min()) >= 0 and int(rows.max()) < 256)
    size = 1 if small else 2
    head = _HEAD.pack(experts.start, *rows.shape, size)
    return head + zlib.compress(rows.astype(f"<i{size}" if size == 2 else "u1").tobytes(), 1)


def unpack(packed: bytes) -> Experts:
    """Return the experts that were packed to bytes by `experts.pack`. `ValueError` for
    other bytes.
    """
    try:
        start, *shape, size = _HEAD.unpack_from(packed)
        plain = zlib.decompress(packed[_HEAD.size :])
        rows = np.frombuffer(plain, {1: "u1", 2: "<i2"}[size]).reshape(shape)
    except (struct.error, zlib.error, KeyError, ValueError) as error:
        raise ValueError(f"the stored expert numbers are damaged: {error}") from None
    return Experts(start, rows.astype(np.int16))


def stack_rows(of: Sequence[Rows | None], size: int) -> Rows | None:
    """Return the experts of several sequences, shape (sequences, size, layers, top_k), padded with
    -1.

    `None` = none are known. `TrainingError` for experts of several models.
    """
    shapes = {rows.shape[1:] for rows in of if rows is not None}
    if len(shapes) > 1:
        raise TrainingError(
            "the traces of one batch have experts of several models, by (layers, experts per "
            f"token): {sorted(shapes)}"
        )
    if not shapes:
        return None
    found = np.full((len(of), size, *shapes.pop()), -1, np.int16)
    for place, rows in enumerate(of):
        if rows is not None:
            found[place, : len(rows)] = rows
    return found

"""Texts pack and unpack; a session's are unpacked when one is asked for, and damage stays small."""

import copy
import dataclasses
import hashlib
import pickle
import struct
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.made import MadeSession, content_digest

from bridle.capture.sqlite import SqliteReader, SqliteStore
from bridle.capture.texts import (
    BODY,
    HEAD,
    REPLY,
    Entry,
    SessionTexts,
    head_digest,
    pack,
    unpack,
)
from bridle.errors import StoreError

entries = st.lists(
    st.builds(
        Entry,
        st.integers(0, 2),
        st.binary(min_size=16, max_size=16),
        st.one_of(st.binary(max_size=50), st.binary(max_size=20).map(lambda text: text * 40)),
    )
)


@given(entries)
def test_texts_come_back_as_they_were_packed(given_entries):
    assert list(unpack(pack(given_entries))) == given_entries


def test_texts_are_compressed_only_where_it_pays():
    text = b'{"role": "user", "content": "again and again"}' * 20
    assert len(pack([Entry(0, bytes(16), text)])) < len(text) / 4
    assert pack([Entry(0, bytes(16), b"short and short and short")])[:1] == b"\x00"
    noise = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(100))
    assert pack([Entry(0, bytes(16), noise)])[:1] == b"\x00"


@given(st.binary(max_size=60))
def test_a_damaged_blob_raises_one_of_three_errors(blob):
    with suppress(ValueError, zlib.error, struct.error):
        list(unpack(blob))


# ---- a session's texts

HEAD_TEXT = b'{"model": "policy"}'


def blob(number, *, head=False):
    """A row's texts: a body, a reply and, if asked, the head."""
    body = b"body %d" % number
    packed = [Entry(BODY, content_digest(body), body)]
    packed.append(Entry(REPLY, bytes(16), b"reply %d" % number))
    if head:
        packed.append(Entry(HEAD, head_digest(HEAD_TEXT), HEAD_TEXT))
    return pack(packed)


def texts_of(*blobs):
    texts = SessionTexts()
    heads = [texts.add(each, head_digest(HEAD_TEXT)) for each in blobs]
    return texts, heads


def test_a_sessions_texts_are_its_bodies_and_each_row_has_its_reply():
    texts, heads = texts_of(blob(0, head=True), blob(1), blob(2))
    assert heads == [HEAD_TEXT] * 3
    assert [texts.reply(number) for number in range(3)] == [b"reply 0", b"reply 1", b"reply 2"]
    assert texts == {content_digest(b"body %d" % n): b"body %d" % n for n in range(3)}
    assert len(texts) == 3


def test_a_row_that_comes_later_is_read_too():
    texts, _ = texts_of(blob(0, head=True))
    assert len(texts) == 1
    texts.add(blob(1), head_digest(HEAD_TEXT))
    assert len(texts) == 2
    assert texts.reply(1) == b"reply 1"


@pytest.mark.parametrize("damage", [b"\x07", b"\x01abc", b"", None])
def test_a_damaged_blob_costs_its_own_texts_only(damage):
    texts, heads = texts_of(blob(0, head=True), damage, blob(2))
    assert heads == [HEAD_TEXT] * 3
    assert len(texts) == 2
    assert list(texts.damaged) == [1]
    assert texts.reply(2) == b"reply 2"
    with pytest.raises(StoreError, match="a row's texts are damaged"):
        texts.reply(1)


def test_a_head_whose_text_is_damaged_is_empty():
    assert texts_of(b"\x07", blob(1))[1] == [b"", b""]


def test_a_row_without_a_reply_has_an_empty_one():
    texts, _ = texts_of(pack([Entry(HEAD, head_digest(HEAD_TEXT), HEAD_TEXT)]))
    assert texts.reply(0) == b""


async def test_nothing_is_unpacked_until_a_text_is_asked_for(tmp_path):
    made = MadeSession()
    made.call()
    made.call("x0")
    async with await SqliteStore.open(tmp_path / "capture.sqlite") as store:
        await made.write(store)
    with SqliteReader(tmp_path / "capture.sqlite") as reader:
        first, second = reader.read("s1").exchanges
    assert second.output_ids.tolist() == made.exchanges[1].output_ids.tolist()
    again = [dataclasses.replace(second), copy.copy(second), pickle.loads(pickle.dumps(second))]  # noqa: S301
    assert [each.reply for each in again] == [made.exchanges[1].reply] * 3
    assert second.reply == made.exchanges[1].reply
    assert first.reply == made.exchanges[0].reply
    with pytest.raises(AttributeError, match="answer"):
        _ = first.answer  # type: ignore[attr-defined]

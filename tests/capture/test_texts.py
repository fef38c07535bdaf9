"""Texts pack and unpack; a session's are unpacked when one is asked for, and damage stays small."""

import base64
import copy
import dataclasses
import hashlib
import pickle
import random
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
    DATA,
    HEAD,
    PARTED,
    REPLY,
    SessionTexts,
    TextEntry,
    body_entries,
    head_digest,
    pack,
    unpack,
)
from bridle.errors import StoreError

entries = st.lists(
    st.builds(
        TextEntry,
        st.integers(0, 2),
        st.binary(min_size=16, max_size=16),
        st.one_of(st.binary(max_size=50), st.binary(max_size=20).map(lambda text: text * 200)),
    )
)


@given(entries)
def test_texts_come_back_as_they_were_packed(given_entries):
    assert list(unpack(pack(given_entries))) == given_entries


def test_texts_are_compressed_only_where_it_pays():
    text = b'{"role": "user", "content": "again and again"}' * 60
    assert len(pack([TextEntry(0, bytes(16), text)])) < len(text) / 4
    assert pack([TextEntry(0, bytes(16), text[:1000])])[:1] == b"\x00"
    noise = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(100))
    assert pack([TextEntry(0, bytes(16), noise)])[:1] == b"\x00"


@given(st.lists(st.binary(max_size=50), max_size=9), st.data())
def test_a_cut_blob_yields_whole_entries_or_raises(texts, drawn):
    written, found = [TextEntry(BODY, bytes(16), text) for text in texts], []
    blob = pack(written)
    with suppress(ValueError, struct.error):
        found.extend(unpack(blob[: drawn.draw(st.integers(1, len(blob)))]))
    assert found == written[: len(found)]


@given(st.binary(max_size=60))
def test_a_damaged_blob_raises_one_of_three_errors(blob):
    with suppress(ValueError, zlib.error, struct.error):
        list(unpack(blob))


# ---- data in bodies

RED, BLUE = (f"{letter * 6000}==".encode() for letter in "rb")


def message(*data, words=b"see"):
    """A message in which `data` stand as in three dialects: alone, and as data URLs."""
    forms = (b'{"data":"%s"}', b'{"url":"data:image/png;base64,%s"}', b'{"url":"data:,%s"}')
    blocks = [form % each for form, each in zip(forms, data, strict=False)]
    return b'{"role":"user","content":["%s",%s]}' % (words, b",".join(blocks))


def read_back(*bodies):
    """Return what a session's texts make of bodies, one row each."""
    texts = SessionTexts()
    for body in bodies:
        texts.add(pack(body_entries(content_digest(body), body)), b"")
    return texts


@pytest.mark.parametrize("data", [(RED,), (RED, BLUE), (RED, RED), (BLUE, RED, BLUE)])
def test_long_data_are_entries_of_their_own_and_the_body_comes_back_whole(data):
    body = message(*data)
    *apart, parted = body_entries(content_digest(body), body)
    assert [text for _, _, text in apart] == [*data]
    assert {kind for kind, _, _ in apart} == {DATA}
    assert (parted[0], len(parted[2]) < 300) == (PARTED, True)
    texts = read_back(body)
    assert (dict(texts), texts[content_digest(body)]) == ({content_digest(body): body}, body)


@given(st.lists(st.sampled_from([b'"', b"a" * 3000, b"x/+-_" * 900, b"==", b"data:,", b"\n"])))
def test_any_body_comes_back_whole(pieces):
    body = b"".join(pieces)
    assert read_back(body)[content_digest(body)] == body


def test_long_plain_text_is_not_stored_as_a_data_entry():
    body = b'{"role":"user","content":"%s"}' % (b"many words " * 1000)
    assert [*body_entries(b"", body)] == [(BODY, b"", body)]


def test_a_body_whose_data_are_damaged_is_missing_and_no_other():
    first, second, other = message(RED), message(RED, words=b"again"), message(BLUE)
    texts = SessionTexts()
    texts.add(b"\x07", b"")  # brought RED
    texts.add(pack(body_entries(content_digest(second), second)[1:]), b"")
    texts.add(pack(body_entries(content_digest(other), other)), b"")
    assert dict(texts) == {content_digest(other): other}
    assert content_digest(first) not in texts


async def test_an_image_in_several_messages_is_stored_once(tmp_path):
    image = base64.b64encode(random.Random(1).randbytes(60_000))
    made = MadeSession(texts=False)
    for turn in range(6):
        made.call(f"x{turn - 1}" if turn else None)
        again = message(image, words=b"look %d" % turn)
        made.bodies[content_digest(again)] = again
        made.new_bodies[f"x{turn}"] = {**made.new_bodies[f"x{turn}"], content_digest(again): again}
    path = tmp_path / "capture.sqlite"
    async with await SqliteStore.open(path) as store:
        await store.open_session(made.record)
        for exchange in made.exchanges[:3]:
            await store.commit(exchange, made.new_bodies[exchange.exchange_id])
    async with await SqliteStore.open(path) as store:  # what it had is known again
        for exchange in made.exchanges[3:]:
            await store.commit(exchange, made.new_bodies[exchange.exchange_id])
    assert path.stat().st_size < 1.5 * len(image)
    with SqliteReader(path) as reader:
        assert dict(reader.read("s1").bodies) == made.bodies


# ---- a session's texts

HEAD_TEXT = b'{"model": "policy"}'


def blob(number, *, head=False):
    """A row's texts: a body, a reply and, if asked, the head."""
    body = b"body %d" % number
    packed = [TextEntry(BODY, content_digest(body), body)]
    packed.append(TextEntry(REPLY, bytes(16), b"reply %d" % number))
    if head:
        packed.append(TextEntry(HEAD, head_digest(HEAD_TEXT), HEAD_TEXT))
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


def test_texts_of_a_row_that_is_added_later_are_read():
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
    with pytest.raises(StoreError, match=r"the stored texts of row \d+ are damaged"):
        texts.reply(1)


def test_a_head_whose_text_is_damaged_is_empty():
    assert texts_of(b"\x07", blob(1))[1] == [b"", b""]


def test_a_row_without_a_reply_has_an_empty_one():
    texts, _ = texts_of(pack([TextEntry(HEAD, head_digest(HEAD_TEXT), HEAD_TEXT)]))
    assert texts.reply(0) == b""


async def test_replies_are_readable_from_an_exchange_and_its_copies_after_the_reader_closed(
    tmp_path,
):
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

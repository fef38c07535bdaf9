import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.runtimes.output import Kept, LogFile


@given(st.lists(st.binary(max_size=40)), st.integers(0, 60))
def test_what_is_kept_is_the_head_and_the_tail(pieces, limit):
    kept = Kept(limit)
    for piece in pieces:
        kept.feed(piece)
    whole = b"".join(pieces)
    value = kept.value()
    assert kept.truncated == (len(whole) > limit)
    if not kept.truncated:
        assert value == whole
        return
    head, tail = whole[: (limit + 1) // 2], whole[len(whole) - limit // 2 :]
    note = f"\n[bridle: {len(whole) - limit} bytes left out]\n".encode()
    assert value == head + note + tail


def test_memory_stays_bounded_under_a_flood():
    kept = Kept(1000)
    for _ in range(1000):
        kept.feed(b"x" * 10_000)
    assert len(kept._head) + len(kept._tail) <= 1500


def test_a_log_stops_at_its_limit_and_says_so(tmp_path):
    log = LogFile(tmp_path / "deep" / "log", limit=10)
    log.feed(b"12345")
    log.feed(b"67890abc")
    log.feed(b"more")
    log.close()
    log.close()
    text = (tmp_path / "deep" / "log").read_text()
    assert text == "1234567890\n[bridle: the log's size limit is reached]\n"


def test_a_log_on_a_full_disk_fails_aloud():
    log = LogFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left") as failure:
        log.feed(b"text")
    log.close()
    assert failure.value.errno == errno.ENOSPC

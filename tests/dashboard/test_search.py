"""Search in the messages of a capture file: every form of a text, a little at a time."""

import math

import pytest
from tests.dashboard.house import HOSTILE, client, looked_at

from bridle.capture.reader import SqliteReader
from bridle.dashboard import folder
from bridle.dashboard.folder import TextSearch
from bridle.dashboard.summaries import SessionFilter

ALL = {"one.0", "one.1", "one.2"}


def found(run, text):
    """Sessions whose messages have a text."""
    with SqliteReader(run / "capture.sqlite") as reader:
        wanted = TextSearch(text)
        assert wanted.go_on(reader, math.inf) == 0
        return wanted.found


@pytest.mark.parametrize("text", ["fix it", "LOOK FIRST.", "result <script>", HOSTILE])
def test_a_text_is_found_in_requests_replies_and_calls(run, text):
    assert found(run, text) == ALL


def test_search_for_an_absent_text_finds_no_session(run):
    assert found(run, "a unicorn") == set()


def test_session_list_filtered_by_text_has_the_sessions_whose_messages_contain_the_text(run):
    source = looked_at(run)

    assert source.sessions(SessionFilter(text="look first."), 0, 10).total == 3
    assert source.sessions(SessionFilter(text="look first.", status="ERROR"), 0, 10).total == 1
    assert source.sessions(SessionFilter(text="a unicorn"), 0, 10).total == 0


class After(float):
    """A time that is reached after so many looks at the clock."""

    looks = 0

    def __gt__(self, _):
        self.looks += 1
        return self.looks <= self


def test_an_interrupted_search_resumes_and_the_page_shows_the_number_of_calls_left(
    run, monkeypatch
):
    monkeypatch.setattr(folder, "SEARCHED_ROWS", 2)
    with SqliteReader(run / "capture.sqlite") as reader:
        wanted = TextSearch("look first.")
        assert [wanted.go_on(reader, After(looks)) for looks in (0, 1, 3)] == [15, 13, 7]
        assert wanted.go_on(reader, math.inf) == 0
        assert wanted.found == ALL
    monkeypatch.setattr("bridle.dashboard.folder.SEARCH_S", 0.0)
    with client(run) as browser:
        page = browser.get("/sessions?text=look+first").text
    assert "15 calls have yet to be searched" in " ".join(page.split())


def test_search_skips_a_damaged_text(tmp_path):
    class Rows:
        def texts(self, after, count):
            return [(1, "a", b"\x01nothing"), (2, "b", b"?")][after:count]

    wanted = TextSearch("x")
    assert wanted.go_on(Rows(), math.inf) == 0  # type: ignore[arg-type]  # what it reads
    assert wanted.found == set()

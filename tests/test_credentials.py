import stat

import pytest

from bridle.credentials import announce_server, find_token, load_or_make_token, split_token
from bridle.errors import ConfigError

URL = "http://127.0.0.1:8080"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "data" / "server.token"
    load_or_make_token(path)
    return path


def test_a_token_is_made_once_and_only_its_user_reads_it(tmp_path):
    path = tmp_path / "deep" / "token"
    token = load_or_make_token(path)
    assert len(token) >= 32
    assert load_or_make_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_token_file_that_is_empty_or_unreadable_is_named(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="empty: is empty"):
        load_or_make_token(tmp_path / "empty")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_or_make_token(tmp_path)


@pytest.mark.parametrize(
    ("url", "rest", "token"),
    [
        ("http://x:TOKEN@host:80/a?b=c", "http://host:80/a?b=c", "TOKEN"),
        ("https://TOKEN@host", "https://host", "TOKEN"),
        ("http://x:a%40b%3Ac@[::1]:8080", "http://[::1]:8080", "a@b:c"),
        ("http://host/x:y@z", "http://host/x:y@z", None),
        ("http://@host", "http://host", None),
        ("nothing", "nothing", None),
    ],
)
def test_a_url_is_parted_from_its_token(url, rest, token):
    assert split_token(url) == (rest, token)


def test_a_living_server_is_found_by_its_addresses(kept):
    assert find_token(URL) is None
    with announce_server(URL, kept):
        token = kept.read_text().strip()
        assert find_token(URL) == (URL, token)
        assert find_token("http://localhost:8080") == (URL, token)
        for other in (
            *("http://127.0.0.1:8081", "http://127.0.0.2:8080", "http://evil.example:8080"),
            *("https://127.0.0.1:8080", "http://[::1]:8080", "http://127.0.0.1:x", "nothing"),
        ):
            assert find_token(other) is None, other
    assert find_token(URL) is None


def test_a_server_on_all_addresses_is_found_on_loopback(kept):
    with announce_server("http://0.0.0.0:8080", kept):
        assert find_token(URL) == (URL, kept.read_text().strip())
        assert find_token("http://192.0.2.1:8080") is None


def test_the_note_of_a_server_that_was_killed_is_not_believed(kept, tmp_path):
    """Another user may listen on its port by now, and must not be sent the token."""
    with announce_server(URL, kept):
        (note,) = (tmp_path / "state" / "bridle" / "servers").iterdir()
        text = note.read_text()
        assert stat.S_IMODE(note.stat().st_mode) == 0o600
        assert stat.S_IMODE(note.parent.stat().st_mode) == 0o700
        assert kept.read_text().strip() not in text
    note.write_text(text)
    assert find_token(URL) is None
    with announce_server(URL, kept):
        assert find_token(URL) is not None


def test_a_second_server_does_not_take_over_a_living_ones_note(kept):
    with announce_server(URL, kept):
        with pytest.raises(BlockingIOError), announce_server(URL, kept):
            pass
        assert find_token(URL) is not None


def test_a_note_that_cannot_be_written_is_the_callers_to_tell(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(kept))
    with pytest.raises(FileExistsError), announce_server(URL, kept):
        pass

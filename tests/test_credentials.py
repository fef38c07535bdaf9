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


def test_a_server_token_is_created_once_in_a_file_of_mode_600(tmp_path):
    path = tmp_path / "deep" / "token"
    token = load_or_make_token(path)
    assert len(token) >= 32
    assert load_or_make_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_or_unreadable_token_file_is_refused_by_name(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="empty is empty"):
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
def test_a_token_is_split_from_its_url(url, rest, token):
    assert split_token(url) == (rest, token)


def test_the_token_of_a_running_server_is_found_by_its_url_only(kept):
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


def test_the_token_of_a_server_on_all_addresses_is_found_by_its_loopback_url(kept):
    with announce_server("http://0.0.0.0:8080", kept):
        assert find_token(URL) == (URL, kept.read_text().strip())
        assert find_token("http://192.0.2.1:8080") is None


def test_the_announcement_of_a_killed_server_gives_no_token(kept, tmp_path):
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


def test_a_second_server_cannot_replace_the_announcement_of_a_running_one(kept):
    with announce_server(URL, kept):
        with pytest.raises(BlockingIOError), announce_server(URL, kept):
            pass
        assert find_token(URL) is not None


def test_announcing_a_server_raises_when_the_state_folder_is_a_file(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(kept))
    with pytest.raises(FileExistsError), announce_server(URL, kept):
        pass

import pytest

from bridle.server.permits import Permits
from bridle.server.settings import ServerSettings


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_on_loopback_local_runs(host):
    assert ServerSettings(host=host).checked().permits.local


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "server.example"])
def test_elsewhere_local_does_not_run(host):
    assert not ServerSettings(host=host).checked().permits.local


def test_nobody_sets_local_from_outside_the_file():
    given = ServerSettings(host="0.0.0.0", permits=Permits(local=True))
    assert not given.checked().permits.local

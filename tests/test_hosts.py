import socket

import pytest

from bridle.credentials import Hosts, is_loopback, name_of


def answered(host, bound="127.0.0.1", allowed=()):
    return Hosts(bound, allowed, "--allow-host").refusal([host]) is None


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:80", "127.8.8.8", "[::1]"]
)
def test_a_loopback_listener_accepts_loopback_host_headers(host):
    assert answered(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "", ":80"),
        *("192.0.2.1", "[fe80::1]", "[evil.example]", "0.0.0.0", "localhost.", "xlocalhost"),
        *("evil.example:80@localhost", "localhost@evil.example", "127.1", "2130706433"),
        *("127.0.0.1:80/static/?", "localhost:1/", "[::1]/static/", "[::1]x", "localhost:x"),
    ],
)
def test_a_loopback_listener_refuses_other_host_headers_with_the_option(host):
    refused = Hosts("127.0.0.1", (), "--allow-host").refusal([host])
    assert refused is not None
    assert repr(host) in refused
    assert "--allow-host" in refused


def test_requests_without_exactly_one_host_header_are_refused():
    hosts = Hosts("127.0.0.1")
    assert hosts.refusal([]) is not None
    assert hosts.refusal(["localhost", "localhost"]) is not None


def test_a_listener_on_all_addresses_accepts_any_ip_and_its_own_host_name():
    for bound in ("0.0.0.0", "::"):
        assert answered("192.0.2.7:8080", bound)
        assert answered("[2001:db8::1]:8080", bound)
        assert answered(f"{socket.gethostname()}:8080", bound)
        assert not answered("evil.example", bound)
    assert answered("10.0.0.5", "10.0.0.5")
    assert not answered("10.0.0.6", "10.0.0.5")


def test_allowed_host_names_are_accepted_in_any_case():
    assert answered("Trainer.example:80", allowed=("trainer.EXAMPLE",))
    assert not answered("deep.trainer.example", allowed=("trainer.example",))


def test_is_loopback_accepts_loopback_addresses_and_localhost_only():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "server.example")))


@pytest.mark.parametrize(
    ("host", "name"),
    [("A.b:80", "a.b"), ("[::1]:80", "::1"), ("a", "a"), ("", ""), ("[::1", "")],
)
def test_the_host_name_is_parsed_from_a_host_header_with_a_port(host, name):
    assert name_of(host) == name

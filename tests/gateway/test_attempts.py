"""Wrong tokens by peer."""

import pytest

from bridle.gateway.keys import AT_ONCE, EACH_S, PEERS, WrongTokens


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_peer_that_sends_many_wrong_tokens_waits_and_others_do_not():
    clock = Clock()
    wrong = WrongTokens(clock)
    assert [wrong.wait_s("10.0.0.1") for _ in range(AT_ONCE)] == [0] * AT_ONCE
    assert wrong.wait_s("10.0.0.1") == EACH_S
    assert wrong.wait_s("10.0.0.2") == 0
    clock.now += EACH_S
    assert [wrong.wait_s("10.0.0.1"), wrong.wait_s("10.0.0.1")] == [0, EACH_S]


@pytest.mark.parametrize(
    ("one", "another", "same"),
    [
        ("2001:db8::1", "2001:db8::2:3", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        (None, "", True),
    ],
)
def test_wrong_tokens_are_counted_per_ipv4_address_or_ipv6_64_prefix(one, another, same):
    wrong = WrongTokens(Clock())
    for _ in range(AT_ONCE):
        wrong.wait_s(one)
    assert (wrong.wait_s(another) > 0) is same


def test_the_number_of_peers_remembered_for_wrong_tokens_is_bounded():
    wrong = WrongTokens(Clock())

    def others(count):
        for number in range(count):
            wrong.wait_s(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")

    for _ in range(AT_ONCE):
        wrong.wait_s("192.0.2.1")
    others(PEERS - 1)
    assert wrong.wait_s("192.0.2.1") > 0
    others(PEERS)
    assert wrong.wait_s("192.0.2.1") == 0

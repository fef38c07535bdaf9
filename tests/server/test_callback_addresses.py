from ipaddress import ip_address

import pytest
from aiohttp.abc import AbstractResolver

from bridle.server.callbacks import CallbackAddresses, CheckedResolver, ForbiddenAddressError

INSIDE = [
    *("127.0.0.1", "127.1", "0x7f000001", "2130706433", "0.0.0.0", "10.0.0.1", "172.16.3.4"),
    *("192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "[::1]", "[::]", "[fe80::1]"),
    *("[fd00::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "127.0.0.1."),
    # The client reads these as 127.0.0.1, as IDNA asks.
    *(
        "\uff11\uff12\uff17.0.0.1",
        "127\u30020\u30020\u30021",
        "\u2460\u2461\u2466.0.0.1",
        "1\u00b27.0.0.1",
    ),
]


@pytest.mark.parametrize("host", INSIDE)
def test_internal_addresses_are_refused_unless_listed(host):
    with pytest.raises(ForbiddenAddressError, match="not permitted"):
        CallbackAddresses([]).check_url(f"http://{host}:8000/x")


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://h/x", "http:///x", "http://user:pw@example.com/", "file:///etc/passwd", "h"),
        "http://h:0/",
    ],
)
def test_only_plain_urls_are_permitted(url):
    with pytest.raises(ForbiddenAddressError, match="must be http:// or https://"):
        CallbackAddresses([]).check_url(url)


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("2852039166", "0xa9.0xfe.0xa9.0xfe", "0251.0376.0251.0376", "[::ffff:169.254.169.254]"),
        *("[::ffff:0:169.254.169.254]", "[::169.254.169.254]", "[64:ff9b::168.63.129.16]"),
        *("[64:ff9b:1::169.254.169.254]", "[2002:a9fe:a9fe::]", "[fd00:ec2::254]"),
        *("\uff11\uff16\uff19.254.169.254", "\u246f\u2468.254.169.254"),
        *("[fd20:ce::254]", "[fe80::5efe:169.254.169.254]", "[2001:db8::5efe:169.254.169.254]"),
    ],
)
@pytest.mark.parametrize("listed", [(), ("0.0.0.0/0", "::/0")])
def test_no_list_permits_cloud_metadata_services(host, listed):
    with pytest.raises(ForbiddenAddressError, match=r"credentials"):
        CallbackAddresses(listed).check_url(f"http://{host}/latest")
    bare = host.strip("[]")
    if ":" in bare:
        with pytest.raises(ForbiddenAddressError, match="credentials"):
            CallbackAddresses(["trainer"]).check("trainer", ip_address(bare))


@pytest.mark.parametrize("url", ["http://\u2161\ud800/", "http://h:99999/", "http://a\\@b/"])
def test_urls_that_the_client_cannot_parse_are_refused(url):
    with pytest.raises(ForbiddenAddressError, match="cannot be read"):
        CallbackAddresses([]).check_url(url)


def test_site_local_addresses_are_internal():
    with pytest.raises(ForbiddenAddressError, match="not permitted"):
        CallbackAddresses([]).check_url("http://[fec0::1]/x")
    CallbackAddresses(["::1"]).check_url("http://[::1]/x")


def test_an_empty_callback_list_permits_every_public_address():
    CallbackAddresses([]).check_url("https://example.com/x")
    CallbackAddresses([]).check("example.com", ip_address("93.184.215.14"))


def test_listed_network_permits_internal_addresses_and_forbids_all_others():
    addresses = CallbackAddresses(["10.1.0.0/16"])
    addresses.check_url("http://10.1.2.3/x")
    addresses.check("trainer", ip_address("10.1.2.3"))
    addresses.check("trainer", ip_address("::ffff:10.1.2.3"))
    for outside in ("10.2.0.1", "93.184.215.14"):
        with pytest.raises(ForbiddenAddressError):
            addresses.check_url(f"http://{outside}/x")


def test_listed_name_may_have_any_address():
    addresses = CallbackAddresses(["trainer", "*.lab.example"])
    addresses.check_url("http://trainer:9/x")
    addresses.check("TRAINER.", ip_address("10.0.0.1"))
    addresses.check("a.lab.example", ip_address("10.0.0.1"))
    for host in ("lab.example", "evil-trainer", "trainer.evil", "a.lab.example.evil"):
        with pytest.raises(ForbiddenAddressError):
            addresses.check_url(f"http://{host}/x")


class Resolver(AbstractResolver):
    """Gives these addresses for every name."""

    def __init__(self, *found):
        self.found = found
        self.closed = False

    async def resolve(self, host, port=0, family=0):
        return [
            {"hostname": host, "host": one, "port": port, "family": 2, "proto": 0, "flags": 0}
            for one in self.found
        ]

    async def close(self):
        self.closed = True


async def test_name_that_resolves_to_an_internal_address_is_not_connected():
    resolver = CheckedResolver(CallbackAddresses([]), Resolver("127.0.0.1", "fe80::1%eth0"))
    with pytest.raises(ForbiddenAddressError, match="an internal address"):
        await resolver.resolve("innocent.example", 80)


async def test_only_permitted_addresses_of_a_name_are_connected_to():
    inner = Resolver("10.0.0.1", "93.184.215.14")
    resolver = CheckedResolver(CallbackAddresses([]), inner)
    found = await resolver.resolve("example.com", 80)
    assert [one["host"] for one in found] == ["93.184.215.14"]
    await resolver.close()
    assert inner.closed

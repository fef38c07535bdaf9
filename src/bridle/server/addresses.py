"""Checks of callback addresses: the operator's list, and no internal address by any detour.

A name is resolved once, what it resolves to is judged, and the connection is made to that very
address; redirects are not followed. So a name that turns to a private address between two looks
reaches nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from bridle.errors import BridleError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

WRAPPERS: Final = tuple(
    ip_network(one) for one in ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48")
)
"""IPv6 networks whose addresses end in the IPv4 address that they stand for: the compatible form,
SIIT (RFC 7915), and what NAT64 translates (RFC 6052, RFC 8215)."""

ISATAP: Final = frozenset({0x00005EFE, 0x02005EFE})
"""Third quarter of an IPv6 address that ends in an IPv4 one (RFC 5214)."""

METADATA: Final = tuple(
    ip_network(one)
    for one in (
        "169.254.0.0/16",  # AWS, Google, Azure, Oracle, DigitalOcean, and AWS's ECS and EKS
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure's host
        "192.0.0.192",  # Oracle
        "fd00:ec2::/32",  # AWS
        "fd20:ce::254",  # Google
        "fe80::a9fe:a9fe",  # OpenStack
    )
)
"""Where clouds hand a machine its credentials. No operator's list permits them."""


class ForbiddenAddressError(BridleError):
    """A callback's address is not one that the operator permits."""


def receiver_of(url: str) -> str:
    """Return the receiver of callbacks to `url`: scheme, host and port, at most 300 characters."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()[:300]


class Addresses:
    """Addresses that the operator's list (`Permits.callbacks`) permits."""

    def __init__(self, listed: Sequence[str]) -> None:
        self._networks: list[Network] = []
        self._names: list[str] = []
        for one in listed:
            network = _network(one)
            if network is None:
                self._names.append(one.lower().rstrip("."))
            else:
                self._networks.append(network)

    def check_url(self, url: str) -> None:
        """Judge the host that the HTTP client will connect to, before its name is resolved.

        Raises `ForbiddenAddressError`. The client's own parser reads the URL: it turns full-width
        and circled digits into an address that is never resolved.
        """
        try:
            parts = URL(url)
            is_plain = parts.port != 0 and parts.user is None
        except ValueError as error:
            raise ForbiddenAddressError(f"{url!r} is no URL: {error}") from None
        host = (parts.raw_host or "").rstrip(".")
        if parts.scheme not in ("http", "https") or not host or not is_plain:
            raise ForbiddenAddressError(f"{url!r} is not a plain http:// or https:// URL")
        address = _address(host)
        if address is not None:
            self.check(host, address)
        elif self._names and not self._networks and not self._is_listed(host):
            raise ForbiddenAddressError(f"callbacks to {host!r} are not permitted")

    def check(self, host: str, address: Address) -> None:
        """Raise `ForbiddenAddressError` if `host`, found at `address`, may not be called."""
        real = _real(address)
        if any(_within(real, network) for network in METADATA):
            message = f"{host!r} is the address {address}, where clouds keep credentials"
            raise ForbiddenAddressError(f"{message}; it is not permitted")
        if self._is_listed(host) or any(_within(real, network) for network in self._networks):
            return
        local = real.is_multicast or (isinstance(real, IPv6Address) and real.is_site_local)
        if local or not real.is_global:
            raise ForbiddenAddressError(
                f"{host!r} is the address {address} of the inside, which is not permitted"
            )
        if self._names or self._networks:
            raise ForbiddenAddressError(f"callbacks to {host!r} ({address}) are not permitted")

    def _is_listed(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        return any(
            host == name or (name.startswith("*.") and host.endswith(name[1:]))
            for name in self._names
        )


class JudgingResolver(AbstractResolver):
    """Resolves names to permitted addresses only."""

    def __init__(self, addresses: Addresses, resolver: AbstractResolver | None = None) -> None:
        self._addresses = addresses
        self._resolver = resolver or ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The permitted addresses of a name; `ForbiddenAddressError` if there are others only."""
        permitted: list[ResolveResult] = []
        refused: ForbiddenAddressError | None = None
        for found in await self._resolver.resolve(host, port, family):
            try:
                self._addresses.check(host, ip_address(found["host"].partition("%")[0]))
            except ForbiddenAddressError as error:
                refused = error
            else:
                permitted.append(found)
        if refused is not None and not permitted:
            raise refused
        return permitted

    async def close(self) -> None:
        await self._resolver.close()


def _real(address: Address) -> Address:
    """The IPv4 address that an IPv6 one only wraps."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        is_own = address.is_loopback or address.is_unspecified
        wraps = not is_own and any(address in network for network in WRAPPERS)
        if wraps or int(address) >> 32 & 0xFFFFFFFF in ISATAP:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _within(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network


def _address(host: str) -> Address | None:
    """The address that a URL's host is; also in the forms that the system's resolver takes."""
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:  # 127.1, 0x7f000001, 2130706433
        return ip_address(socket.inet_aton(host))
    except OSError:
        return None


def _network(given: str) -> Network | None:
    try:
        return ip_network(given, strict=False)
    except ValueError:
        return None

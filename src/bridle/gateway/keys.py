"""Session keys: 256 random bits behind `bk-`, made for one session, kept only as a hash.

A key reaches us in any of the places where a provider's client puts it. It is looked up by its
sha256, so what is compared, stored and written to disk never shows the key itself.

`WrongTokens` counts wrong control tokens by the address that sends them: an address that guesses
must wait.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import unquote_plus

PREFIX = "bk-"
_KEY = re.compile(r"bk-[A-Za-z0-9_-]{8,}")


def mint_key() -> str:
    """Return a new session key: `bk-` and 43 URL-safe characters that hold 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def key_digest(key: str) -> bytes:
    """Return the sha256 digest of a session key, the only form in which it is stored."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def redact(text: str) -> str:
    """Return the same text with every session key replaced by `bk-***`, for logs and messages."""
    return _KEY.sub(PREFIX + "***", text)


def presented_keys(headers: Mapping[str, str], query: str) -> list[str]:
    """Return all credentials of a request, in no particular order of trust; may be empty.

    `headers` have lower-case names. Read are `Authorization: Bearer`, `x-api-key`,
    `x-goog-api-key` and `?key=`: clients of one provider use several of them, sometimes at once.
    """
    found = []
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and (bearer := bearer.strip()):
        found.append(bearer)
    named = (headers.get("x-api-key", ""), headers.get("x-goog-api-key", ""))
    found.extend(value.strip() for value in named if value)
    if "key=" in query:
        for pair in query.split("&"):
            name, _, value = pair.partition("=")
            if name == "key" and value:
                found.append(unquote_plus(value))
    return found


AT_ONCE: Final = 30
"""Wrong tokens of one peer that are only refused."""

EACH_S: Final = 2.0
"""Seconds after which one more is."""

PEERS: Final = 4096
"""Peers that are remembered: the last ones."""

IPV6_PREFIX: Final = 64
"""Bits of an IPv6 address that make a peer: one host may have all addresses below."""

TOO_MANY: Final = "too many wrong tokens from this address; send none, or the right one"


class WrongTokens:
    """Wrong tokens of each peer, in constant time and bounded memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()
        """Time at which a peer's wrong tokens are forgotten; each adds `EACH_S`."""

    def wait_s(self, address: str | None) -> int:
        """Count a wrong token of a client; return for how many seconds it must wait, 0 while it
        need not.
        """
        peer, now = _peer(address or ""), self._clock()
        free_at = max(self._free_at.pop(peer, now), now)
        wait_s = free_at + EACH_S - (now + AT_ONCE * EACH_S)
        self._free_at[peer] = free_at if wait_s > 0 else free_at + EACH_S
        if len(self._free_at) > PEERS:
            self._free_at.popitem(last=False)
        return math.ceil(max(wait_s, 0))


def _peer(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a socket without addresses
        return ""
    if ip.version == 4:
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, IPV6_PREFIX), strict=False))

"""Wrong tokens, counted by the address that sends them: an address that guesses must wait."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

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
        """Count a wrong token; whole seconds for which the peer must wait, 0 while it need not."""
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

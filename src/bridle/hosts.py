"""The `Host` headers that a listener answers: the guard against DNS rebinding.

A web page can point its own name at this machine; its requests then come with that name, and the
browser takes page and server for one origin. A request is answered only under `localhost`, an
address of the listener, or a name that the operator allows. Addresses can't be rebound: a listener
on all addresses answers any.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

LOCALHOST = "localhost"

HOST: Final = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::\d*)?", re.ASCII)


class Hosts:
    """The names and addresses of one listener."""

    def __init__(self, bound: str, allowed: Collection[str] = (), setting: str = "") -> None:
        """`bound` is the address to listen on; `setting` is how to allow a name, for messages."""
        address = _address(bound)
        self._anywhere = address is not None and address.is_unspecified
        self._setting = setting
        self._names = {LOCALHOST, bound.lower(), *(name.lower() for name in allowed)}
        if not is_loopback(bound):
            self._names.add(socket.gethostname().lower())

    def refusal(self, sent: Sequence[str]) -> str | None:
        """Reason why a request with these `Host` headers is not answered; `None` = it is."""
        name = name_of(sent[0]) if len(sent) == 1 else ""
        address = _address(name)
        if name and (
            name in self._names or (address is not None and (self._anywhere or address.is_loopback))
        ):
            return None
        shown = ", ".join(repr(one[:200]) for one in sent) or "no Host"
        return f"requests to {shown} are not answered; {self._setting} allows a name"


def is_loopback(host: str) -> bool:
    """Return whether a listener at this address or name is reachable only from this machine."""
    address = _address(host)
    return host == LOCALHOST if address is None else address.is_loopback


def name_of(host: str) -> str:
    """Return the name or address in a `Host` header, in lower case, without port and brackets.

    Empty for anything else: what follows a name could be read as a path.
    """
    found = HOST.fullmatch(host)
    return "" if found is None else (found[1] or found[2]).lower()


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None

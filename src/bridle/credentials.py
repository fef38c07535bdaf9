"""Tokens of servers: made once and kept in a file, part of a URL, found by the same user's clients.

A server on this machine notes in the user's state folder (`$XDG_STATE_HOME/bridle/servers`) where
its token file lies, and holds a lock on that note while it lives. A client of the same user reads
the token of a server that lives. A note whose server has ended is not believed: somebody else may
listen on the port by now.

`Hosts` guards a listener against DNS rebinding by the `Host` headers that it answers. A web page
can point its own name at this machine; its requests then come with that name, and the browser takes
page and server for one origin. A request is answered only under `localhost`, an address of the
listener, or a name that the operator allows. Addresses can't be rebound: a listener on all
addresses answers any.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

from bridle.errors import ConfigError
from bridle.folders import private_folder

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
        """Return why a request with these `Host` headers is not answered; `None` = it is
        answered.
        """
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

    Empty for a header of any other form, which could be read as a path.
    """
    found = HOST.fullmatch(host)
    return "" if found is None else (found[1] or found[2]).lower()


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


TRIES = 20
"""At a note's lock, which a client holds for a moment."""


def load_or_make_token(path: Path) -> str:
    """Return the token in a file (mode 0600), which is made if it does not exist.

    `ConfigError` if it cannot be read or written, or is empty.
    """
    try:
        if path.exists():
            if token := path.read_text().strip():
                return token
            raise ConfigError(f"the token file {path} is empty; remove it, and a new token is made")
        private_folder(path.parent)
        token = secrets.token_urlsafe(32)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise ConfigError(
            f"the token file {path} cannot be read or written: {error.strerror or error}"
        ) from error
    return token


def split_token(url: str) -> tuple[str, str | None]:
    """Return a URL without user info, and the token that is its password (`http://x:TOKEN@host`),
    or else its user (`http://TOKEN@host`).

    `None` = it has neither.
    """
    parts = urlsplit(url)
    info, at, place = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = info.partition(":")
    return urlunsplit(parts._replace(netloc=place)), unquote(password or user) or None


@contextmanager
def announce_server(url: str, token_file: Path) -> Iterator[None]:
    """Within the context, this user's clients on this machine find the token of the server at
    `url`.

    `OSError` if the file that tells them cannot be written.
    """
    parts = urlsplit(url)
    note = _note(parts.hostname or "", parts.port or 80)
    private_folder(note.parent)
    descriptor = os.open(note, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w") as file:
        _lock(descriptor)
        file.truncate()
        file.write(str(token_file.resolve()))
        file.flush()
        try:
            yield
        finally:
            note.unlink(missing_ok=True)


def find_token(url: str) -> tuple[str, str] | None:
    """Return the token of this user's server at a URL of this machine, and the URL with its
    address.

    `None` = no server of this user's is known there. The address stands for `localhost`, so that
    the token goes to that server and to no other that listens under the name.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        return None
    try:
        port = parts.port or 80
    except ValueError:
        return None
    for host in ("127.0.0.1", "::1") if parts.hostname == LOCALHOST else (parts.hostname,):
        bound = (host, "0.0.0.0", "::") if is_loopback(host) else (host,)  # noqa: S104 - names of notes
        for one in bound:
            if token := _of_living(_note(one, port)):
                place = f"[{host}]" if ":" in host else host
                return urlunsplit(parts._replace(netloc=f"{place}:{port}")), token
    return None


def _note(host: str, port: int) -> Path:
    """Return the file of a server.

    The name says of which machine, as home folders may be shared.
    """
    state = os.environ.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path.home() / ".local" / "state"
    return folder / "bridle" / "servers" / f"{socket.gethostname()}_{host}_{port}"


def _lock(descriptor: int) -> None:
    for left in reversed(range(TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.05)
        else:
            return


def _of_living(note: Path) -> str | None:
    try:
        with note.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # its server lives
                return Path(file.read()).read_text().strip() or None
    except OSError:
        pass
    return None

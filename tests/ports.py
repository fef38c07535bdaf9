"""Ports for servers of tests that cannot choose one themselves."""

import secrets
import socket

LISTED = range(16_384, 32_768)
"""Below the ports that Linux gives to connections, and to servers that ask for any port: nobody
gets one of these between its choice and the start of the test's server."""


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    while True:
        port = secrets.choice(LISTED)
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)):
                return port

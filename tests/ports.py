"""Ports for servers of tests that cannot choose one themselves."""

import socket


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port

"""Run a command in a network of its own, out of which only given ports of this machine lead.

`python -I -S only_gateway.py PORT[,PORT...] COMMAND...`: the command runs in a new network
namespace that has a loopback and nothing else: no route, no name server, none of this machine's
services. `127.0.0.1:PORT` in it is `127.0.0.1:PORT` of this machine. The command keeps the process
id, the streams and the exit code of this program; the forwarder is a child of it that stays outside
and ends with it. Needs root or unprivileged user namespaces.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct
import sys
from threading import Thread

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
PR_SET_PDEATHSIG = 1
NOT_FOUND, NOT_EXECUTABLE = 127, 126

LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(flags):
    if LIBC.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def enter_a_network_of_its_own():
    """Enter a new network namespace, in a new user namespace if not root."""
    try:
        unshare(CLONE_NEWNET)
    except PermissionError:
        user, group = os.getuid(), os.getgid()
        unshare(CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - starts without pathlib
                file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        wanted = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("16sH", fcntl.ioctl(control, SIOCGIFFLAGS, wanted))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def pass_on(source, target):
    """Bytes of one direction; its end is passed on, and a break breaks the other side too."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for side in (source, target):
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


def forward(port, here):
    """One connection, until both directions have ended."""
    try:
        there = socket.create_connection(("127.0.0.1", port))
    except OSError:
        here.close()
        return
    back = Thread(target=pass_on, args=(there, here), daemon=True)
    back.start()
    pass_on(here, there)
    back.join()
    here.close()
    there.close()


def serve(port, door):
    while True:
        connection, _ = door.accept()
        Thread(target=forward, args=(port, connection), daemon=True).start()


def be_the_forwarder(ports, inside, parent):
    """Take the sockets that listen inside, and serve them from outside until `parent` ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    if os.getppid() == parent:
        _, fds, _, _ = socket.recv_fds(inside, 1, len(ports))
        if len(fds) == len(ports):
            for port, fd in zip(ports, fds, strict=True):
                door = socket.socket(fileno=fd)
                Thread(target=serve, args=(port, door), daemon=True).start()
            signal.pause()
    os._exit(0)


def main():
    ports = [int(port) for port in sys.argv[1].split(",") if port]
    command = sys.argv[2:]
    here, there = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        here.close()
        be_the_forwarder(ports, there, parent)
    there.close()
    enter_a_network_of_its_own()
    listening = [socket.create_server(("127.0.0.1", port), backlog=128) for port in ports]
    socket.send_fds(here, [b"!"], [door.fileno() for door in listening])
    for door in (*listening, here):
        door.close()
    try:
        os.execvp(command[0], command)  # noqa: S606 - what this program is for
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE)


if __name__ == "__main__":
    main()

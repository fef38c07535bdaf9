"""Entering the namespaces of a sandbox: to run a command in all of them, to listen in its network.

`bwrap` makes two user namespaces, one in the other: the outer owns the sandbox's mounts and
network, the inner is the one that commands run in, without any power over them. A privileged
process enters the inner one with `nsenter`, and the network with a thread of its own, which ends
there. Any other must first enter the outer one, which only its maker may, and only while it has a
single thread; a small Python program does that, one start of an interpreter slower.

The numbers are those of `linux/nsfs.h` and `sched.h`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from threading import Thread

from bridle.errors import RuntimeFailure

CAP_SYS_ADMIN = 21
CLONE_NEWNET = 0x40000000
BACKLOG = 128
PYTHON = (sys.executable, "-I", "-S", "-c")

_SETNS = """
import ctypes, fcntl, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def opened(pid, name):
    return os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
def setns(fd):
    if libc.setns(fd, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def owner(fd):
    return fcntl.ioctl(fd, 0xB701)
"""

_LISTEN = f"""{_SETNS}
channel, pid, port = map(int, sys.argv[1:4])
network = opened(pid, "net")
users = owner(network)
if os.fstat(users).st_ino != os.stat("/proc/self/ns/user").st_ino:
    setns(users)
setns(network)
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen({BACKLOG})
socket.send_fds(socket.socket(fileno=channel), [b"1"], [listener.fileno()])
"""

_ENTER = f"""{_SETNS}
pid, argv = sys.argv[1], sys.argv[2:]
spaces = [opened(pid, name) for name in ("cgroup", "ipc", "uts", "net", "pid", "mnt")]
outer, inner = owner(spaces[-1]), opened(pid, "user")
setns(outer)
for space in spaces:
    setns(space)
child = os.fork()
if child == 0:
    if os.fstat(inner).st_ino != os.fstat(outer).st_ino:
        setns(inner)
    for fd in (*spaces, outer, inner):
        os.close(fd)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(argv[0], argv)
signal.signal(signal.SIGINT, signal.SIG_IGN)
status = os.waitpid(child, 0)[1]
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != 9 else None
    os.kill(os.getpid(), os.WTERMSIG(status))
sys.exit(os.waitstatus_to_exitcode(status))
"""


@cache
def is_privileged() -> bool:
    """Whether this process may enter any namespace of this machine."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    powers = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(powers, 16) >> CAP_SYS_ADMIN & 1) and os.geteuid() == 0


def enter(pid: int, *, privileged: bool | None = None) -> list[str]:
    """The beginning of a command line; what follows, an absolute path and arguments, runs inside.

    `pid` is a process of the sandbox, by this machine's numbers. Exit code and signal are those of
    the command. `privileged` `None` = as this process is.
    """
    if is_privileged() if privileged is None else privileged:
        nsenter = shutil.which("nsenter") or "/usr/bin/nsenter"
        spaces = ["-U", "-m", "-p", "-n", "-i", "-u", "-C", "--preserve-credentials"]
        return [nsenter, "-t", str(pid), *spaces, "--"]
    return [*PYTHON, _ENTER, str(pid)]


def listen_inside(
    pid: int, port: int, *, timeout_s: float, privileged: bool | None = None
) -> socket.socket:
    """A socket that listens on 127.0.0.1:`port` in the network of the sandbox of process `pid`.

    Blocks; without privileges for the start of an interpreter. Raises `RuntimeFailure`.
    """
    privileged = is_privileged() if privileged is None else privileged
    try:
        listener = _by_thread(pid, port) if privileged else _by_program(pid, port, timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"cannot listen in the sandbox's network: {error}"
        raise RuntimeFailure(message) from error
    listener.settimeout(0)
    return listener


def _by_thread(pid: int, port: int) -> socket.socket:
    """Listen from a thread that enters the network and ends."""
    made: Future[socket.socket] = Future()

    def listen() -> None:
        try:
            with Path(f"/proc/{pid}/ns/net").open("rb") as space:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(space.fileno(), CLONE_NEWNET) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number))
            made.set_result(socket.create_server(("127.0.0.1", port), backlog=BACKLOG))
        except OSError as error:
            made.set_exception(error)

    thread = Thread(target=listen, name="sandbox-listener")
    thread.start()
    thread.join()
    return made.result()


def _by_program(pid: int, port: int, timeout_s: float) -> socket.socket:
    """Listen from a small program that hands the socket over."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0)
        fd = theirs.fileno()
        try:
            done = subprocess.run(
                [*PYTHON, _LISTEN, str(fd), str(pid), str(port)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
            _, sockets, _, _ = socket.recv_fds(ours, 1, 1)
        except BlockingIOError:
            raise OSError(done.stderr.decode(errors="replace").strip()[-500:]) from None
    return socket.socket(fileno=sockets[0])

"""Starting a sandbox and entering its namespaces, always under its profile.

`bwrap` makes two user namespaces, one in the other: the outer owns the sandbox's mounts and
network, the inner is the one that commands run in, without any power over them. A process that
enters from outside inherits nothing of what `bwrap` gave up, so a small Python program enters for
every command and then gives up the same: a session keyring of its own, an empty bounding set,
no_new_privs, the filter of `seccomp`. It must be single-threaded, since only such a process may
change its user namespace. A privileged process listens in the network by a thread of its own, any
other by such a program.

The numbers are those of `linux/nsfs.h`, `linux/prctl.h`, `linux/keyctl.h` and `sched.h`.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from threading import Thread

from bridle.errors import RuntimeFailure
from bridle.runtimes.seccomp import filter_program

CAP_SYS_ADMIN = 21
CLONE_NEWNET = 0x40000000
BACKLOG = 128
PYTHON = (sys.executable, "-I", "-S", "-c")

_LIBC = """
import _signal as signal, ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def succeed(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def join(groups):
    for group in groups:
        os.write(group, b"0")  # 0 is the process that writes
        os.close(group)
def new_keyring():
    # Refused or missing where no keys can be read either: in a container, without CONFIG_KEYS.
    libc.syscall({"x86_64": 250, "aarch64": 219}[os.uname().machine], 1, None)
"""

_SETNS = f"""{_LIBC}
import fcntl
def opened(pid, name):
    return os.open(f"/proc/{{pid}}/ns/{{name}}", os.O_RDONLY)
def setns(fd):
    succeed(libc.setns(fd, 0))
def owner(fd):
    return fcntl.ioctl(fd, 0xB701)
"""

_LISTEN = f"""{_SETNS}
import socket
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

_BEGIN = f"""{_LIBC}
at = sys.argv.index("--")
join([os.open(door, os.O_WRONLY) for door in sys.argv[1:at]])
new_keyring()
os.execvp(sys.argv[at + 1], sys.argv[at + 1:])
"""

_PROFILE = """
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]
def give_up(steps):
    new_keyring()
    power = 0
    while libc.prctl(24, power, 0, 0, 0) == 0:  # PR_CAPBSET_DROP
        power += 1
    if libc.prctl(23, 0, 0, 0, 0) != 0:  # PR_CAPBSET_READ
        raise OSError("the bounding set is not empty")
    succeed(libc.prctl(47, 4, 0, 0, 0))  # PR_CAP_AMBIENT_CLEAR_ALL
    succeed(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    program = Program(len(steps) // 8, steps)
    succeed(libc.prctl(22, 2, ctypes.byref(program), 0, 0))  # PR_SET_SECCOMP
"""

_ENTER = f"""{_SETNS}{_PROFILE}
at = sys.argv.index("--")
pid, steps, doors, argv = sys.argv[1], sys.argv[2], sys.argv[3:at], sys.argv[at + 1:]
groups = [os.open(door, os.O_WRONLY) for door in doors]
spaces = [opened(pid, name) for name in ("cgroup", "ipc", "uts", "net", "pid", "mnt")]
outer, inner = owner(spaces[-1]), opened(pid, "user")
setns(outer)
for space in spaces:
    setns(space)
child = os.fork()
if child == 0:
    join(groups)
    if os.fstat(inner).st_ino != os.fstat(outer).st_ino:
        setns(inner)
    for fd in (*spaces, outer, inner):
        os.close(fd)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    give_up(bytes.fromhex(steps))
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


def begin(doors: Sequence[str] = ()) -> list[str]:
    """The beginning of a command line; what follows starts with a session keyring of its own.

    `doors` are files that take the number of a process into control groups.
    """
    return [*PYTHON, _BEGIN, *doors, "--"]


def enter(pid: int, doors: Sequence[str] = ()) -> list[str]:
    """The beginning of a command line; what follows, an absolute path and arguments, runs inside.

    It runs under the profile of the sandbox of process `pid` (by this machine's numbers), and in
    the control groups of `doors`. Exit code and signal are those of the command.
    """
    return [*PYTHON, _ENTER, str(pid), filter_program().hex(), *doors, "--"]


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

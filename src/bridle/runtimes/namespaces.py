"""Starting a sandbox and entering its namespaces, always under its profile.

`bwrap` makes two user namespaces, one in the other: the outer owns the sandbox's mounts and
network, the inner is the one that commands run in, without any power over them. A process that
enters from outside inherits nothing of what `bwrap` gave up, so a small program enters for every
command and then gives up the same: a session keyring of its own, an empty bounding set,
no_new_privs, the filter of `seccomp`. It is Perl, which makes system calls by number and starts in
a fifth of the time of Python. A privileged process listens in the network by a thread of its own,
any other by a Python program, since only a single-threaded process may change its user namespace.

The numbers are those of `linux/nsfs.h`, `linux/prctl.h`, `linux/keyctl.h` and `sched.h`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
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
CALLS = {"x86_64": ("308", "157", "250"), "aarch64": ("268", "167", "219")}
"""Numbers of setns, prctl and keyctl."""

_LISTEN = f"""
import ctypes, fcntl, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def setns(fd):
    if libc.setns(fd, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
channel, pid, port = map(int, sys.argv[1:4])
network = os.open(f"/proc/{{pid}}/ns/net", os.O_RDONLY)
users = fcntl.ioctl(network, 0xB701)
if os.fstat(users).st_ino != os.stat("/proc/self/ns/user").st_ino:
    setns(users)
setns(network)
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen({BACKLOG})
socket.send_fds(socket.socket(fileno=channel), [b"1"], [listener.fileno()])
"""

_PERL = r"""
my ($setns, $prctl, $keyctl) = map { int } splice(@ARGV, 0, 3);
sub doors {
    my @doors;
    while ((my $name = shift @ARGV) ne "--") {
        sysopen(my $door, $name, 1) or die "$name: $!\n";  # O_WRONLY
        push @doors, $door;
    }
    return @doors;
}
sub join_groups {
    defined syswrite($_, "0") or die "a control group: $!\n" for @_;  # 0: who writes
}
sub new_keyring {
    # Refused or missing where no keys can be read either: in a container, without CONFIG_KEYS.
    syscall($keyctl, 1, 0);
}
"""

_BEGIN = rf"""{_PERL}
join_groups(doors());
new_keyring();
exec {{ $ARGV[0] }} @ARGV or die "$ARGV[0]: $!\n";
"""

_ENTER = rf"""{_PERL}
my $pid = int(shift @ARGV);
my $steps = pack("H*", shift @ARGV);
my @groups = doors();
sub opened {{
    open(my $space, "<", "/proc/$pid/ns/$_[0]") or die "/proc/$pid/ns/$_[0]: $!\n";
    return $space;
}}
sub setns {{
    syscall($setns, fileno($_[0]), 0) == 0 or die "setns: $!\n";
}}
sub prctl {{
    return syscall($prctl, $_[0], $_[1], $_[2], 0, 0) == 0;
}}
my @spaces = map {{ opened($_) }} qw(cgroup ipc uts net pid mnt);
my $inner = opened("user");
my $fd = ioctl($spaces[-1], 0xB701, 0) or die "NS_GET_USERNS: $!\n";
open(my $outer, "<&=", int($fd)) or die "NS_GET_USERNS: $!\n";
setns($_) for $outer, @spaces;
my $child = fork();
defined $child or die "fork: $!\n";
if ($child == 0) {{
    join_groups(@groups);
    setns($inner) if (stat $inner)[1] != (stat $outer)[1];
    $SIG{{PIPE}} = $SIG{{INT}} = "DEFAULT";
    new_keyring();
    my $power = 0;
    $power++ while prctl(24, $power, 0);  # PR_CAPBSET_DROP
    prctl(23, 0, 0) or die "the bounding set is not empty\n";  # PR_CAPBSET_READ
    prctl(47, 4, 0) or die "PR_CAP_AMBIENT_CLEAR_ALL: $!\n";
    prctl(38, 1, 0) or die "PR_SET_NO_NEW_PRIVS: $!\n";
    my $program = pack("S x6 P", length($steps) / 8, $steps);
    prctl(22, 2, $program) or die "PR_SET_SECCOMP: $!\n";
    exec {{ $ARGV[0] }} @ARGV or die "$ARGV[0]: $!\n";
}}
$SIG{{INT}} = "IGNORE";
waitpid($child, 0) == $child or die "waitpid: $!\n";
if (my $signal = $? & 127) {{
    $SIG{{INT}} = "DEFAULT";
    kill $signal, $$;
}}
exit($? >> 8);
"""


@cache
def is_privileged() -> bool:
    """Return whether this process may enter any namespace of this machine."""
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
    return [*_perl(_BEGIN), *doors, "--"]


def enter(pid: int, doors: Sequence[str] = ()) -> list[str]:
    """The beginning of a command line; what follows, an absolute path and arguments, runs inside.

    It runs under the profile of the sandbox of process `pid` (by this machine's numbers), and in
    the control groups of `doors`. Exit code and signal are those of the command.
    """
    return [*_perl(_ENTER), str(pid), filter_program().hex(), *doors, "--"]


def _perl(program: str) -> list[str]:
    return [shutil.which("perl") or "perl", "-e", program, *CALLS[platform.machine()]]


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

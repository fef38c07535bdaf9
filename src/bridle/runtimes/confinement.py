"""Confinement of sandboxes: limits on what they use, and namespaces entered under a call filter.

Limits are on memory, processes, CPU and storage. The kernel enforces them with control groups, of
version 2, or of version 1 where that is what the machine has. A sandbox's group lies below our own,
so it never gets more than we have. Where we may not make groups (an ordinary user without
delegation), `Cgroup.make` returns `None` and the sandbox is polled instead (`first_reached`).

The namespaces of a sandbox are always entered under its system call filter. `bwrap` makes two user
namespaces, one in the other: the outer owns the sandbox's mounts and network, commands run in the
inner without any power over them. A process that enters from outside has none of the restrictions
that `bwrap` applied, so a small program enters for every command and then applies the same: a
session keyring of its own, an empty bounding set, no_new_privs, the filter. It is Perl, which makes
system calls by number and starts in a fifth of the time of Python. A privileged process listens in
the network from a thread of its own, any other by a Python program, since only a single-threaded
process may change its user namespace.

The filter refuses what Docker's default profile refuses a container without capabilities
(moby/profiles, seccomp/default.json), and the calls for keys, io_uring, BPF, performance events and
userfaultfd in every version of that profile. System calls that were added after the table was made
do not exist inside (ENOSYS), so that programs fall back to older ones. It is classic BPF
(linux/filter.h, linux/seccomp.h) over `struct seccomp_data`: the number at offset 0, the
architecture at 4, the arguments from 16 on, 8 bytes each. We write it ourselves because
libseccomp's Python bindings need a shared library that a wheel does not bring.
`tests/runtimes/test_seccomp.py` interprets it; `tests/sandbox/test_profile.py` tries it.

The numbers are those of `linux/nsfs.h`, `linux/prctl.h`, `linux/keyctl.h` and `sched.h`.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import math
import os
import platform
import resource
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Final, NamedTuple

from bridle.errors import RuntimeFailure
from bridle.runtimes.process import is_dead, running_processes

PREFIX = "bridle-"
"""Of the names of groups; the mark of their owner follows, and a dash."""
PERIOD_US = 100_000
REMOVE_S = 2.0
MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Resource limits of a sandbox; `None` = unlimited."""

    cpus: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None


@dataclass(slots=True)
class Cgroup:
    """One sandbox's group: a folder, or with version 1 one folder per controller."""

    folders: Mapping[str, Path]
    """Controller -> folder; version 2 has the same folder for each."""
    _seen: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(
        cls, name: str, bounds: ResourceLimits, *, mount: Path = MOUNT, own: Path = OWN
    ) -> Cgroup | None:
        """Make a control group with these limits; `None` where this process may not make one."""
        wanted = _settings(bounds)
        unified = (mount / "cgroup.controllers").exists()
        try:
            ours = _own_groups(own)
            if unified:
                folder = mount / ours.get("", "").lstrip("/") / name
                _enable(folder.parent, wanted)
                folders = dict.fromkeys(wanted, folder)
            else:
                folders = {
                    controller: mount / controller / ours.get(controller, "").lstrip("/") / name
                    for controller in wanted
                }
                if not all((mount / controller).is_dir() for controller in wanted):
                    return None
        except OSError:
            return None
        group = cls(folders)
        try:
            for controller, folder in folders.items():
                folder.mkdir(exist_ok=True)
                for file, value in wanted[controller][2 if unified else 1].items():
                    (folder / file).write_text(value)
        except OSError:
            group.remove()
            return None
        return group

    @property
    def procs_files(self) -> list[str]:
        """Files into which a process writes its number to join the control group."""
        return sorted({str(folder / "cgroup.procs") for folder in self.folders.values()})

    def reached(self) -> str | None:
        """Return the limit that was reached since the last call: `memory` or `processes`."""
        counts = {
            "memory": self._count("memory", ("memory.events", "memory.oom_control"), "oom_kill"),
            "processes": self._count("pids", ("pids.events",), "max"),
        }
        grown = [name for name, count in counts.items() if count > self._seen.get(name, 0)]
        self._seen.update(counts)
        return grown[0] if grown else None

    def remove(self) -> None:
        """Remove the control group, whose processes have ended. Idempotent."""
        patience = time.monotonic() + REMOVE_S
        for folder in set(self.folders.values()):
            while folder.exists():
                with suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > patience:
                    break
                time.sleep(0.01)

    def _count(self, controller: str, files: tuple[str, ...], name: str) -> int:
        folder = self.folders.get(controller)
        if folder is None:
            return 0
        for file in files:
            with suppress(OSError):
                for line in (folder / file).read_text().splitlines():
                    if line.split()[0] == name:
                        return int(line.split()[1])
        return 0


def remove_empty(*, mount: Path = MOUNT, own: Path = OWN) -> int:
    """Remove the empty control groups that Bridle processes made and left when they were killed.

    Returns how many.
    """
    try:
        ours = _own_groups(own)
    except OSError:
        return 0
    unified = (mount / "cgroup.controllers").exists()
    beside = {mount / ("" if unified else name) / path.lstrip("/") for name, path in ours.items()}
    removed = 0
    for folder in [each for at in beside for each in at.glob(f"{PREFIX}*-*")]:
        if is_dead(folder.name.removeprefix(PREFIX).partition("-")[0]):
            with suppress(OSError):
                folder.rmdir()
                removed += 1
    return removed


def _settings(bounds: ResourceLimits) -> dict[str, dict[int, dict[str, str]]]:
    """Return controller -> version -> file -> content."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    if bounds.memory_bytes is not None:
        limit = str(bounds.memory_bytes)
        found["memory"] = {2: {"memory.max": limit}, 1: {"memory.limit_in_bytes": limit}}
    if bounds.processes is not None:
        found["pids"] = {v: {"pids.max": str(bounds.processes)} for v in (1, 2)}
    if bounds.cpus is not None:
        quota = str(max(1000, int(bounds.cpus * PERIOD_US)))
        found["cpu"] = {
            2: {"cpu.max": f"{quota} {PERIOD_US}"},
            1: {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota},
        }
    return found


def _own_groups(own: Path) -> dict[str, str]:
    """Return controller (empty for version 2) -> path of our own group."""
    groups: dict[str, str] = {}
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _enable(parent: Path, wanted: Mapping[str, object]) -> None:
    """Enable these controllers for children of `parent`. `OSError` if that is not possible."""
    switch = parent / "cgroup.subtree_control"
    missing = set(wanted) - set(switch.read_text().split())
    if missing:
        if not os.access(switch, os.W_OK):
            raise PermissionError(switch)
        switch.write_text(" ".join(f"+{name}" for name in sorted(missing)))


def available_cores(*, mount: Path = MOUNT, own: Path = OWN) -> int:
    """Return how many cores this process may use, by its CPU affinity and its control groups'
    limits (a container's), rounded up.
    """
    spread = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = (os.cpu_count() or 1) if spread is None else len(spread(0))
    groups: Mapping[str, str] = {}
    with suppress(OSError):
        groups = _own_groups(own)
    for top, path in ((mount, groups.get("", "")), (mount / "cpu", groups.get("cpu", ""))):
        folder = top / path.lstrip("/")
        for one in (folder, *folder.parents):
            if not one.is_relative_to(top):
                break
            cores = min(cores, math.ceil(_limit(one) or cores))
    return cores


def _limit(folder: Path) -> float | None:
    """Return the most cores that a group may use; `None` = any number, or no such group."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        given = int((folder / "cpu.cfs_quota_us").read_text())
        return given / int((folder / "cpu.cfs_period_us").read_text()) if given > 0 else None
    return None


LOOK_S = 0.25
"""Between two looks at processes, and the least time between two at the disk."""
PATIENCE = 20.0
"""The disk is not looked at more often than takes this share of the time: 1 / (1 + PATIENCE)."""


async def first_reached(
    members: Callable[[], Iterable[int]],
    folders: Sequence[Path],
    bounds: ResourceLimits,
    storage_bytes: int,
) -> str:
    """Poll a sandbox until it exceeds a limit; return which: `memory`, `processes` or `storage`.

    `members` gives its processes, by the machine's numbers; `bounds` are the limits that no control
    group enforces.
    """
    loop = asyncio.get_running_loop()
    next_disk = loop.time()
    while True:
        if (found := await asyncio.to_thread(_processes, members, bounds)) is not None:
            return found
        if loop.time() >= next_disk:
            began = loop.time()
            if await asyncio.to_thread(disk_use, folders) > storage_bytes:
                return "storage"
            next_disk = loop.time() + max(LOOK_S, PATIENCE * (loop.time() - began))
        await asyncio.sleep(LOOK_S)


def pid_namespace(pid: int) -> str | None:
    """Return the name of a process's PID namespace; `None` if it has ended or may not be
    looked at.
    """
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - a name, no path
    except OSError:
        return None


def members_of(namespace: str) -> list[int]:
    """Return the living processes of a PID namespace, by the machine's numbers."""
    return [each.pid for each in running_processes() if pid_namespace(each.pid) == namespace]


def disk_use(folders: Iterable[Path]) -> int:
    """Return the bytes on disk of all files below `folders`; a file with several names counts once.

    Files that vanish meanwhile or may not be read count nothing.
    """
    seen: set[tuple[int, int]] = set()
    total = 0
    waiting = [str(folder) for folder in folders]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(facts.st_mode):
                        waiting.append(entry.path)
                    elif (facts.st_dev, facts.st_ino) in seen:
                        continue
                    elif facts.st_nlink > 1:
                        seen.add((facts.st_dev, facts.st_ino))
                    total += facts.st_blocks * 512
    return total


def _processes(members: Callable[[], Iterable[int]], bounds: ResourceLimits) -> str | None:
    if bounds.memory_bytes is None and bounds.processes is None:
        return None
    pids = list(members())
    if bounds.processes is not None and sum(map(_threads, pids)) > bounds.processes:
        return "processes"
    if bounds.memory_bytes is not None and sum(map(_resident, pids)) > bounds.memory_bytes:
        return "memory"
    return None


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - only the names count
    except OSError:
        return 0


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


NEWEST: Final = 466
"""The last system call that the table decides about (removexattrat, Linux 6.13); numbers from 424
on are the same on all architectures. x32's numbers lie above it."""

NAMESPACES: Final = 0x7E020000
"""`clone` flags that make a namespace."""

PERSONALITIES: Final = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux, PER_LINUX32, UNAME26, both, and the question which one it is."""

FAMILIES: Final = (38, 40)
"""Refused address families of `socket`: AF_ALG, AF_VSOCK."""


class Machine(NamedTuple):
    """The numbers of an architecture."""

    audit: int
    """AUDIT_ARCH_* of linux/audit.h."""
    clone: int
    socket: int
    personality: int
    refused: tuple[int, ...]


_ANY: Final = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "set_mempolicy_home_node": 450,
    "lsm_get_self_attr": 459,
    "lsm_set_self_attr": 460,
    "lsm_list_modules": 461,
}
CLONE3: Final = 435

_BOTH: Final = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "get_mempolicy": (239, 236),
    "init_module": (175, 105),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "move_pages": (279, 239),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "set_mempolicy": (238, 237),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
"""Numbers on x86_64 and aarch64."""

_X86_64: Final = {
    "uselib": 134,
    "ustat": 136,
    "sysfs": 139,
    "_sysctl": 156,
    "iopl": 172,
    "ioperm": 173,
    "create_module": 174,
    "get_kernel_syms": 177,
    "query_module": 178,
    "getpmsg": 181,
    "putpmsg": 182,
    "afs_syscall": 183,
    "tuxcall": 184,
    "security": 185,
    "vserver": 236,
}


def refused_calls(machine: str) -> dict[str, int]:
    """Return the names and numbers of the system calls that the seccomp filter always refuses."""
    own = _X86_64 if machine == "x86_64" else {}
    column = 0 if machine == "x86_64" else 1
    return {**{name: pair[column] for name, pair in _BOTH.items()}, **own, **_ANY}


MACHINES: Final = {
    "x86_64": Machine(0xC000003E, 56, 41, 135, tuple(sorted(refused_calls("x86_64").values()))),
    "aarch64": Machine(0xC00000B7, 220, 198, 92, tuple(sorted(refused_calls("aarch64").values()))),
}
"""By the names of `uname -m`."""

_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
"""BPF_LD|W|ABS, BPF_JMP|JEQ|K, |JGT|K, |JSET|K, BPF_RET|K."""
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE = 0x00050000 | errno.EPERM
_MISSING = 0x00050000 | errno.ENOSYS

_Step = tuple[int, int, int, int]
"""Code, steps to jump over if true, if false, operand."""


@cache
def filter_program(machine: str | None = None) -> bytes:
    """Return the seccomp filter for an architecture (`uname -m`; `None` = this machine's), as
    `bwrap --seccomp` reads it.

    Programs of another architecture are killed. `KeyError` for one that is not in `MACHINES`.
    """
    numbers = MACHINES[machine or platform.machine()]
    steps: list[_Step] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, numbers.audit), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, 0), (_ABOVE, 0, 1, NEWEST), (_RETURN, 0, 0, _MISSING)]
    for number in numbers.refused:
        steps += _for(number, [(_RETURN, 0, 0, _REFUSE)])
    steps += _for(CLONE3, [(_RETURN, 0, 0, _MISSING)])  # its flags lie in memory
    steps += _for(numbers.clone, [_FIRST, (_ANY_BIT, 1, 0, NAMESPACES), _PASS, _DENY])
    steps += _for(numbers.socket, _one_of(FAMILIES, _DENY, _PASS))
    steps += _for(numbers.personality, _one_of(PERSONALITIES, _PASS, _DENY))
    steps.append(_PASS)
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


_FIRST: _Step = (_LOAD, 0, 0, 16)
"""Loads the lower half of the first argument; both architectures are little-endian."""
_PASS: _Step = (_RETURN, 0, 0, _ALLOW)
_DENY: _Step = (_RETURN, 0, 0, _REFUSE)


def _for(number: int, steps: list[_Step]) -> list[_Step]:
    """Return steps for one system call; all others jump over them."""
    return [(_EQUAL, 0, len(steps), number), *steps]


def _one_of(values: Iterable[int], found: _Step, other: _Step) -> list[_Step]:
    """Return steps that compare the first argument with values."""
    compared = [step for value in values for step in _for(value, [found])]
    return [_FIRST, *compared, other]


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
sub procs_files {
    my @files;
    while ((my $name = shift @ARGV) ne "--") {
        sysopen(my $file, $name, 1) or die "$name: $!\n";  # O_WRONLY
        push @files, $file;
    }
    return @files;
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
join_groups(procs_files());
new_keyring();
exec {{ $ARGV[0] }} @ARGV or die "$ARGV[0]: $!\n";
"""

_ENTER = rf"""{_PERL}
my $pid = int(shift @ARGV);
my $steps = pack("H*", shift @ARGV);
my @groups = procs_files();
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


def begin(procs_files: Sequence[str] = ()) -> list[str]:
    """Return the first words of a command line; the command after them gets a new session keyring
    and joins the control groups of `procs_files` (files `cgroup.procs`).
    """
    return [*_perl(_BEGIN), *procs_files, "--"]


def enter(pid: int, procs_files: Sequence[str] = ()) -> list[str]:
    """Return the first words of a command line; the command after them (an absolute path and
    arguments) runs inside the sandbox of process `pid`, by this machine's numbers.

    It runs under the sandbox's profile and in the control groups of `procs_files`. Exit code and
    signal are those of the command.
    """
    return [*_perl(_ENTER), str(pid), filter_program().hex(), *procs_files, "--"]


def _perl(program: str) -> list[str]:
    return [shutil.which("perl") or "perl", "-e", program, *CALLS[platform.machine()]]


def listen_inside(
    pid: int, port: int, *, timeout_s: float, privileged: bool | None = None
) -> socket.socket:
    """Open a listening socket on 127.0.0.1:`port` in the network of the sandbox of process `pid`.

    Blocks; without privileges for the start of an interpreter. Raises `RuntimeFailure`.
    """
    privileged = is_privileged() if privileged is None else privileged
    try:
        listener = _by_thread(pid, port) if privileged else _by_program(pid, port, timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeFailure(f"cannot listen in the sandbox's network: {error}") from error
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

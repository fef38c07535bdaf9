"""The system calls that a bubblewrap sandbox refuses, as a filter program for the kernel.

Refused is what Docker's default profile refuses a container without capabilities (moby/profiles,
seccomp/default.json), and the calls for keys, io_uring, BPF, performance events and userfaultfd
whatever a version of that profile says. System calls that were added after the table was made do
not exist inside (ENOSYS), so that programs fall back to older ones.

The program is classic BPF (linux/filter.h, linux/seccomp.h) over `struct seccomp_data`: the number
at offset 0, the architecture at 4, the arguments from 16 on, 8 bytes each. We write it ourselves
because libseccomp's Python bindings need a shared library that a wheel does not bring.
`tests/runtimes/test_seccomp.py` interprets it; `tests/sandbox/test_profile.py` tries it.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable
from functools import cache
from typing import Final, NamedTuple

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


def refused(machine: str) -> dict[str, int]:
    """Names and numbers of the system calls that are refused whatever their arguments."""
    own = _X86_64 if machine == "x86_64" else {}
    column = 0 if machine == "x86_64" else 1
    return {**{name: pair[column] for name, pair in _BOTH.items()}, **own, **_ANY}


MACHINES: Final = {
    "x86_64": Machine(0xC000003E, 56, 41, 135, tuple(sorted(refused("x86_64").values()))),
    "aarch64": Machine(0xC00000B7, 220, 198, 92, tuple(sorted(refused("aarch64").values()))),
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
    """The filter of an architecture (`uname -m`; `None` = this machine's), for `--seccomp`.

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
    """Steps for one system call; all others jump over them."""
    return [(_EQUAL, 0, len(steps), number), *steps]


def _one_of(values: Iterable[int], found: _Step, other: _Step) -> list[_Step]:
    """Steps that compare the first argument with values."""
    compared = [step for value in values for step in _for(value, [found])]
    return [_FIRST, *compared, other]

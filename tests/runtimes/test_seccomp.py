"""The filter program, run by a small interpreter of classic BPF."""

import errno
import re
import struct
from pathlib import Path

import pytest

from bridle.runtimes.confinement import MACHINES, filter_program, refused_calls

ALLOWED, EPERM, ENOSYS, KILLED = "allowed", errno.EPERM, errno.ENOSYS, "killed"
I386, ARM = 0x40000003, 0x40000028
X32 = 0x40000000
HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")


def outcome(program: bytes, number: int, audit: int, first: int = 0):
    """Interpret the program for one system call."""
    data = struct.pack("=iIQ6Q", number, audit, 0, first, 0, 0, 0, 0, 0)
    steps = list(struct.iter_unpack("=HBBI", program))
    loaded, at = 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        if code == 0x20:
            loaded = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x06:
            action, value = operand & 0xFFFF0000, operand & 0xFFFF
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED, 0x00050000: value}[action]
        else:
            holds = {0x15: loaded == operand, 0x25: loaded > operand, 0x45: loaded & operand}
            at += if_true if holds[code] else if_false


@pytest.fixture(params=sorted(MACHINES))
def machine(request):
    return request.param


@pytest.fixture
def call(machine):
    """Give the outcome of a system call of this architecture."""
    program, numbers = filter_program(machine), MACHINES[machine]

    def answer(number, first=0, *, audit=numbers.audit):
        return outcome(program, number, audit, first)

    return answer


def test_refused_system_calls_fail_with_eperm_and_all_others_are_allowed(machine, call):
    numbers = set(refused_calls(machine).values())
    assert {call(number) for number in numbers} == {EPERM}
    others = set(range(424)) - numbers
    assert {call(number) for number in others} == {ALLOWED}


@pytest.mark.parametrize(
    "name",
    [
        *("keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "mount"),
        *("setns", "unshare", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    ],
)
def test_documented_system_calls_are_refused(machine, name):
    assert name in refused_calls(machine)


def test_system_calls_of_another_architecture_kill_the_program(call):
    assert {call(0, audit=audit) for audit in (I386, ARM, 0, 0xFFFFFFFF)} == {KILLED}


def test_x32_and_unknown_newer_system_calls_fail_with_enosys(call):
    assert {call(number) for number in (467, 1000, X32, X32 | 1, X32 | 250, 0x7FFFFFFF)} == {ENOSYS}


def test_clone_may_create_threads_and_processes_but_no_namespaces(machine, call):
    clone = MACHINES[machine].clone
    threads, child = 0x003D0F00, 17
    assert (call(clone, threads), call(clone, child)) == (ALLOWED, ALLOWED)
    kinds = {1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)}
    assert {call(clone, kind | child) for kind in kinds} == {EPERM}
    assert call(435) == ENOSYS


def test_sockets_to_hypervisor_and_kernel_crypto_are_refused(machine, call):
    families = {family: call(MACHINES[machine].socket, family) for family in range(46)}
    assert {family for family, seen in families.items() if seen != ALLOWED} == {38, 40}


def test_personality_that_disables_address_randomisation_is_refused(machine, call):
    personality = MACHINES[machine].personality
    assert call(personality, 0xFFFFFFFF) == ALLOWED
    assert call(personality, 0x0040000) == EPERM  # ADDR_NO_RANDOMIZE


def test_numbers_of_x86_64_are_those_of_the_kernel_s_header():
    if not HEADER.exists():
        return
    found = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADER.read_text()))
    known = {name: number for name, number in refused_calls("x86_64").items() if name in found}
    assert known == {name: int(found[name]) for name in known}
    assert len(known) > 50


def test_an_unknown_architecture_has_no_filter():
    with pytest.raises(KeyError):
        filter_program("riscv64")

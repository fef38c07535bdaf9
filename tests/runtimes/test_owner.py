"""Owners, living and dead."""

import os
import subprocess

from bridle.runtimes.owner import is_dead, owner_mark, started_at


def test_this_process_lives():
    assert not is_dead(owner_mark())
    assert owner_mark().startswith(f"{os.getpid()}.{started_at(os.getpid())}.")


def test_one_that_has_ended_is_dead_also_while_it_is_not_collected():
    place = owner_mark().split(".", 2)[2]
    with subprocess.Popen(["true"]) as process:
        mark = f"{process.pid}.{started_at(process.pid)}.{place}"
        process.wait()
    assert started_at(process.pid) is None
    assert is_dead(mark)


def test_another_process_with_its_number_is_not_it():
    pid, _, place = owner_mark().split(".", 2)
    assert is_dead(f"{pid}.1.{place}")


def test_of_another_place_nobody_knows():
    pid, started, _ = owner_mark().split(".", 2)
    assert not is_dead(f"{pid}.{started}.0badcafe.1")
    assert not is_dead("999999999.5")
    assert not is_dead("of somebody else")

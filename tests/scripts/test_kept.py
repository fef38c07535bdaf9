"""scripts/kept: what takes long to install is made once for all checkouts of one lock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USE = f"""
set -euo pipefail
. {ROOT}/scripts/kept
fill() {{ mkdir -p "$1"; cat lock.txt >"$1/made"; echo filled; [ ! -e fail ]; }}
kept things lock.txt
"""


@pytest.fixture
def use(tmp_path):
    """Calls `kept` in a checkout of this name and lock; what it said, and where its link leads."""

    def call(checkout, lock, script=USE):
        folder = tmp_path / checkout
        (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
        python = folder / ".venv/bin/python"
        if not python.exists():
            python.symlink_to(sys.executable)
        (folder / "lock.txt").write_text(lock)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=folder,
            env={**os.environ, "BRIDLE_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout, folder / ".cache/things"

    return call


def test_two_checkouts_with_equal_locks_share_one_cached_install(use):
    said, first = use("one", "a==1")
    assert "filled" in said
    said, second = use("two", "a==1")
    assert "filled" not in said
    assert first.resolve() == second.resolve()


def test_a_different_lock_gets_its_own_cached_install(use):
    _, link = use("one", "a==1")
    old = link.resolve()
    said, link = use("one", "a==2")
    assert "filled" in said
    assert (link / "made").read_text() == "a==2"
    assert (old / "made").read_text() == "a==1"


def test_a_failed_cached_install_is_repeated(use, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/fail").touch()
    said, link = use("one", "a==1")
    assert "filled" in said
    assert not link.exists()

    (tmp_path / "one/fail").unlink()
    said, link = use("one", "a==1")
    assert "filled" in said
    assert (link / "made").read_text() == "a==1"


def test_a_cache_folder_of_an_earlier_version_is_replaced_by_a_link(use, tmp_path):
    (tmp_path / "one/.cache/things").mkdir(parents=True)
    _, link = use("one", "a==1")
    assert link.is_symlink()

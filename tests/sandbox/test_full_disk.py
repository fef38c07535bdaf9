"""A disk that is really full: a writer killed in mid-commit leaves all that it acknowledged."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.capture.made import MadeSession

from bridle.capture.sqlite import SqliteStore
from bridle.errors import StoreError, root_cause

pytestmark = pytest.mark.sandbox
ROOT = Path(__file__).parents[2]
KILLS = 6


@contextmanager
def small_disk(folder, size):
    """A file system of its own with so much room."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def killed_on_a_full_disk(path, seed):
    """Acknowledged (session, exchange, digest) of a writer that is killed while nothing fits."""
    command = [sys.executable, "-m", "tests.capture.killed_writer", str(path), str(seed), "full"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        result, refused = [], 0
        for line in process.stdout:
            if line == "full\n":
                refused += 1
                if refused > seed:  # each kill comes at another of the failing commits
                    process.kill()
                    break
            else:
                result.append(tuple(line.split()))
        process.kill()
    return result


async def test_kill_9_on_a_full_disk_loses_no_acknowledged_exchange(tmp_path):
    with small_disk(tmp_path / "disk", f"{KILLS + 1}m") as disk:
        for kill in range(KILLS):
            (disk / f"ballast-{kill}").write_bytes(bytes(1 << 20))
        path, expected = disk / "capture.sqlite", {}
        for kill in range(KILLS):
            result = killed_on_a_full_disk(path, kill)
            assert result
            expected |= {(session, exchange): digest for session, exchange, digest in result}
            (disk / f"ballast-{kill}").unlink()
            async with await SqliteStore.open(path) as store:
                found = {
                    (session.session_id, exchange.exchange_id): exchange.prompt_digest.hex()
                    for session in store.sessions()
                    for exchange in store.exchanges(session.session_id)
                }
            assert expected.items() <= found.items()


async def test_the_store_check_fails_on_a_full_disk_and_passes_once_space_is_freed(tmp_path):
    with small_disk(tmp_path / "disk", "2m") as disk:
        made = MadeSession()
        async with await SqliteStore.open(disk / "capture.sqlite") as store:
            await store.open_session(made.record)
            await store.check()
            (disk / "ballast").write_bytes(bytes(1 << 20))
            with pytest.raises(StoreError) as full:
                await store.check()
            assert root_cause(full.value) == "No space left on device"
            (disk / "ballast").unlink()
            await store.check()

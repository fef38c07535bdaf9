from dataclasses import replace
from secrets import token_hex

import pytest
from tests.disks import full_disk
from tests.server.house import trace

from bridle.bridges import parquet
from bridle.errors import StoreError
from bridle.server.storage import TrajectoryFiles, UnwritableError
from bridle.trajectory.result import trajectory_bytes
from bridle.trajectory.sample import Trajectory

WHOLE = Trajectory("s", "COMPLETED", (trace(), trace(9)), 1.0, None, {"stats": {"traces": 2}})
EMPTY = Trajectory("s", "ERROR", (), None, "it broke", {"a": 1})


@pytest.mark.parametrize("trajectory", [WHOLE, EMPTY], ids=["traces", "none"])
@pytest.mark.parametrize("root", ["folder", "memory://bridle-test-files"])
async def test_trajectory_file_round_trip(tmp_path, root, trajectory):
    files = TrajectoryFiles(root if "://" in root else tmp_path / root, parquet)
    name = files.name("s.0")
    size = await files.write(name, trajectory)
    assert size > 100
    assert trajectory_bytes(await files.read(name)) == trajectory_bytes(trajectory)
    await files.remove(name)
    await files.remove(name)
    with pytest.raises(StoreError, match="cannot read"):
        await files.read(name)


async def test_a_trajectory_write_below_a_file_is_a_store_error(tmp_path):
    (tmp_path / "root").write_text("no folder")
    files = TrajectoryFiles(tmp_path / "root", parquet)
    with pytest.raises(StoreError, match="cannot write"):
        await files.write(files.name("s"), WHOLE)


async def test_a_trajectory_is_written_under_a_temporary_name_and_renamed(tmp_path):
    files = TrajectoryFiles(tmp_path, parquet)
    name = files.name("s")
    (tmp_path / name).parent.mkdir()
    (tmp_path / f"{name}.part").write_bytes(b"torn by a kill")
    await files.write(name, WHOLE)
    assert [path.name for path in tmp_path.rglob("*.parquet*")] == ["s.parquet"]


def test_trajectory_files_are_spread_over_folders():
    files = TrajectoryFiles("x", parquet)
    folders = {files.name(f"run-{number}").partition("/")[0] for number in range(2000)}
    assert len(folders) > 200


async def test_full_disk_leaves_no_partial_file_and_differs_from_permanent_errors(
    tmp_path,
):
    files = TrajectoryFiles(tmp_path, parquet)
    name = files.name("s")
    with full_disk(), pytest.raises(StoreError, match="File too large") as full:
        await files.write(name, replace(WHOLE, metadata={"long": token_hex(2000)}))
    assert not isinstance(full.value, UnwritableError)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with pytest.raises(UnwritableError, match=r"cannot write.*object"):
        await files.write(name, replace(WHOLE, metadata={"odd": object()}))
    (tmp_path / name).mkdir()
    with pytest.raises(UnwritableError, match=r"cannot write.*directory"):
        await files.write(name, WHOLE)


async def test_check_fails_without_disk_space(tmp_path):
    files = TrajectoryFiles(tmp_path / "root", parquet)
    with full_disk(), pytest.raises(StoreError, match=r"cannot write.*File too large"):
        await files.check()
    await TrajectoryFiles(tmp_path / "root", parquet).check()

"""The image that the suite's containers are made of, put into the daemon once."""

import asyncio
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.sandbox.rootfs import LARGE, PROGRAMS, make_rootfs

from bridle.runtimes.docker import client_environment, program

IMAGE = f"bridle-test:{len(PROGRAMS)}"
LARGE_IMAGE = f"{IMAGE}-{len(LARGE)}"


@cache
def put_image(*, large: bool = False) -> str:
    """`bring_image`, once for the suite's own daemon."""
    return bring_image(large=large)


def bring_image(*, large: bool = False) -> str:
    """Import the image if the daemon does not have it; returns its name."""
    name = LARGE_IMAGE if large else IMAGE
    if _docker("image", "inspect", name).returncode == 0:
        return name
    with tempfile.TemporaryDirectory() as folder:
        return import_image(make_rootfs(Path(folder, "rootfs"), large=large), name)


def import_image(root: Path, name: str) -> str:
    """Make an image of a root file system; returns its name."""
    archive = root.with_suffix(".tar")
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
    done = _docker("import", archive, name)
    assert done.returncode == 0, done.stderr.decode()
    return name


def _docker(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [program(), *words], env=client_environment(), check=False, capture_output=True
    )


async def spec_of(backend: str, *, large: bool = False) -> dict[str, Any]:
    """Return what a `RuntimeSpec` of this backend needs; `large` = with the `LARGE` programs."""
    if backend != "docker":
        return {"backend": backend}
    return {"backend": backend, "image": await asyncio.to_thread(put_image, large=large)}


def bare_spec_of(backend: str, folder: Path) -> dict[str, Any]:
    """A spec whose system is the small root file system; `folder` is where one may be made."""
    image = put_image() if backend == "docker" else str(make_rootfs(folder / "rootfs"))
    return {"backend": backend, "image": image}

"""The image that the suite's containers are made of, put into the daemon once."""

import asyncio
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.sandbox.rootfs import PROGRAMS, make_rootfs

from bridle.runtimes.docker_client import client_environment, program

IMAGE = f"bridle-test:{len(PROGRAMS)}"


@cache
def put_image() -> str:
    """`bring_image`, once for the suite's own daemon."""
    return bring_image()


def bring_image() -> str:
    """Import the image if the daemon does not have it; returns its name."""
    if _docker("image", "inspect", IMAGE).returncode == 0:
        return IMAGE
    with tempfile.TemporaryDirectory() as folder:
        root = make_rootfs(Path(folder, "rootfs"))
        archive = Path(folder, "rootfs.tar")
        subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
        done = _docker("import", archive, IMAGE)
        assert done.returncode == 0, done.stderr.decode()
    return IMAGE


def _docker(*words: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [program(), *words], env=client_environment(), check=False, capture_output=True
    )


async def spec_of(backend: str) -> dict[str, Any]:
    """What a `RuntimeSpec` of this backend needs."""
    image = {"image": await asyncio.to_thread(put_image)} if backend == "docker" else {}
    return {"backend": backend, **image}


def bare_spec_of(backend: str, folder: Path) -> dict[str, Any]:
    """A spec whose system is the small root file system; `folder` is where one may be made."""
    image = put_image() if backend == "docker" else str(make_rootfs(folder / "rootfs"))
    return {"backend": backend, "image": image}

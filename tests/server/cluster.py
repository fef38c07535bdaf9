"""A PostgreSQL of our own: in a temporary folder, on a Unix socket, by an unprivileged user.

It may be killed and started again, as a machine's would be. Nothing listens on a network.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

USER = "bridle"
"""Who owns all databases; everybody who reaches the socket may be that."""

UNPRIVILEGED = "postgres"
"""Who runs the server where we are root, which PostgreSQL refuses to be; Debian makes the user."""

STARTING_S = 60.0
"""How long a server may take until it answers, the recovery from a kill included."""

# A killed process loses nothing without fsync; only a power cut would.
SETTINGS = ("listen_addresses=", "fsync=off", "max_connections=200", "log_min_messages=fatal")


def programs() -> Path:
    """Where the newest PostgreSQL has its programs. `FileNotFoundError` if there is none."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    if found:
        return found[-1].parent
    if (on_path := shutil.which("initdb")) is None:
        raise FileNotFoundError("no PostgreSQL here: no initdb (Debian: apt install postgresql)")
    return Path(on_path).resolve().parent


class Cluster:
    """A PostgreSQL server; made when entered, removed when left."""

    def __init__(self) -> None:
        self._bin = programs()
        self._user = UNPRIVILEGED if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._server: subprocess.Popen[bytes] | None = None
        self._made = 0

    def __enter__(self) -> Self:
        try:
            if self._user is not None:
                shutil.chown(self._folder, self._user)
            options = ("--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C", "-U", USER)
            self._run("initdb", "-D", self._data, *options)
            self.start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._remove()

    def url(self, name: str) -> str:
        """Of one of its databases."""
        return f"postgresql://{USER}@/{name}?host={self._folder}"

    def fresh(self) -> str:
        """The URL of a database that is new and empty."""
        self._made += 1
        name = f"fresh_{self._made}"
        self._run("createdb", "-h", self._folder, "-U", USER, name)
        return self.url(name)

    def drop(self, url: str) -> None:
        """Remove a database that `fresh` made: hundreds of them take long to remove at last."""
        name = url.partition("@/")[2].partition("?")[0]
        self._run("dropdb", "--force", "-h", self._folder, "-U", USER, name)

    def start(self) -> None:
        """Start the server and wait until it answers, also after it was killed."""
        deadline = time.monotonic() + STARTING_S
        while time.monotonic() < deadline:
            if self._server is None or self._server.poll() is not None:
                # One that was killed a moment ago may still hold its memory: try again.
                settings = (part for one in SETTINGS for part in ("-c", one))
                self._server = self._begin(
                    "postgres", "-D", self._data, "-k", self._folder, *settings
                )
            ready = self._begin("pg_isready", "-q", "-h", self._folder)
            if ready.wait() == 0:
                return
            time.sleep(0.05)
        raise TimeoutError(f"PostgreSQL does not answer:\n{self._log.read_text()}")

    def kill(self) -> None:
        """`kill -9` of the server and of all that it started."""
        if self._server is None:
            return
        for pid in [*_children(self._server.pid), self._server.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._server.wait()
        self._server = None

    def stop(self) -> None:
        """End the server as an administrator does: its connections are told, and closed."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait()
            self._server = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The server answers nothing inside, and closes no connection."""
        assert self._server is not None
        frozen = [*_children(self._server.pid), self._server.pid]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _begin(self, program: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [self._bin / program, *arguments],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                group=self._user,
                extra_groups=None if self._user is None else [],
            )

    def _run(self, program: str, *arguments: str | Path) -> None:
        if self._begin(program, *arguments).wait() != 0:
            raise RuntimeError(f"{program} failed:\n{self._log.read_text()}")

    def _remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder)


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]

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
from contextlib import ExitStack, contextmanager, suppress
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
    """Return where the newest PostgreSQL has its programs. `FileNotFoundError` if there is none."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    if found:
        return found[-1].parent
    if (on_path := shutil.which("initdb")) is None:
        raise FileNotFoundError("no PostgreSQL here: no initdb (Debian: apt install postgresql)")
    return Path(on_path).resolve().parent


class Cluster:
    """A PostgreSQL server; made when entered, removed when left.

    A standby of `primary` where that is given: see `follow`.
    """

    def __init__(self, primary: Cluster | None = None) -> None:
        self._primary = primary
        self._bin = programs()
        self._user = UNPRIVILEGED if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._server: subprocess.Popen[bytes] | None = None
        self.made = 0

    def __enter__(self) -> Self:
        try:
            if self._user is not None:
                shutil.chown(self.folder, self._user)
            if self._primary is not None:
                self.follow(self._primary)
                return self
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
        return f"postgresql://{USER}@/{name}?host={self.folder}"

    def fresh(self) -> str:
        """The URL of a database that is new and empty."""
        self.made += 1
        name = f"fresh_{self.made}"
        self._run("createdb", "-h", self.folder, "-U", USER, name)
        return self.url(name)

    def drop(self, url: str) -> None:
        """Remove a database that `fresh` made: hundreds of them take long to remove at last."""
        name = url.partition("@/")[2].partition("?")[0]
        self._run("dropdb", "--force", "-h", self.folder, "-U", USER, name)

    def start(self) -> None:
        """Start the server and wait until it answers, also after it was killed."""
        deadline = time.monotonic() + STARTING_S
        while time.monotonic() < deadline:
            if self._server is None or self._server.poll() is not None:
                # One that was killed a moment ago may still hold its memory: try again.
                settings = (part for one in SETTINGS for part in ("-c", one))
                self._server = self._begin(
                    "postgres", "-D", self._data, "-k", self.folder, *settings
                )
            ready = self._begin("pg_isready", "-q", "-h", self.folder)
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
        """End the server as an administrator does: its connections get a notice and are closed."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait()
            self._server = None

    def follow(self, primary: Cluster) -> None:
        """Become a standby of `primary`, which from now on commits nothing that is not here too.

        A server that was killed may do so, in place of what it had.
        """
        shutil.rmtree(self._data, ignore_errors=True)
        options = ("-R", "--checkpoint=fast", "--no-sync", "-h", primary.folder, "-U", USER)
        self._run("pg_basebackup", "-D", self._data, *options)
        self.start()
        primary.ask("ALTER SYSTEM SET synchronous_commit = 'remote_apply'")
        primary.ask("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.ask("SELECT pg_reload_conf()")
        deadline = time.monotonic() + STARTING_S
        while primary.ask("SELECT state, sync_state FROM pg_stat_replication") != "streaming|sync":
            if time.monotonic() > deadline:
                raise TimeoutError(f"the standby does not stream:\n{self._log.read_text()}")
            time.sleep(0.05)

    def promote(self) -> None:
        """Be a standby no more."""
        self._run("pg_ctl", "promote", "-w", "-D", self._data)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The server answers nothing inside, and closes no connection."""
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)  # first: it starts no other process then
        children = _children(self._server.pid)
        _signal(children, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(children, signal.SIGCONT)
            self._server.send_signal(signal.SIGCONT)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def _begin(self, program: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [self._bin / program, *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                user=self._user,
                group=self._user,
                extra_groups=None if self._user is None else [],
            )

    def ask(self, statement: str) -> str:
        """Return what a statement gives, as `psql` writes it without ornament."""
        where = ("-h", str(self.folder), "-U", USER, "postgres")
        words = [str(self._bin / "psql"), "-Atc", statement, *where]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    def _run(self, program: str, *arguments: str | Path) -> None:
        if self._begin(program, *arguments).wait() != 0:
            raise RuntimeError(f"{program} failed:\n{self._log.read_text()}")

    def _remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)


class Pair:
    """A primary and a standby that has all that it committed; entered and left as a `Cluster`."""

    def __init__(self) -> None:
        self._primary = Cluster()
        self._standby = Cluster(self._primary)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for one in (self._primary, self._standby):
                stack.enter_context(one)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *about: object) -> None:
        self._stack.close()

    def fresh(self) -> str:
        """The URL of a new database on whichever is the primary."""
        self._primary.fresh()
        return self._url(self._primary, self._standby) + "&target_session_attrs=primary"

    def url_of_standby(self) -> str:
        """The URL of the newest database on the standby alone."""
        return self._url(self._standby, self._standby)

    def _url(self, *clusters: Cluster) -> str:
        hosts = "&".join(f"host={one.folder}:5432" for one in clusters)
        return f"postgresql://{USER}@/fresh_{self._primary.made}?{hosts}"

    def kill_primary(self) -> None:
        """End the primary; there is none until `promote`."""
        self._primary.kill()

    def promote(self) -> None:
        """Make the standby the primary."""
        self._primary, self._standby = self._standby, self._primary
        self._primary.promote()

    def replace_standby(self) -> None:
        """Make what was killed a standby of the one that was promoted."""
        self._standby.follow(self._primary)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # a background process may end at any time
            os.kill(pid, number)


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]

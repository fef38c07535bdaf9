"""The contract of runtimes: the sandbox that an agent runs in, and the only access to it.

A node starts a runtime, prepares it, runs one harness in it, kills everything in it, lets an
evaluator read what is left, and stops it. A runtime never calls the gateway itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, Unpack

from bridle.config import RuntimeSpec
from bridle.runtimes.files import Keep


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Result of a command in a runtime."""

    exit_code: int | None
    """The true exit code; `None` = ended by a signal or by us."""
    signal: int | None = None
    """The signal that ended it; `None` = none."""
    timed_out: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    """True if output beyond the limit was dropped (the middle; head and tail are kept)."""
    duration_s: float = 0.0
    limit: str | None = None
    """The limit of the runtime that was reached: `memory`, `processes` or `storage`."""

    @property
    def ok(self) -> bool:
        """Return whether the command ended with exit code 0, not by a timeout."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder that must be visible inside, read-only (a harness bundle)."""

    source: Path
    target: str
    """Path inside; a runtime that does not contain uses `source` itself (see `Runtime.inside`)."""


def binds(spec: RuntimeSpec) -> Iterator[Mount]:
    """Yield the mounts that `spec.kwargs["binds"]` lists: each `HOST`, or `HOST:INSIDE`, both
    absolute.
    """
    for each in spec.kwargs.get("binds", ()):
        source, _, target = str(each).partition(":")
        yield Mount(Path(source), target or source)


class ExecOptions(TypedDict, total=False):
    """Options of `Runtime.exec`."""

    stdin: bytes | None
    """`None`, the default: stdin is closed."""
    timeout_s: float | None
    """Time limit. When it expires, or the caller is cancelled, everything that the command started
    is killed (TERM, then KILL)."""
    output_limit: int
    """Bytes of stdout and of stderr that are returned, each; 1 MiB by default."""
    log: Path | None
    """Gets the whole output as it is written (up to 64 MiB): stdout, and stderr too unless there is
    an `error_log`."""
    error_log: Path | None


class Runtime(Protocol):
    """The sandbox of one session. All failures of its own are `RuntimeFailure`."""

    contains: bool
    """True if programs inside are isolated from the rest of the machine."""
    workdir: str
    """Absolute path of the working folder, as seen inside."""
    home: str
    """Absolute path of a private, empty home, as seen inside."""

    async def start(self) -> None:
        """Start the runtime; `exec` works afterwards."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult:
        """Run a command (a string goes to `bash -o pipefail -c`) in its own process group.

        `cwd` is relative to `workdir`. A program that does not exist is exit code 127, as in a
        shell.
        """

    async def upload(self, source: Path, target: str) -> None:
        """Copy a host file or folder to `target` (relative to `workdir`)."""

    async def write(self, target: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file inside the runtime; its parent folders are made."""

    async def download(
        self, source: str, target: Path, *, most: int | None = None
    ) -> tuple[str, ...]:
        """Copy a file or folder from the runtime to the host, of at most `most` bytes (holes
        counted).

        No process may live inside that could change it meanwhile. Returns the paths in a folder
        that were not copied, each with its reason, as far as the runtime knows them.
        """

    async def snapshot(self, folder: Path) -> tuple[str, ...]:
        """Copy the work folder to the new host folder `folder`: all regular files, folders and
        links, wherever the links point to.

        No program of the runtime takes part. Returns the paths that were not copied, each with its
        reason; raises `files.TooMuch` where there is more than a copy may hold.
        """

    async def put_work(self, folder: Path, keep: Keep) -> tuple[str, ...]:
        """Replace the content of the work folder by that of the host folder `folder`.

        Paths that `keep` names stay as they are. Returns the paths that were not taken over, each
        with its reason.
        """

    async def copied(self, scratch: Path) -> Runtime:
        """Return a new started runtime with a copy of the files of this one, and without its
        processes.

        `scratch` is a host folder for the copy; the caller stops the copy. All processes of this
        runtime are killed first. Raises `RuntimeFailure` where that cannot be done.
        """

    def inside(self, path: Path) -> str:
        """Return the path inside the runtime of a mounted host path."""

    def gateway_url(self, url: str) -> str:
        """Return the URL by which programs inside the runtime reach a gateway URL."""

    async def kill(self) -> None:
        """Kill every process inside; idempotent."""

    async def stop(self) -> None:
        """Kill every process inside, then remove all files that are not artifacts; idempotent."""


class RuntimeFactory(Protocol):
    """Constructor that every class in `RUNTIMES` has."""

    def __call__(
        self, spec: RuntimeSpec, session_id: str, scratch: Path, mounts: Sequence[Mount]
    ) -> Runtime:
        """`scratch` is a host folder of this session's own, removed by its owner."""

"""The work folder of a session: its preparation before the run, its artifacts after the run.

Before: the task's prepare steps and the harness's own files, and a second runtime that is made
ready in the background for the evaluator.

After: chosen files and the patch of a repository. They are copied into the run folder when no
process of the harness lives and before an evaluator changes anything, each under a size limit, and
are found from the result by name (`SessionResult.logs`). What is not kept is reported with its
reason, single entries of a folder too.

The runtimes of an evaluator are made here, too: fresh ones, or the agent's own if the task trusts
it. The agent's files come as a copy that `bridle.runtimes.files` makes. Files that programs obey
unasked (hooks, configuration) are never copied, and no file replaces one of the checker's own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from posixpath import join, normpath
from typing import Final

from bridle.aio import retry
from bridle.config import Action, ArtifactsSpec
from bridle.errors import BridleError, RuntimeFailure, StoreError, boundary
from bridle.evaluators.base import OBEYED, CheckerFailure, Unscorable
from bridle.folders import private_file, private_folder
from bridle.harnesses.base import Launch
from bridle.runtimes.base import Runtime
from bridle.runtimes.files import Keep, TooMuch, remove_folders
from bridle.types import JSON

GIT_OBEYS: Final = frozenset({"config", "config.worktree", "hooks", "info", "commondir"})
"""Entries of a `.git` folder that make git run programs, or look for these entries elsewhere."""


Make = Callable[[AsyncExitStack], Awaitable[Runtime]]


@dataclass(slots=True)
class SessionPlaces:
    """Implements `evaluators.base.Places` for one session; `resources` own what it opens."""

    agents: Runtime
    """The agent's runtime."""
    make: Make
    """Starts a fresh runtime, with the task's prepare steps done."""
    prepare: Callable[[Runtime], Awaitable[None]]
    """Does the steps of `eval_prepare`."""
    stop: Callable[[Runtime], Awaitable[None]]
    folder: Path
    """Host folder for the copy of the agent's files."""
    resources: AsyncExitStack
    targets: Sequence[str] = ()
    """Paths of the task's own: targets of `eval_prepare`, and of what is bound."""
    trusted: bool = False
    """True to score in `agents` itself."""
    shared: bool = False
    """True if processes of the agent may live there."""
    prewarmed: Callable[[], Awaitable[Runtime]] | None = None
    """Returns a fresh runtime that was made ready in advance."""
    stayed: list[str] = field(default_factory=list)
    """Paths of the agent that were not copied, each with its reason."""
    used: set[str] = field(default_factory=set)
    """Those of `apart`, `trusted` and `shared` that were used."""
    _left: Path | None = None

    async def left(self) -> Path:
        """Return a host folder with a copy of the work folder as the agent left it; kills the agent
        first.
        """
        if self._left is None:
            work = self.folder / "work"
            self.resources.push_async_callback(asyncio.to_thread, remove_folders, [self.folder])
            await self.agents.kill()
            try:
                self.stayed += await self.agents.snapshot(work)
            except TooMuch as error:
                raise Unscorable(f"the agent's work folder cannot be copied: {error}") from error
            except RuntimeFailure as error:
                raise CheckerFailure(
                    "the agent's work folder cannot be copied", str(error)
                ) from error
            self._left = work
        return self._left

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Runtime]:
        """Yield a new runtime with the task's preparation steps done and no file of the agent's."""
        async with self._opened() as runtime:
            await self.prepare(runtime)
            with _checking():
                yield runtime

    @asynccontextmanager
    async def with_work(
        self, ours: Sequence[str] = (), only: Sequence[str] | None = None
    ) -> AsyncIterator[Runtime]:
        """Yield a new runtime with the agent's work folder (the agent's own where the task is
        `trusted`).

        `ours`, and what is not below one of `only`, stays as the task's own steps made it.
        """
        if self.trusted:
            async with self._in_place() as runtime:
                yield runtime
            return
        work = await self.left()
        async with self._opened() as runtime:
            with _checking():
                keep = keep_filter((*self.targets, *ours), only, runtime.workdir)
                stayed = await runtime.put_work(work, keep)
                self.stayed += [path for path in stayed if "/.git/" not in f"/{path}"]
                await self.prepare(runtime)
                yield runtime

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[Runtime]:
        """Yield a runtime with all the agent's files and none of its processes.

        Where the task is `trusted`, it is the agent's own.
        """
        if self.trusted:
            async with self._in_place() as runtime:
                yield runtime
            return
        self.used.add("apart")
        async with AsyncExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(dir=self.folder))
            self.resources.push_async_callback(asyncio.to_thread, remove_folders, [self.folder])
            try:
                runtime = await self.agents.copied(scratch)
            except TooMuch as error:
                raise Unscorable(
                    f"the session's sandbox cannot be copied for its checker: {error}"
                ) from error
            except RuntimeFailure as error:
                raise CheckerFailure(
                    "the session's sandbox cannot be copied for its checker", str(error)
                ) from error
            stack.push_async_callback(self.stop, runtime)
            with _checking():
                await self.prepare(runtime)
                yield runtime

    @asynccontextmanager
    async def untouched(self) -> AsyncIterator[SessionPlaces]:
        """Yield the places of a session whose work folder the agent never touched."""
        async with AsyncExitStack() as stack:
            yield replace(
                self,
                agents=await self.make(stack),
                resources=stack,
                folder=self.folder / "untouched",
                stayed=[],
                used=set(),
                _left=None,
            )

    def facts(self) -> JSON:
        """Return where the session was scored (`place`) and which paths were not copied
        (`stayed`).
        """
        facts: JSON = {"place": max(self.used)} if self.used else {}
        if self.stayed:
            facts["stayed"] = self.stayed[:NAMED]
        return facts

    @asynccontextmanager
    async def _in_place(self) -> AsyncIterator[Runtime]:
        """Yield the agent's own runtime, with its processes only where the task is `shared`."""
        self.used.add("shared" if self.shared else "trusted")
        with _checking():
            if not self.shared:  # git, which made the kept patch, obeys the agent
                await self.agents.kill()
            await self.prepare(self.agents)
            yield self.agents

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Runtime]:
        self.used.add("apart")
        async with AsyncExitStack() as stack:
            ready, self.prewarmed = self.prewarmed, None
            yield await (self.make(stack) if ready is None else ready())


@contextmanager
def _checking() -> Iterator[None]:
    """Attribute a runtime's failure to the checker, once it holds files of the agent."""
    try:
        yield
    except RuntimeFailure as error:
        raise CheckerFailure("the checker's runtime failed", str(error)) from error


def keep_filter(
    ours: Sequence[str], only: Sequence[str] | None = None, workdir: str = "/work"
) -> Keep:
    """Return the filter of files that stay when the agent's work folder is copied over a fresh one.

    These are `ours`, files that programs obey unasked (such as git's configuration), and all that
    is not below one of `only`. Paths of `ours` and `only` may be absolute, below `workdir`.
    """
    own, wanted = _inside(ours, workdir), _inside(only or (), workdir)
    above = {parent for path in (*own, *wanted) for parent in path.parents if parent.parts}

    def keep(path: PurePosixPath, *, is_folder: bool) -> bool:
        if ".git" in path.parts and _git_obeys(path, is_folder=is_folder):
            return True
        if path.name in OBEYED or (path in above and not is_folder):
            return True
        if only is not None and path not in above and not _below(path, wanted):
            return True
        return _below(path, own)

    return keep


def _inside(paths: Sequence[str], workdir: str) -> list[PurePosixPath]:
    """Return the paths that lie below the work folder, relative to it."""
    found = [PurePosixPath(normpath(join(workdir, path))) for path in paths]
    below = [path.relative_to(workdir) for path in found if path.is_relative_to(workdir)]
    return [path for path in below if path.parts]


def _below(path: PurePosixPath, tops: Sequence[PurePosixPath]) -> bool:
    return any(path == one or one in path.parents for one in tops)


def _git_obeys(path: PurePosixPath, *, is_folder: bool) -> bool:
    """Return whether git obeys an entry at or below `.git`; a module's counts as its own."""
    *_, last = (at for at, part in enumerate(path.parts) if part == ".git")
    below = path.parts[last + 1 :]
    if not below:
        return not is_folder
    return below[0] in GIT_OBEYS or (below[0] == "modules" and bool(GIT_OBEYS & set(below)))


TAIL_CHARS = 500


async def prepare(
    runtime: Runtime, actions: Sequence[Action], *, stage: str, base: Path, log: Path
) -> None:
    """Do the steps `actions` in the runtime in order, each up to its attempts with its backoff.

    `base` is the folder that relative sources are relative to; `log` gets the commands' output.
    Raises `RuntimeFailure` naming the step that failed (`stage` and its index).
    """
    for index, action in enumerate(actions):

        async def attempt(index: int = index, action: Action = action) -> None:
            try:
                await _perform(runtime, action, base, log)
            except RuntimeFailure as error:
                raise RuntimeFailure(f"{stage} step {index} ({action.type}): {error}") from error

        await retry(
            attempt,
            attempts=action.max_attempts,
            backoff_s=action.retry_backoff_seconds,
            retry_on=(RuntimeFailure,),
        )


async def _perform(runtime: Runtime, action: Action, base: Path, log: Path) -> None:
    match action.type:
        case "exec" | "scrub_git":
            scrubs = action.type == "scrub_git"
            command = SCRUB if scrubs else action.command or ""
            cwd = action.target if scrubs else action.cwd
            result = await runtime.exec(command, env=action.env, cwd=cwd, log=log)
            if not result.ok:
                said = (result.stderr or result.stdout).decode(errors="replace").strip()
                how = (
                    f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
                )
                what = action.target or "." if scrubs else repr(action.command)
                raise RuntimeFailure(f"{what}: the command failed with {how}: {said[-TAIL_CHARS:]}")
        case "upload_file" | "upload_dir":
            await runtime.upload(base / (action.source or ""), action.target or ".")


async def put_harness_files(runtime: Runtime, launch: Launch) -> None:
    """Copy the files and folders of a harness into the runtime, readable by its user alone."""
    for path, content in launch.files.items():
        await runtime.write(path, content, mode=0o600)
    for path, folder in launch.folders.items():
        await runtime.upload(folder, path)


class Prewarmed:
    """A runtime that is made ready in the background.

    `make` pushes what it opens on the stack that it is given; the stack is unwound by `aclose`.
    """

    def __init__(self, group: asyncio.TaskGroup, make: Make) -> None:
        self._stack = AsyncExitStack()
        self._making = group.create_task(self._made(make), name="prewarm")

    async def _made(self, make: Make) -> Runtime | BridleError:
        try:
            with boundary(RuntimeFailure, "the fresh runtime"):
                return await make(self._stack)
        except BridleError as error:
            return error

    async def get(self) -> Runtime:
        """Return the prewarmed runtime when it is ready. Raises the error of its start."""
        await asyncio.wait({self._making})
        made = self._making.result()
        if isinstance(made, BridleError):
            raise made
        return made

    async def aclose(self) -> None:
        """Stop the prewarmed runtime, ready or not; idempotent."""
        self._making.cancel()
        await asyncio.wait({self._making})
        await self._stack.aclose()


FILE_S: Final = 60.0
"""Time limit for one file or folder."""
PATCH: Final = "patch.diff"
NAMED: Final = 50
"""Number of paths of one folder that are reported as left out."""
GIT: Final = "git -c safe.directory='*' -c core.quotePath=false -c core.fsmonitor="
BEGAN: Final = f"{GIT} rev-parse HEAD"
TAKE: Final = f"""
own=$({GIT} rev-parse --git-path index) && aside=$(mktemp) || exit
trap 'rm -f "$aside"' EXIT
if [ -e "$own" ]; then cp -- "$own" "$aside"; else rm -f "$aside"; fi
export GIT_INDEX_FILE=$aside
{GIT} add --all :/ || exit
{GIT} diff --cached --binary --no-renames --no-ext-diff --no-textconv --no-color "$1" -- :/
"""
"""Prints all differences from a commit, new files too; the repository's own index is not used."""


async def base_commit(runtime: Runtime, repo: str | None) -> str | None:
    """Return the commit that a repository begins with; `None` = no patch is wanted or possible."""
    if repo is None:
        return None
    result = await runtime.exec(BEGAN, cwd=repo)
    return result.stdout.decode().strip() if result.ok else None


async def keep_files(
    runtime: Runtime,
    spec: ArtifactsSpec,
    logs: Sequence[str],
    commit: str | None,
    folder: Path,
) -> tuple[dict[str, Path], dict[str, str]]:
    """Copy a session's artifacts into `folder`; returns (name -> path, name -> reason for leaving
    it out).

    `logs` are the files that the harness itself names, which may be missing; `commit` is the commit
    at the session's beginning, which a patch is made against.
    """
    kept: dict[str, Path] = {}
    left: dict[str, str] = {}
    wanted = [(path, path, Path("artifacts", path)) for path in spec.paths]
    for path in logs:
        name = path.rpartition("/")[2]
        wanted.append((name, path, Path("files", name)))
    if spec.patch is not None:
        wanted.insert(0, (PATCH, spec.patch, Path(PATCH)))
    most = spec.max_mb << 20
    for name, path, place in wanted:
        target = folder / place
        try:
            with boundary(StoreError, f"keeping {name}"):
                async with asyncio.timeout(FILE_S):
                    if name is PATCH:
                        await _keep_patch(runtime, path, commit, target, most)
                    else:
                        for stayed in (await _keep_copy(runtime, path, target, most))[:NAMED]:
                            part, _, reason = stayed.rpartition(": ")
                            left[f"{name}/{part}"] = reason
        except BridleError as error:
            left[name] = str(error)
        else:
            kept[name] = target
    for path in logs:
        left.pop(path.rpartition("/")[2], None)
    return kept, left


async def _keep_copy(runtime: Runtime, path: str, target: Path, most: int) -> tuple[str, ...]:
    """Copy a file or folder; return the entries that were not copied, each with its reason."""
    private_folder(target.parent)
    stayed = await runtime.download(path, target, most=most)
    await asyncio.to_thread(_make_private, target)
    return stayed


def _make_private(target: Path) -> None:
    """Remove the permissions that the agent gave to group and others on a copy."""
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)


async def _keep_patch(
    runtime: Runtime, repo: str, commit: str | None, target: Path, most: int
) -> None:
    if commit is None:
        raise RuntimeFailure(
            f"the agent's patch cannot be made: {repo} was not a git repository with a commit "
            "when the session began"
        )
    result = await runtime.exec(["bash", "-c", TAKE, "bash", commit], cwd=repo, output_limit=most)
    if result.truncated:
        raise RuntimeFailure(f"the agent's patch is larger than {most >> 20} MiB, the limit")
    if not result.ok:
        said = result.stderr.decode(errors="replace").strip()[-500:]
        raise RuntimeFailure(f"git could not make the agent's patch: {said}")
    private_folder(target.parent)
    await asyncio.to_thread(private_file(target).write_bytes, result.stdout)


SCRUB: Final = r"""
set -eu
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_COMMON_DIR GIT_OBJECT_DIRECTORY
unset GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_CEILING_DIRECTORIES GIT_NAMESPACE
export GIT_NO_REPLACE_OBJECTS=1
git() {
  command git -c safe.directory='*' -c core.fsmonitor= -c core.hooksPath=/dev/null \
    -c core.quotePath=false "$@"
}
command -v git >/dev/null || { echo 'git is not installed in the runtime' >&2; exit 1; }

scrub() ( # scrub FOLDER
  cd "$1"
  [ -e .git ] || { echo "$PWD is not the top folder of a Git repository" >&2; exit 1; }
  old=$(git rev-parse --absolute-git-dir)
  if [ "$(cd "$(git rev-parse --git-common-dir)" && pwd -P)" != "$(cd "$old" && pwd -P)" ]; then
    echo "$PWD is a linked worktree: its repository, with all commits, is elsewhere" >&2
    exit 1
  fi
  git ls-files -sz | tr '\0' '\n' | { grep '^160000 ' || true; } | cut -f2- |
  while IFS= read -r module; do
    if [ -e "$module/.git" ]; then scrub "$module"; fi
  done
  head=$(git rev-parse --verify -q 'HEAD^{commit}') || { echo "$PWD has no commit" >&2; exit 1; }
  branch=$(git symbolic-ref -q HEAD || true)
  format=$(git rev-parse --show-object-format)
  new=$(mktemp -d "$PWD/.git.XXXXXX")
  trap 'rm -rf "$new"' EXIT
  git init -q --bare --template= --object-format="$format" "$new"
  if [ -f "$old/shallow" ]; then
    while read -r commit; do
      if git merge-base --is-ancestor "$commit" "$head"; then echo "$commit"; fi
    done <"$old/shallow" >"$new/shallow"
  fi
  { echo "$head"; git for-each-ref --merged "$head" --format='%(objectname)' refs/tags; } |
    git pack-objects -q --revs "$new/objects/pack/pack" >/dev/null
  git for-each-ref --merged "$head" --format='create %(refname) %(objectname)' refs/tags |
    git --git-dir "$new" update-ref --stdin
  if [ -n "$branch" ]; then
    git --git-dir "$new" symbolic-ref HEAD "$branch"
    git --git-dir "$new" update-ref "$branch" "$head"
  else
    git --git-dir "$new" update-ref --no-deref HEAD "$head"
  fi
  for key in core.autocrlf core.eol core.fileMode core.ignoreCase core.symlinks user.name \
    user.email; do
    value=$(git config --local --get "$key") || continue
    git --git-dir "$new" config "$key" "$value"
  done
  git --git-dir "$new" config core.bare false
  if [ -f "$old/info/exclude" ]; then
    mkdir -p "$new/info"
    cp "$old/info/exclude" "$new/info/"
  fi
  rm -rf .git "$old"
  chmod 755 "$new"
  mv "$new" .git
  git read-tree HEAD
  git update-index -q --refresh >/dev/null || true
)

scrub .
find . -name .git -prune -o -type f \( -name '*.pyc' -o -name '*.pyo' \) -exec rm -f {} +
git ls-files -oz -- '*.orig' '*.rej' | tr '\0' '\n' | while IFS= read -r remains; do
  rm -f -- "$remains"
done
"""

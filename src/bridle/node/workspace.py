"""The work folder of a session: its preparation before the run, its artifacts after the run.

Before: the task's prepare steps and the harness's own files, and a second runtime that is made
ready in the background for the evaluator.

After: chosen files and the patch of a repository. They are copied into the run folder when no
process of the harness lives and before an evaluator changes anything, each under a size limit, and
are found from the result by name (`SessionResult.logs`). What is not kept is reported with its
reason, single entries of a folder too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from bridle.aio import retry
from bridle.config import Action, ArtifactsSpec
from bridle.errors import BridleError, RuntimeFailure, StoreError, boundary
from bridle.folders import private_file, private_folder
from bridle.harnesses.base import Launch
from bridle.runtimes.base import Runtime

TAIL_CHARS = 500


async def prepare(
    runtime: Runtime, actions: Sequence[Action], *, stage: str, base: Path, log: Path
) -> None:
    """Do `actions` in order, each up to its attempts with its back-off.

    `base` is what relative sources are relative to; `log` gets the commands' output. Raises
    `RuntimeFailure` naming the step that failed (`stage` and its index).
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
                raise RuntimeFailure(f"{what}: {how}: {said[-TAIL_CHARS:]}")
        case "upload_file" | "upload_dir":
            await runtime.upload(base / (action.source or ""), action.target or ".")


async def put_harness_files(runtime: Runtime, launch: Launch) -> None:
    """Put the harness's own files and folders into the runtime, readable by its user alone."""
    for path, content in launch.files.items():
        await runtime.write(path, content, mode=0o600)
    for path, folder in launch.folders.items():
        await runtime.upload(folder, path)


class Prewarmed:
    """A runtime that is made ready in the background.

    `make` pushes what it opens on the stack that it is given; the stack is unwound by `aclose`.
    """

    def __init__(
        self, group: asyncio.TaskGroup, make: Callable[[AsyncExitStack], Awaitable[Runtime]]
    ) -> None:
        self._stack = AsyncExitStack()
        self._making = group.create_task(self._made(make), name="prewarm")

    async def _made(
        self, make: Callable[[AsyncExitStack], Awaitable[Runtime]]
    ) -> Runtime | BridleError:
        try:
            with boundary(RuntimeFailure, "the fresh runtime"):
                return await make(self._stack)
        except BridleError as error:
            return error

    async def get(self) -> Runtime:
        """Return the runtime when it is ready. Raises the error of its start."""
        await asyncio.wait({self._making})
        made = self._making.result()
        if isinstance(made, BridleError):
            raise made
        return made

    async def aclose(self) -> None:
        """Stop it, ready or not; idempotent."""
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
    """Copy artifacts into `folder`: (name -> path, name -> the reason why it was left out).

    `logs` are the files that the harness names itself, which may be missing; `commit` is what
    `base_commit` returned at the beginning.
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
            f"{repo} was not a git repository with a commit when the session began"
        )
    result = await runtime.exec(["bash", "-c", TAKE, "bash", commit], cwd=repo, output_limit=most)
    if result.truncated:
        raise RuntimeFailure(f"the patch has more than {most >> 20} MiB")
    if not result.ok:
        said = result.stderr.decode(errors="replace").strip()[-500:]
        raise RuntimeFailure(f"git made no patch: {said}")
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

"""Preparation of a runtime: the task's prepare steps, the harness's files, a fresh one to score."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from bridle.aio import retry
from bridle.config import Action
from bridle.errors import BridleError, RuntimeFailure, boundary
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
            command = COMMAND if scrubs else action.command or ""
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


async def place(runtime: Runtime, launch: Launch) -> None:
    """Put the harness's own files and folders into the runtime; files only it can read."""
    for path, content in launch.files.items():
        await runtime.write(path, content, mode=0o600)
    for path, folder in launch.folders.items():
        await runtime.upload(folder, path)


class Prewarmed:
    """A runtime that is made ready in the background, and waited for when it is needed.

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
        """The runtime, when it is ready. Raises what went wrong with it."""
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


COMMAND: Final = r"""
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

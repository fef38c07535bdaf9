"""Removal of the future from a repository: prepare step `scrub_git`.

An image of a task often has the reference patch in its Git data: a later commit, a tag, a reflog, a
stash, an object that no ref names. `COMMAND` puts a new repository in its place, with the commits
that `HEAD` reaches, the tags on them and the checked-out branch, and nothing else; submodules too.
The files of the work tree stay as they are, but for compiled Python, which may be of other sources,
and the remains of patches that Git does not track. Hooks, remotes and the index are not kept.

It is a shell script for the runtime's own `git` (2.25 or later), with the repository's top folder
as the working directory. It fails, with the reason on standard error, for a linked worktree, for a
repository without a commit, and where objects that `HEAD` reaches are missing.
"""

from __future__ import annotations

from typing import Final

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
  rm -rf .git
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

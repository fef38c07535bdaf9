"""A repository with its future in every place that Git has for it, and probes that look for it."""

MAKE = r"""
set -e
export GIT_TEMPLATE_DIR=
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
commit() { git add -A && git commit -q -m "$1"; }
mkdir -p lib && cd lib && git init -q -b main && echo 'lib 1' > lib.txt && commit base
base=$(git rev-parse HEAD)
echo 'FUTURE of the module' > lib.txt && commit 'FUTURE: module' && git checkout -q "$base" && cd ..
mkdir repo && cd repo && git init -q -b main
printf '*.log\n*.pyc\n' > .gitignore
echo 'def answer(): return 0' > code.py && commit 'first'
git tag -a v1 -m 'version 1'
mkdir .git/modules && cp -r ../lib lib && mv lib/.git .git/modules/lib
echo 'gitdir: ../.git/modules/lib' > lib/.git && git -C lib config core.worktree ../../../lib
printf '[submodule "lib"]\n\tpath = lib\n\turl = ../lib\n' > .gitmodules
echo 'def answer(): return 1' > code.py && commit 'base' && git tag v2
base=$(git rev-parse HEAD)

future() { echo "def answer(): return 'FUTURE $1'" > code.py; }
git checkout -q -b fix && future branch && commit 'FUTURE: branch' && git tag -a v3 -m 'FUTURE: tag'
python3 -c 'import py_compile; py_compile.compile("code.py")' 2>/dev/null || {
  mkdir -p __pycache__ && echo FUTURE > __pycache__/code.cpython-311.pyc
}
git notes add -m 'FUTURE: note' HEAD && git replace "$base" HEAD
git update-ref refs/remotes/origin/main HEAD && git update-ref refs/original/x HEAD
git remote add origin https://example.org/FUTURE.git && git pack-refs --all
git bundle create -q .git/all.bundle --all
git worktree add -q .git/aside fix --detach && git worktree lock .git/aside
git checkout -q main && future stash && git stash -q
future amended && commit 'FUTURE: reset away' && git reset -q --hard "$base"
future staged && git add code.py && git reset -q --hard "$base"
git update-index --add --cacheinfo "100644,$(echo FUTURE | git hash-object -w --stdin),staged.py"
git merge-base main fix > .git/FETCH_HEAD && git rev-parse fix >> .git/FETCH_HEAD
git rev-parse fix > .git/ORIG_HEAD && echo 'FUTURE: message' > .git/MERGE_MSG
mkdir -p .git/rr-cache/x .git/lost-found/other .git/hooks
echo FUTURE > .git/rr-cache/x/postimage && echo FUTURE > .git/lost-found/other/x
echo '# FUTURE' > .git/hooks/pre-commit
mkdir -p ../other && (cd ../other && git init -q && echo FUTURE > x && commit 'FUTURE: alternate')
echo "$PWD/../other/.git/objects" > .git/objects/info/alternates
git -C ../other rev-parse HEAD > .git/refs/heads/alternate
git gc -q 2>/dev/null; git commit-graph write --reachable 2>/dev/null || true
printf 'FUTURE\n' > code.py.orig && printf 'FUTURE\n' > code.py.rej
echo 'def answer(): return 2' > code.py # a change of the image that is not committed
echo 'kept by the image' > build.log
"""
"""In an empty folder: makes the repository `repo`. Everything of the future says `FUTURE`."""

PROBES = {
    "commits of all refs": "git log --all --format=%B",
    "reflogs": "git log -g --all --format=%B; cat .git/logs/HEAD",
    "stashes": "git stash list; git stash show -p",
    "tags": "git tag -n9; git show v3",
    "branches": "git branch -a; git show fix:code.py",
    "refs on disk": "(cat .git/packed-refs; git for-each-ref) | grep -E 'fix|v3|origin|original'",
    "remotes": "git remote -v; git config --list --local",
    "notes": "git notes list | head -1; git log --show-notes='*' --format=%B%N",
    "replacements": "git replace -l; git show HEAD:code.py",
    "unreachable objects": "git fsck --unreachable --no-reflogs --lost-found",
    "all objects": "git cat-file --batch --batch-all-objects",
    "objects of alternates": "cat .git/objects/info/alternates",
    "pseudo refs": "for r in FETCH_HEAD ORIG_HEAD MERGE_HEAD; do git show $r; cat .git/$r; done",
    "messages": "cat .git/*_MSG .git/*EDITMSG",
    "worktrees": "git worktree list | tail -n +2; cat .git/worktrees/*/HEAD .git/aside/code.py",
    "bundles": "ls .git | grep bundle; git bundle unbundle .git/all.bundle",
    "merge resolutions": "cat .git/rr-cache/*/*",
    "found objects": "cat .git/lost-found/*/*",
    "hooks": "cat .git/hooks/*",
    "commit graph": "ls .git/objects/info/commit-graph* 2>/dev/null",
    "index": "git diff --cached",
    "submodule": "cd lib && git log --all -p; git cat-file --batch --batch-all-objects; git tag",
    "superproject's modules": "ls .git/modules 2>/dev/null",
    "compiled files": "find . -name '*.pyc' -exec cat {} +",
    "remains of patches": "cat code.py.orig code.py.rej",
    "any file": "grep -rh FUTURE .",
}
"""Name -> a shell command in the repository. It found something if its output says `FUTURE`, or, of
the names in `SILENT`, if it has any output."""

SILENT = {
    "stashes",
    "refs on disk",
    "objects of alternates",
    "worktrees",
    "bundles",
    "commit graph",
    "superproject's modules",
    "unreachable objects",
}

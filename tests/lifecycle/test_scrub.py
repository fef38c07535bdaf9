"""A scrubbed repository keeps its work tree and its past, and has nothing of its future."""

import secrets

import pytest
from tests.lifecycle.leaky import MAKE, PROBES, SILENT

from bridle.config import Action, RuntimeSpec
from bridle.errors import RuntimeFailure
from bridle.lifecycle.preparing import prepare
from bridle.runtimes.local import LocalRuntime


@pytest.fixture
async def runtime(tmp_path):
    (tmp_path / "scratch").mkdir()
    made = LocalRuntime(RuntimeSpec(), f"s-{secrets.token_hex(8)}", tmp_path / "scratch")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def leaky(runtime):
    """A runtime with the repository `repo`, before it is scrubbed."""
    made = await runtime.exec(MAKE)
    assert made.ok, made.stderr.decode()
    return runtime


async def scrubbed(runtime, tmp_path, target="repo"):
    action = Action(type="scrub_git", target=target)
    await prepare(runtime, [action], stage="prepare", base=tmp_path, log=tmp_path / "log")


async def said(runtime, command):
    done = await runtime.exec(command, cwd="repo")
    return (done.stdout + done.stderr).decode(errors="replace") if done.ok else ""


async def found(runtime, probe):
    """Return whether a probe finds something of the future."""
    output = (await runtime.exec(f"({PROBES[probe]}) 2>/dev/null", cwd="repo")).stdout
    return bool(output.strip()) if probe in SILENT else b"FUTURE" in output


async def test_the_probes_find_the_future_before_the_scrub(leaky):
    assert {probe for probe in PROBES if not await found(leaky, probe)} == set()


async def test_no_probe_finds_the_future_after_the_scrub(leaky, tmp_path):
    await scrubbed(leaky, tmp_path)
    assert {probe for probe in PROBES if await found(leaky, probe)} == set()


async def test_files_past_tags_and_branch_stay(leaky, tmp_path):
    kept = (
        "git rev-parse HEAD",
        "git symbolic-ref HEAD",
        "git log --format='%H %s' HEAD",
        "git tag --merged HEAD",
        "git diff HEAD",
        "git describe --tags HEAD",
        "cat build.log .gitignore lib/lib.txt",
        "git -C lib rev-parse HEAD",
    )
    await leaky.exec("git replace -d $(git replace -l)", cwd="repo")
    before = [await said(leaky, command) for command in kept]
    assert all(before)
    await scrubbed(leaky, tmp_path)
    assert [await said(leaky, command) for command in kept] == before
    assert await said(leaky, "git fsck --strict && echo sound") == "sound\n"
    assert await said(leaky, "git status --short") == " M code.py\n"
    await scrubbed(leaky, tmp_path)
    assert [await said(leaky, command) for command in kept] == before


async def test_a_detached_head_and_a_shallow_clone_are_scrubbed(runtime, tmp_path):
    script = f"({MAKE}) && git clone -q --depth 1 --branch v2 file://$PWD/repo shallow 2>/dev/null"
    made = await runtime.exec(f"{script} && mv repo deep && mv shallow repo")
    assert made.ok, made.stderr.decode()
    head = await said(runtime, "git rev-parse HEAD")
    await scrubbed(runtime, tmp_path)
    assert await said(runtime, "git rev-parse HEAD") == head
    assert await said(runtime, "git log --format=%s") == "base\n"
    assert await said(runtime, "git symbolic-ref -q HEAD || echo detached") == "detached\n"


LINKED = """
git init -q x && cd x && git -c user.name=a -c user.email=a commit -q --allow-empty -m x
git worktree add -q ../repo
"""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        ("mkdir repo", "is not the top folder of a Git repository"),
        ("git init -q repo", "has no commit"),
        (LINKED, "is a linked worktree"),
    ],
)
async def test_what_cannot_be_scrubbed_fails_the_step_with_its_reason(
    runtime, tmp_path, make, reason
):
    assert (await runtime.exec(make)).ok
    with pytest.raises(RuntimeFailure, match=rf"prepare step 0 \(scrub_git\): repo: .*{reason}"):
        await scrubbed(runtime, tmp_path)


NAMED = """
echo "gitdir: $PWD/kept" > repo/.git && echo "gitdir: $PWD/kept/modules/lib" > repo/lib/.git
git --git-dir kept/modules/lib config core.worktree "$PWD/repo/lib"
"""


@pytest.mark.parametrize("link", [NAMED, "ln -s ../kept repo/.git"])
async def test_a_repository_whose_data_lie_elsewhere_leaves_nothing_there(leaky, tmp_path, link):
    moved = await leaky.exec(f"set -e; mv repo/.git kept; {link}")
    assert moved.ok, moved.stderr.decode()
    assert "FUTURE" in await said(leaky, "git log --all --format=%B")
    await scrubbed(leaky, tmp_path)
    assert {probe for probe in PROBES if await found(leaky, probe)} == set()
    assert await said(leaky, "test -e ../kept || echo gone") == "gone\n"
    assert await said(leaky, "git fsck --strict && echo sound") == "sound\n"

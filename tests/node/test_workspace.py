import asyncio
import secrets
import shutil
from dataclasses import replace

import orjson
import pytest
from pydantic import ValidationError
from tests.node.house import AGENT, a_node, task
from tests.node.leaky import MAKE, PROBES, SILENT

from bridle.config import Action, AgentSpec, ArtifactsSpec, RuntimeSpec
from bridle.errors import RuntimeFailure
from bridle.harnesses.base import Launch
from bridle.harnesses.command import CommandHarness
from bridle.node.workspace import Prewarmed, prepare, put_harness_files
from bridle.runtimes.local import LocalRuntime


@pytest.fixture
async def runtime(tmp_path):
    (tmp_path / "scratch").mkdir()
    made = LocalRuntime(RuntimeSpec(), f"s-{secrets.token_hex(8)}", tmp_path / "scratch")
    await made.start()
    yield made
    await made.stop()


async def prepared(runtime, tmp_path, *actions):
    log = tmp_path / "prepare.log"
    made = [Action(**action) for action in actions]
    await prepare(runtime, made, stage="prepare", base=tmp_path, log=log)
    return log.read_text() if log.exists() else ""


async def test_prepare_steps_run_in_order(runtime, tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("1")
    (tmp_path / "one").write_text("2")
    said = await prepared(
        runtime,
        tmp_path,
        {"type": "upload_dir", "source": "tree", "target": "."},
        {"type": "upload_file", "source": "one", "target": "sub/b"},
        {"type": "exec", "command": "cat $A b", "cwd": "sub", "env": {"A": "../a"}},
    )
    assert said == "12"


async def test_prepare_steps_see_files_of_earlier_steps(runtime, tmp_path):
    said = await prepared(
        runtime,
        tmp_path,
        {"type": "exec", "command": "echo made > x"},
        {"type": "exec", "command": "cat x"},
    )
    assert said == "made\n"


async def test_a_failing_prepare_step_is_retried_up_to_max_attempts(runtime, tmp_path):
    third = "echo x >> tries; test $(wc -l < tries) = 3"
    step = {"type": "exec", "command": third, "retry_backoff_seconds": 0.01}
    await prepared(runtime, tmp_path, {**step, "max_attempts": 3})
    with pytest.raises(RuntimeFailure, match=r"prepare step 0 \(exec\): .*exit code 1"):
        await prepared(runtime, tmp_path, {**step, "max_attempts": 2})


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ({"type": "exec", "command": "kill -9 $$"}, r"step 0 \(exec\): 'kill.*signal 9"),
        ({"type": "upload_file", "source": "no", "target": "x"}, r"step 0 \(upload_file\): cannot"),
    ],
)
async def test_error_of_a_failed_prepare_step_names_the_step(runtime, tmp_path, action, said):
    with pytest.raises(RuntimeFailure, match=said):
        await prepared(runtime, tmp_path, action)


async def test_harness_files_and_folders_are_private(runtime, tmp_path):
    (tmp_path / "skills" / "x").mkdir(parents=True)
    (tmp_path / "skills" / "x" / "SKILL.md").write_text("skill")
    home = runtime.home
    launch = Launch(
        "true", {}, {f"{home}/.config/key": b"k"}, {f"{home}/.skills": tmp_path / "skills"}
    )
    await put_harness_files(runtime, launch)
    seen = await runtime.exec("stat -c %a $HOME/.config/key; cat $HOME/.skills/x/SKILL.md")
    assert seen.stdout == b"600\nskill"


# ---- prewarmed


class Room:
    """Something that is opened and closed."""

    def __init__(self):
        self.open = asyncio.Event()
        self.closed = 0

    async def make(self, stack):
        stack.push_async_callback(self.close)
        await self.open.wait()
        return self

    async def close(self):
        self.closed += 1


async def test_a_prewarmed_runtime_is_ready_and_closed_at_the_end():
    room = Room()
    async with asyncio.TaskGroup() as group:
        fresh = Prewarmed(group, room.make)
        room.open.set()
        made: object = await fresh.get()
        assert made is room
        await fresh.aclose()
        await fresh.aclose()
    assert room.closed == 1


async def test_a_prewarmed_runtime_that_is_not_ready_is_closed():
    room = Room()
    async with asyncio.TaskGroup() as group:
        fresh = Prewarmed(group, room.make)
        await asyncio.sleep(0)
        await fresh.aclose()
    assert room.closed == 1


async def test_a_failed_prewarm_raises_only_when_it_is_used():
    async def fails(stack):
        raise OSError(28, "no space")

    async with asyncio.TaskGroup() as group:
        fresh = Prewarmed(group, fails)
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeFailure, match=r"the fresh runtime: OSError: .*no space"):
            await fresh.get()
        await fresh.aclose()


GIT = "git -c user.name=a -c user.email=a@example.com"
A_REPOSITORY = Action(
    type="exec", command=f"git init -q && echo old > old && git add old && {GIT} commit -qm began"
)
LOCAL = RuntimeSpec(backend="local")


class Keeping(CommandHarness):
    """A harness that names files worth keeping."""

    def launch(self, context):
        home = context.home
        files = ("good.json", "gone.json", "huge.bin", "link")
        return replace(super().launch(context), logs=tuple(f"{home}/{name}" for name in files))


async def test_log_files_of_a_harness_are_kept_unless_missing_linked_or_too_large(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the host's own")
    command = (
        'echo {} > "$HOME/good.json"; truncate -s 70M "$HOME/huge.bin";'
        f' ln -s {secret} "$HOME/link"; {AGENT}'
    )
    agent = AgentSpec(import_path="tests.node.test_workspace:Keeping", command=command)
    async with a_node(tmp_path) as node:
        result = await node.run(task().model_copy(update={"agent": agent}))
        kept = node.folder.session_folder(result.session_id) / "files"
        assert [path.name for path in kept.iterdir()] == ["good.json"]
    assert result.status == "COMPLETED"
    assert (tmp_path / "run" / result.logs["good.json"]).read_text() == "{}\n"


async def test_artifact_paths_are_kept_except_large_missing_and_escaping_files(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the host's own")
    command = (
        f"mkdir -p out/deep; echo 1 > out/one; echo 2 > out/deep/two; ln -s {secret} out/evil;"
        f" ln -s ../../../../secret out/worse; ln -s one out/fine; truncate -s 3M huge; {AGENT}"
    )
    spec = ArtifactsSpec(paths=("out", "huge", "gone", "out/evil"), max_mb=2)
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, artifacts=spec, runtime=LOCAL))
    assert result.status == "COMPLETED"
    out = tmp_path / "run" / result.logs["out"]
    names = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_symlink()}
    assert names - {"fine"} == {"one", "deep", "deep/two"}
    assert not any(path.read_text() == "the host's own" for path in out.glob("*") if path.is_file())
    left = result.metadata["left_out"]
    assert left.keys() == {"huge", "gone", "out/evil", "out/worse"}
    assert left["huge"] == "there are more than 2 MiB to copy"
    assert (left["gone"], left["out/worse"]) == (
        "gone does not exist",
        "a link that leads elsewhere",
    )


async def test_an_artifact_file_that_cannot_be_copied_is_left_out_alone_and_named(tmp_path):
    left = (
        "mkdir -p out/shut; echo 1 > out/one; echo 2 > out/shut/two;"
        " chmod 000 out/shut/two out/shut;"
        r" mkfifo $'out/pipe\xff\n'; ln -s $'/nowhere\xff' out/link; truncate -s 1M out/sparse"
    )
    spec = ArtifactsSpec(paths=("out",))
    async with a_node(tmp_path) as node:
        result = await node.run(task(f"{left}; {AGENT}", artifacts=spec, runtime=LOCAL))
    out = tmp_path / "run" / result.logs["out"]
    assert {path.name for path in out.rglob("*")} == {"one", "shut", "two", "sparse"}
    assert (out / "shut" / "two").read_text() == "2\n"
    assert (out / "sparse").stat().st_blocks == 0
    assert orjson.loads(orjson.dumps(result.metadata))["left_out"] == {
        "out/link": "a link that leads elsewhere",
        "out/pipe\\udcff\n": "neither a regular file nor a folder nor a link",
    }


async def test_kept_artifacts_are_readable_only_by_their_owner(tmp_path):
    command = f"mkdir -m 777 out; echo 1 > out/one; chmod 777 out/one; echo 2 > two; {AGENT}"
    spec = ArtifactsSpec(paths=("out", "two"))
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, artifacts=spec, runtime=LOCAL))
    kept = [tmp_path / "run" / result.logs[name] for name in ("out", "two")]
    modes = [path.stat().st_mode & 0o777 for path in (*kept, kept[0] / "one")]
    assert modes == [0o700, 0o600, 0o700]


async def test_patch_artifact_contains_all_changes_and_leaves_the_repository_unchanged(tmp_path):
    command = (
        f"echo new > new; echo more >> old; {GIT} commit -qam mine; echo junk > .git/info/exclude;"
        f" touch junk; git status --porcelain > $HOME/before; {AGENT}"
    )
    spec = ArtifactsSpec(patch=".")
    runtime = LOCAL.model_copy(update={"prepare": (A_REPOSITORY,)})
    evaluator = {
        "strategy": "command",
        "config": {"command": "rm out.txt; git status --porcelain | diff - $HOME/before"},
        "trusted": True,
    }
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, artifacts=spec, runtime=runtime, evaluator=evaluator))
    assert result.reward == 1.0, result.metadata
    patch = (tmp_path / "run" / result.logs["patch.diff"]).read_text()
    changed = [line.split()[-1] for line in patch.splitlines() if line.startswith("diff ")]
    assert changed == ["b/new", "b/old", "b/out.txt"]
    assert "+more" in patch


@pytest.mark.parametrize(
    ("prepare", "command", "said"),
    [
        ((), "true", "was not a git repository"),
        ((A_REPOSITORY,), "rm -rf .git", "git could not make the agent's patch"),
        ((A_REPOSITORY,), "head -c 3000000 /dev/urandom > new", "larger than 1 MiB"),
    ],
)
async def test_a_patch_artifact_that_cannot_be_made_is_reported_as_left_out(
    tmp_path, prepare, command, said
):
    spec = ArtifactsSpec(patch=".", max_mb=1)
    runtime = LOCAL.model_copy(update={"prepare": prepare})
    async with a_node(tmp_path) as node:
        result = await node.run(task(f"{command}; {AGENT}", artifacts=spec, runtime=runtime))
    assert said in result.metadata["left_out"]["patch.diff"]
    assert result.status == "COMPLETED"


@pytest.mark.parametrize(
    ("keep", "command", "kept"),
    [("failed", AGENT, False), ("failed", "exit 1", True), ("never", "exit 1", False)],
)
async def test_a_task_overrides_which_logs_are_kept(tmp_path, keep, command, kept):
    spec = ArtifactsSpec(keep=keep, paths=("file",))
    async with a_node(tmp_path) as node:
        line = f"echo x > file; {command}"
        result = await node.run(task(line, artifacts=spec, runtime=LOCAL))
        assert node.folder.session_folder(result.session_id).exists() is kept
    assert ({"file", "stdout"} <= result.logs.keys()) is kept


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x", ""])
def test_an_artifact_path_outside_the_work_folder_is_refused(path):
    with pytest.raises(ValidationError, match="relative to the work folder"):
        ArtifactsSpec(paths=(path,))


async def test_artifacts_are_kept_without_running_programs_of_the_session(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to(shutil.which("bash"))
    runtime = RuntimeSpec(backend="local", env={"PATH": str(tmp_path / "bin")})
    artifacts = ArtifactsSpec(paths=("out",))
    async with a_node(tmp_path) as node:
        result = await node.run(
            task(f"echo x > out; {AGENT}", runtime=runtime, artifacts=artifacts)
        )
    assert "out" in result.logs


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


async def test_git_probes_find_future_commits_before_scrub_git(leaky):
    assert {probe for probe in PROBES if not await found(leaky, probe)} == set()


async def test_git_probes_find_no_future_commit_after_scrub_git(leaky, tmp_path):
    await scrubbed(leaky, tmp_path)
    assert {probe for probe in PROBES if await found(leaky, probe)} == set()


async def test_scrub_git_keeps_files_past_commits_tags_and_the_branch(leaky, tmp_path):
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


async def test_scrub_git_works_on_a_shallow_clone_with_a_detached_head(runtime, tmp_path):
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
async def test_scrub_git_fails_with_a_reason_on_an_unsupported_repository(
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
async def test_scrub_git_removes_a_git_folder_that_lies_outside_the_repository(
    leaky, tmp_path, link
):
    moved = await leaky.exec(f"set -e; mv repo/.git kept; {link}")
    assert moved.ok, moved.stderr.decode()
    assert "FUTURE" in await said(leaky, "git log --all --format=%B")
    await scrubbed(leaky, tmp_path)
    assert {probe for probe in PROBES if await found(leaky, probe)} == set()
    assert await said(leaky, "test -e ../kept || echo gone") == "gone\n"
    assert await said(leaky, "git fsck --strict && echo sound") == "sound\n"

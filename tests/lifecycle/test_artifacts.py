import shutil
from dataclasses import replace

import orjson
import pytest
from pydantic import ValidationError
from tests.lifecycle.house import AGENT, a_node, task

from bridle.config import Action, AgentSpec, ArtifactsSpec, RuntimeSpec
from bridle.harnesses.command import CommandHarness

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


async def test_what_a_harness_names_is_kept_if_it_is_there_and_not_too_large(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the host's own")
    command = (
        'echo {} > "$HOME/good.json"; truncate -s 70M "$HOME/huge.bin";'
        f' ln -s {secret} "$HOME/link"; {AGENT}'
    )
    agent = AgentSpec(import_path="tests.lifecycle.test_artifacts:Keeping", command=command)
    async with a_node(tmp_path) as node:
        result = await node.run(task().model_copy(update={"agent": agent}))
        kept = node.folder.session_folder(result.session_id) / "files"
        assert [path.name for path in kept.iterdir()] == ["good.json"]
    assert result.status == "COMPLETED"
    assert (tmp_path / "run" / result.logs["good.json"]).read_text() == "{}\n"


async def test_chosen_files_are_found_from_the_result(tmp_path):
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
    assert left["huge"] == "there are more than 2 MiB"
    assert (left["gone"], left["out/worse"]) == ("gone is not there", "a link that leads elsewhere")


async def test_one_file_that_cannot_leave_loses_itself_alone_and_is_named(tmp_path):
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


async def test_kept_files_are_readable_by_their_user_alone(tmp_path):
    command = f"mkdir -m 777 out; echo 1 > out/one; chmod 777 out/one; echo 2 > two; {AGENT}"
    spec = ArtifactsSpec(paths=("out", "two"))
    async with a_node(tmp_path) as node:
        result = await node.run(task(command, artifacts=spec, runtime=LOCAL))
    kept = [tmp_path / "run" / result.logs[name] for name in ("out", "two")]
    modes = [path.stat().st_mode & 0o777 for path in (*kept, kept[0] / "one")]
    assert modes == [0o700, 0o600, 0o700]


async def test_a_patch_has_all_that_changed_and_leaves_the_repository_as_it_is(tmp_path):
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
        ((), "true", "was no git repository"),
        ((A_REPOSITORY,), "rm -rf .git", "git made no patch"),
        ((A_REPOSITORY,), "head -c 3000000 /dev/urandom > new", "more than 1 MiB"),
    ],
)
async def test_a_patch_that_cannot_be_made_is_told(tmp_path, prepare, command, said):
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
async def test_a_task_has_its_own_policy(tmp_path, keep, command, kept):
    spec = ArtifactsSpec(keep=keep, paths=("file",))
    async with a_node(tmp_path) as node:
        line = f"echo x > file; {command}"
        result = await node.run(task(line, artifacts=spec, runtime=LOCAL))
        assert node.folder.session_folder(result.session_id).exists() is kept
    assert ({"file", "stdout"} <= result.logs.keys()) is kept


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x", ""])
def test_a_path_out_of_the_work_folder_is_refused(path):
    with pytest.raises(ValidationError, match="relative to the work folder"):
        ArtifactsSpec(paths=(path,))


async def test_files_are_kept_without_any_program_of_the_session_s(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to(shutil.which("bash"))
    runtime = RuntimeSpec(backend="local", env={"PATH": str(tmp_path / "bin")})
    artifacts = ArtifactsSpec(paths=("out",))
    async with a_node(tmp_path) as node:
        result = await node.run(
            task(f"echo x > out; {AGENT}", runtime=runtime, artifacts=artifacts)
        )
    assert "out" in result.logs

from pathlib import PurePosixPath

import pytest
from tests.evaluators.made import evaluation

from bridle.evaluators.base import Unscorable
from bridle.node.workspace import keep_filter


@pytest.mark.parametrize(
    ("path", "is_folder"),
    [
        ("check", True),
        ("check/deep/file", False),
        ("deep", False),  # a link in the way of deep/check.sh
        ("deep/check.sh", False),
        ("hidden/deep/file", False),
        ("src/conftest.py", False),
        ("GNUmakefile", False),
        ("web/.npmrc", False),
        (".cargo", True),
        (".git/config", False),
        (".git/hooks", True),
        (".git/modules/sub/config", False),
        ("sub/.git", False),
    ],
)
def test_evaluator_paths_and_config_files_of_tools_are_not_copied_from_the_agent(path, is_folder):
    ours = ["check", "deep/check.sh", "/work/a/../hidden", "/absolute", "."]
    assert keep_filter(ours)(PurePosixPath(path), is_folder=is_folder)


@pytest.mark.parametrize(
    ("path", "is_folder"),
    [("deep", True), ("checks", False), (".git", True), (".git/refs/heads/config", False)],
)
def test_all_other_files_are_copied_from_the_agent(path, is_folder):
    assert not keep_filter(["check", "deep/check.sh"])(PurePosixPath(path), is_folder=is_folder)


def test_only_named_files_are_copied_from_the_agent_if_any_are_named():
    keep = keep_filter([], ["out/answer.txt"])
    assert not keep_filter([], ["/work/out"])(PurePosixPath("out/answer.txt"), is_folder=False)
    taken = [("out", True), ("out/answer.txt", False), ("out/answer.txt/x", False)]
    assert not any(keep(PurePosixPath(path), is_folder=flag) for path, flag in taken)
    left = [("out", False), ("out/other", False), ("settings", False)]
    assert all(keep(PurePosixPath(path), is_folder=flag) for path, flag in left)


async def test_each_evaluation_place_is_a_fresh_runtime(tmp_path):
    async with evaluation(tmp_path) as context:
        assert (await context.places.agents.exec("echo work > file")).ok
        for _ in range(2):
            async with context.places.with_work() as runtime:
                assert (await runtime.exec("grep -q work file && ! test -e mine && touch mine")).ok
        async with context.places.whole() as runtime:
            assert (await runtime.exec("grep -q work file && ! test -e mine")).ok
        async with context.places.fresh() as runtime:
            assert (await runtime.exec("! test -e file")).ok
        assert context.places.facts() == {"place": "apart"}


async def test_a_whole_copy_has_the_home_and_no_process_of_the_agent(tmp_path):
    async with evaluation(tmp_path) as context:
        left = "touch ~/mine; (while :; do echo >> beat; sleep 0.02; done) >/dev/null 2>&1 &"
        begun = "until test -s beat; do sleep 0.01; done"
        assert (await context.places.agents.exec(f"{left}\n{begun}")).ok
        async with context.places.whole() as runtime:
            result = await runtime.exec(
                "test -e ~/mine && a=$(wc -c < beat); sleep 0.1; wc -c < beat; echo $a"
            )
            first, second = result.stdout.split()
            assert first == second


@pytest.mark.parametrize("left", ['rmdir "$PWD"', 'rmdir "$PWD"; ln -s /etc "$PWD"'])
async def test_a_deleted_or_linked_work_folder_is_evaluated_as_an_empty_one(tmp_path, left):
    async with evaluation(tmp_path) as context:
        assert (await context.places.agents.exec(left)).ok
        async with context.places.with_work() as runtime:
            assert (await runtime.exec('test -z "$(ls -A)"')).ok


async def test_a_work_folder_too_deep_to_copy_makes_the_session_unscorable(tmp_path):
    async with evaluation(tmp_path) as context:
        deep = "for i in $(seq 120); do mkdir d && cd d || exit; done"
        assert (await context.places.agents.exec(deep)).ok
        for place in (context.places.with_work, context.places.whole):
            with pytest.raises(Unscorable, match="cannot be copied"):
                async with place():
                    pass

import asyncio

import pytest
from tests.node.house import a_node, checked, nothing_lives, task

from bridle.capture.sqlite import SqliteStore
from bridle.errors import ConfigError, StoreError
from bridle.node.local import LocalExecutor

SMALL = {"run_slots": 2, "ready_buffer": 2, "post_slots": 1}


async def test_a_batch_yields_one_result_per_session_in_the_order_of_their_ends(tmp_path):
    others = tmp_path / "others-have-ended"
    tasks = [
        task(f"until [ -e {others} ]; do sleep 0.05; done; exit 1", task_id="slow"),
        task("exit 1", task_id="fast", num_samples=3),
    ]
    async with a_node(tmp_path) as node, LocalExecutor(node).run(tasks) as results:
        first = [await anext(results) for _ in range(3)]
        others.touch()
        last = [result async for result in results]
    ended = [sorted((one.task_id, one.sample_index) for one in part) for part in (first, last)]
    assert ended == [[("fast", 0), ("fast", 1), ("fast", 2)], [("slow", 0)]]


async def test_parallel_sessions_of_a_batch_all_complete_with_full_reward(tmp_path):
    tasks = [task(evaluator=checked(), num_samples=6)]
    async with a_node(tmp_path) as node, LocalExecutor(node).run(tasks) as results:
        ended = [result async for result in results]
    assert {result.reward for result in ended} == {1.0}
    assert {result.trajectory.metadata["stats"]["merge_ratio"] for result in ended} == {1.0}


async def test_a_task_that_cannot_run_raises_before_the_first_session(tmp_path):
    bad = task(task_id="bad", evaluator={"strategy": "luck"})
    async with a_node(tmp_path) as node:
        with pytest.raises(ConfigError, match="task 'bad': unknown evaluator"):
            async with LocalExecutor(node).run([task(), bad]):
                raise AssertionError
        assert node.seen == []


async def test_leaving_the_results_block_early_cancels_running_sessions(tmp_path):
    first_fails = f"mkdir {tmp_path}/first && exit 1; sleep 60"
    async with a_node(tmp_path, settings=SMALL) as node:
        tasks = [task(first_fails, num_samples=9)]
        async with LocalExecutor(node).run(tasks) as results:
            result = await anext(results)
        assert result.status == "ERROR"
        assert node.session_ids() == ()
        opened = [record.session_id for record in node.store.sessions()]
        assert all(nothing_lives(session_id) for session_id in opened)
        assert all(node.store.outcome(session_id) is not None for session_id in opened)
        assert len(opened) < 9
        assert list(node.scratch.folder.glob("*/*")) == []


async def test_a_cancelled_batch_ends_its_sessions(tmp_path):
    async with a_node(tmp_path, settings=SMALL) as node:

        async def batch():
            async with LocalExecutor(node).run([task("sleep 60", num_samples=4)]) as results:
                async for _ in results:
                    raise AssertionError

        async with asyncio.TaskGroup() as group:
            running = group.create_task(batch())
            while len(node.session_ids()) < 4:  # noqa: ASYNC110 - sessions come by themselves
                await asyncio.sleep(0.01)
            running.cancel()
        assert running.cancelled()
        assert node.session_ids() == ()


async def test_an_error_in_the_results_block_is_raised_unchanged_and_cancels_sessions(tmp_path):
    async with a_node(tmp_path) as node:

        async def batch():
            async with LocalExecutor(node).run([task("sleep 60")]):
                while not node.session_ids():  # noqa: ASYNC110 - sessions come by themselves
                    await asyncio.sleep(0.01)
                _ = 1 / 0

        with pytest.raises(ZeroDivisionError):
            await batch()
        assert node.session_ids() == ()


async def test_an_unwritable_result_ends_the_batch_with_a_store_error(tmp_path):
    async with a_node(tmp_path) as node:
        node.folder.trajectories.mkdir()

        async def batch():
            async with LocalExecutor(node).run([task("exit 1"), task("sleep 60")]) as results:
                return [result async for result in results]

        with pytest.raises(StoreError, match="cannot write"):
            await batch()
        assert node.session_ids() == ()


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def test_unconsumed_results_hold_back_new_sessions(tmp_path):
    settings = {"run_slots": 1, "ready_buffer": 1, "post_slots": 1}
    tasks = [task("exit 1", num_samples=20)]
    async with (
        a_node(tmp_path, settings=settings) as node,
        LocalExecutor(node).run(tasks) as results,
    ):
        while lines_of(node.folder.trajectories) < node.capacity:  # noqa: ASYNC110 - files, no events
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(node.store.sessions()) == node.capacity == 4
        assert len([result async for result in results]) == 20


THREE = [{"shell": ["echo one >> out.txt"]}, {"shell": ["echo done > out.txt"]}, {"content": "Ok"}]


@pytest.mark.parametrize(
    ("branching", "sessions"),
    [
        ({"at": [1, 2, 9], "samples": 2}, 1 + 4),
        ({"at": "every:1", "max_depth": 2}, 1 + 2 + 1),
        ({"at": "every:2"}, 1 + 1),
        ({"at": [1], "samples": 5, "budget_tokens": 1}, 1),
    ],
)
async def test_a_task_with_branching_forks_its_sessions(tmp_path, branching, sessions):
    store = await SqliteStore.open(tmp_path / "capture.sqlite")
    tasks = [task(evaluator=checked(), branching=branching)]
    async with (
        store,
        a_node(tmp_path, *THREE, store=store) as node,
        LocalExecutor(node).run(tasks) as results,
    ):
        ended = [result async for result in results]
    assert [result.reward for result in ended] == [1.0] * sessions
    forks = [one.metadata["fork"] for one in ended if "fork" in one.metadata]
    assert [fork["verdict"] for fork in forks] == ["exact"] * (sessions - 1)
    root, *others = sorted(ended, key=lambda one: "fork" in one.metadata)
    sampled = root.trajectory.metadata["stats"]["tokens_captured"]
    for one in others:
        stats = one.trajectory.metadata["stats"]
        again = stats["tokens_excluded"]["replayed"]
        assert stats["tokens_trained"] + again == stats["tokens_captured"] == sampled


async def test_branching_without_a_capture_file_is_refused_before_the_first_session(tmp_path):
    async with a_node(tmp_path) as node:
        with pytest.raises(
            ConfigError, match="branching: tasks that branch need a node that captures into a file"
        ):
            async with LocalExecutor(node).run([task(branching={"at": [1]})]):
                raise AssertionError
        assert node.seen == []

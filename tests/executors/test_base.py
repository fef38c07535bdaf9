from tests.lifecycle.house import a_node, task

from bridle.executors.base import Executor
from bridle.executors.local import LocalExecutor


async def test_any_executor_is_used_in_the_same_way(tmp_path):
    async with a_node(tmp_path) as node:
        executor: Executor = LocalExecutor(node)
        async with executor.run([task("exit 1", num_samples=2)]) as results:
            assert [result.status async for result in results] == ["ERROR", "ERROR"]

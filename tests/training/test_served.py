"""Groups of a real server, with workers that tests control, for trainers that are killed."""

import asyncio
from collections import Counter

import pytest
from tests.server.house import until
from tests.training.server import Death, Workers, a_server, tasks

from bridle.config import RuntimeSpec
from bridle.errors import ServerError
from bridle.training.groups import History, Name, TaskDraws, server_groups


def draws():
    return TaskDraws(tasks(), History(), seed=1)


ORDER = [draws().draw(n).task_id for n in range(12)]


async def taken(source, count):
    async with asyncio.timeout(15):
        return [await source.take() for _ in range(count)]


async def test_groups_of_a_server_have_their_index_task_and_sessions(tmp_path):
    async with a_server(tmp_path) as client, server_groups(client, draws(), training="x") as source:
        source.allow(3)
        groups = await taken(source, 3)

    assert sorted((group.index, group.task_id) for group in groups) == [*enumerate(ORDER[:3])]
    assert [len(group.sessions) for group in groups] == [2, 2, 2]
    assert {one.session_id for group in groups for one in group.sessions} == {
        f"x.{n:06d}.0.{ORDER[n]}.{sample}" for n in range(3) for sample in range(2)
    }


async def test_server_groups_start_no_more_groups_than_allowed_and_end_with_the_training(tmp_path):
    workers = Workers(capacity=64, held=True)
    async with a_server(tmp_path, workers) as client:
        async with server_groups(client, draws(), training="x") as source:
            source.allow(2)
            await until(lambda: len(workers.living) == 4)
            source.allow(1)
            await until(lambda: len(workers.living) == 6)
            assert source.cursor() == {"next": 3, "open": [[n, ORDER[n]] for n in range(3)]}
        await until(lambda: not workers.living)  # the training is over: they are ended


async def life(client, cursor, *, version=0, allow=8, take=0, keep=0, publish=None):
    """One life of a trainer that dies: takes groups, `keep` of them into a checkpoint.

    The numbers of all it took, and the cursor of its checkpoint.
    """
    found, saved = [], cursor
    try:
        async with server_groups(
            client, draws(), training="x", version=version, cursor=cursor
        ) as source:
            if publish is not None:
                await client.set_policy(version=publish)
            source.allow(allow)
            await until(lambda: len(source.cursor()["open"]) >= allow)
            for n in range(take):
                found += [group.index for group in await taken(source, 1)]
                if n + 1 == keep:
                    saved = source.cursor()
                    await source.kept()
            raise Death
    except Death:
        return found, saved


async def test_a_restarted_trainer_gets_every_group_not_in_its_checkpoint_once(tmp_path):
    """A group in a checkpoint is not given out again; every other one is."""
    async with a_server(tmp_path) as client:
        first, cursor = await life(client, {}, take=5, keep=3, publish=0)
        assert cursor["next"] == 8
        second, cursor = await life(client, cursor, allow=5, take=5, keep=5)
        third, _ = await life(client, cursor, allow=2, take=2)

    in_checkpoints = first[:3] + second
    assert sorted(in_checkpoints) == [*range(8)]
    assert sorted(third) == [8, 9]
    assert len(client.workers.ran) == len(set(client.workers.ran)) == 20


async def test_a_trainer_restarted_without_a_checkpoint_gets_finished_groups_again(tmp_path):
    async with a_server(tmp_path) as client:
        first, _ = await life(client, {}, take=2, allow=4)
        second, _ = await life(client, {}, take=4, allow=4)
        assert (sorted(second), len(first)) == ([0, 1, 2, 3], 2)
        assert Counter(client.workers.ran).most_common(1)[0][1] == 1


async def test_groups_sampled_from_weights_without_a_checkpoint_run_again(tmp_path):
    """Groups 2 and 3 end under version 1, of which there is no checkpoint."""
    async with a_server(tmp_path) as client:
        workers = client.workers
        first, cursor = await life(client, {}, take=2, keep=2, allow=2, publish=0)
        assert sorted(first) == [0, 1]
        await life(client, cursor, take=2, allow=2, publish=1)
        assert workers.version == 1
        workers.held = True
        await life(client, cursor, allow=4)  # groups 4 and 5 run when it dies
        workers.held = False

        async with server_groups(client, draws(), training="x", version=0, cursor=cursor) as source:
            await client.set_policy(version=0)
            source.allow(4)
            groups = await taken(source, 4)
        assert not workers.living

    assert sorted(group.index for group in groups) == [2, 3, 4, 5]
    assert {int(s.traces[0].versions.max()) for g in groups for s in g.sessions} == {0}
    again = {s.session_id for g in groups for s in g.sessions}
    assert again.isdisjoint({f"x.{n:06d}.0.{ORDER[n]}.0" for n in (2, 3)})


async def test_a_second_death_before_all_groups_are_read_leaves_none_of_lost_weights(tmp_path):
    """The first successor has published its older weights when it dies, and read no group."""
    async with a_server(tmp_path) as client:
        _, cursor = await life(client, {}, take=2, keep=2, allow=2, publish=0)
        await life(client, cursor, take=2, allow=2, publish=1)
        await client.set_policy(version=0)

        async with server_groups(client, draws(), training="x", version=0, cursor=cursor) as source:
            source.allow(2)
            groups = await taken(source, 2)

    assert sorted(group.index for group in groups) == [2, 3]
    assert {int(s.traces[0].versions.max()) for g in groups for s in g.sessions} == {0}


async def test_finished_groups_of_a_checkpointed_version_do_not_run_again(tmp_path):
    async with a_server(tmp_path) as client:
        _, cursor = await life(client, {}, take=4, keep=2, allow=4, publish=0)
        await client.set_policy(version=3)
        found, _ = await life(client, cursor, take=2, allow=2)
        assert len(client.workers.ran) == 8

    assert len(found) == 2


async def test_an_evaluation_of_a_dead_trainer_is_cancelled_by_its_successor(tmp_path):
    workers = Workers(capacity=64)
    async with a_server(tmp_path, workers) as client:
        async with server_groups(
            client, draws(), training="x", held_out=tasks(3, samples=1)
        ) as source:
            source.allow(1)
            found = await source.evaluate()
            await source.take()
            again = await source.evaluate()
        assert found is not None
        assert again is not None
        assert found.rewards == {f"t{n}": [1.0] for n in range(3)}
        assert found.json() == again.json()
        assert found.json() == {"reward": 1.0, "sessions": 3, "unknown": 0, "half_width": 0.0}
        tasks_there = [one async for one in client.tasks()]
        assert sorted({one["priority"] for one in tasks_there}) == [0, 100]

        workers.held = True

        async def dies_in_an_evaluation():
            async with asyncio.TaskGroup() as group:
                group.create_task(until(lambda: len(workers.living) == 3)).add_done_callback(
                    lambda _: playing.cancel()
                )
                async with server_groups(
                    client, draws(), training="x", held_out=tasks(3, samples=1)
                ) as source:
                    await source.evaluate()

        playing = asyncio.get_running_loop().create_task(dies_in_an_evaluation())
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert len(workers.living) == 3
        async with server_groups(client, draws(), training="x"):
            await until(lambda: not workers.living)


async def test_cancelled_groups_of_a_dead_trainer_are_acknowledged_when_they_have_ended(tmp_path):
    """Their sessions take a while to end, longer than the cancellation."""

    class Lingering(Workers):
        cancelled: list[str] = []  # noqa: RUF012 - of the one test

        def cancel(self, run_id):
            self.cancelled.append(run_id)
            return True

    workers = Lingering(capacity=64, held=True)
    async with a_server(tmp_path, workers) as client:
        await life(client, {}, allow=2, publish=3)
        async with server_groups(client, draws(), training="x") as source:
            await until(lambda: len(workers.cancelled) == 4)
            assert (await client.status())["groups_unacked"] == 0
            for run_id in workers.cancelled:
                Workers.cancel(workers, run_id)
            async with asyncio.timeout(15):
                while [one async for one in client.tasks() if one["acked_at"] is None]:  # noqa: ASYNC110 - the server says no more
                    await asyncio.sleep(0.01)
            assert source.cursor() == {"next": 0, "open": []}


async def test_a_trainer_takes_and_acknowledges_only_its_own_groups(tmp_path):
    async with a_server(tmp_path) as client:
        await client.submit(tasks()[0])
        await life(client, {}, allow=1, take=1, keep=1)
        async with server_groups(client, draws(), training="y") as source:
            source.allow(1)
            [group] = await taken(source, 1)
        assert group.index == 0
        states = {one["task_id"]: one["acked_at"] async for one in client.tasks()}
        assert states["t0"] is None


async def test_a_task_refused_by_the_server_raises_when_a_group_is_taken(tmp_path):
    async def taking(client):
        wrong = TaskDraws(
            [
                task.model_copy(update={"runtime": RuntimeSpec(backend="docker")})
                for task in tasks()
            ],
            History(),
            seed=1,
        )
        async with server_groups(client, wrong, training="x") as source:
            source.allow(1)
            await taken(source, 1)

    async with a_server(tmp_path) as client:
        with pytest.raises(ServerError, match="runtime"):
            await taking(client)


def test_a_group_name_is_parsed_back_and_foreign_names_give_none():
    name = Name("x", 12, 3, "a.b:c")
    assert str(name) == "x.000012.3.a.b:c"
    assert Name.of(str(name), "x") == name
    for other in ("y.000012.3.a", "x.eabc-1.t", "x.12", "x.12.3.", "x"):
        assert Name.of(other, "x") is None

"""Tests of `node.ray` that need no cluster; `tests/cluster` has the others."""

from types import SimpleNamespace

import pytest

from bridle.errors import ConfigError, NodeLostError

pytestmark = pytest.mark.ray


def test_node_folders_are_locked_per_process_and_reused_after_release(tmp_path):
    from bridle.node.ray import take_folder

    first, lock = take_folder(tmp_path)
    second, other = take_folder(tmp_path)
    assert [first.name, second.name] == ["0", "1"]
    lock.close()
    third, lock = take_folder(tmp_path)
    assert third == first
    lock.close()
    other.close()


async def test_actor_result_returns_the_value_or_raises_the_error_of_an_actor():
    from ray.exceptions import ActorUnavailableError, ObjectLostError

    from bridle.node.ray import ActorResult, actor_result

    async def answer(value):
        if isinstance(value, Exception):
            raise value
        return value

    assert await actor_result(answer(ActorResult(3))) == 3
    assert await actor_result(answer(None)) is None
    with pytest.raises(ConfigError, match="no such engine"):
        await actor_result(answer(ActorResult(error=ConfigError("no such engine"))))
    with pytest.raises(NodeLostError) as away:
        await actor_result(answer(ActorUnavailableError("it restarts", b"1" * 16)))
    with pytest.raises(NodeLostError) as gone:
        await actor_result(answer(ObjectLostError("1" * 56, None, "")))
    assert (away.value.may_return, gone.value.may_return) == (True, False)


async def test_ray_node_forwards_only_the_remote_methods():
    from bridle.node.base import REMOTE_METHODS, SessionRunner
    from bridle.node.ray import ActorResult, RayNode

    async def call(method, *given):
        return ActorResult((method, *given))

    node = RayNode("a", {}, SimpleNamespace(call=SimpleNamespace(remote=call)))
    assert await node.start("me", []) == ("start", "me", [])
    assert {"connect", "poll", "set_policy"} <= REMOTE_METHODS
    for name in ("epoch", "leave", *(vars(SessionRunner).keys() - REMOTE_METHODS)):
        assert name == "leave" or not hasattr(node, name) or name.startswith("_")

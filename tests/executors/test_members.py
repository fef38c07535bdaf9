import asyncio

import pytest
from tests.executors.house import FakeLink, task

from bridle.errors import NodeLostError
from bridle.executors.members import Link, Member, Place, Run


async def test_a_link_is_whatever_carries_the_words_of_a_host():
    link: Link = FakeLink("a")
    member = Member(link, Place(link.name))
    told = member.json()
    assert (told["name"], told["node_id"], told["state"]) == ("a", None, "opening")
    assert (told["slots"], told["free"], told["sessions"]) == (0, 0, 0)


async def test_a_run_ends_once():
    done = asyncio.get_running_loop().create_future()
    run = Run("s", task(), 0, frozenset(), (), done)
    run.finish(NodeLostError("gone"))
    run.finish(NodeLostError("gone again"))
    with pytest.raises(NodeLostError, match=r"^gone$"):
        await done

from random import Random

import pytest
from tests.prompting.talk import BASH, EDIT, call, request, result, said, system, user

from bridle.prompting.canonical import KEPT, AtomMemo, Walks, canonical
from bridle.types import Dialect

MESSAGES = [
    user("go"),
    user("on"),
    said("ok", reasoning="hm"),
    said(reasoning="hm", issued=["s"]),
    said(calls=[call("a"), call("b")]),
    said(calls=[call("c", {"path": "x", "all": False}, name="edit")]),
    result("b", "2"),
    result("a", "1"),
    result("x", "?"),
]


@pytest.mark.parametrize("head", [(), (system("be brief"),)], ids=["", "head"])
@pytest.mark.parametrize("seed", range(10))
def test_the_canonical_form_does_not_depend_on_earlier_requests(seed, head):
    """Continued, cut short, branched, with runs of results that go on: the memory never shows."""
    choose = Random(seed)
    for _ in range(20):
        memo, sent = AtomMemo(), []
        for _ in range(10):
            sent = sent[: choose.choice([None, None, None, 2, 4])]
            sent += choose.choices(MESSAGES, k=choose.choice([1, 1, 2, 3]))
            tools = choose.choice([(EDIT,), (EDIT,), (), (BASH,)])
            asked = request(*head, *sent, tools=tools, head=len(head))
            assert canonical(asked, memo) == canonical(asked, {})


def test_a_request_continues_the_longest_known_one_of_the_same_head_tools_and_dialect():
    walks = Walks()
    asked = [
        request(system(head), *[user(str(i)) for i in range(count)], dialect=dialect, head=1)
        for head, count, dialect in [
            ("one", 1, Dialect.ANTHROPIC),
            ("one", 2, Dialect.ANTHROPIC),
            ("two", 3, Dialect.ANTHROPIC),
            ("one", 3, Dialect.GOOGLE),
        ]
    ]
    made = [canonical(one, {}) for one in asked]
    for one, canon in zip(asked, made, strict=True):
        walks.remember(one, canon, instead_of=None)
    longer = request(
        system("one"), *[user(str(i)) for i in range(5)], dialect=Dialect.ANTHROPIC, head=1
    )
    tools = made[0].tools_digest
    found = walks.find(longer, tools)
    assert found is not None
    assert found.canonical is made[1]
    assert walks.find(longer, b"others") is None
    walks.remember(longer, made[0], instead_of=found)
    again = walks.find(asked[1], tools)
    assert again is not None
    assert again.canonical is made[0]


def test_only_the_last_conversations_are_remembered():
    walks = Walks()
    for number in range(KEPT + 1):
        asked = request(user(str(number)))
        walks.remember(asked, canonical(asked, {}), instead_of=None)
    tools = canonical(asked, {}).tools_digest
    assert walks.find(request(user("0")), tools) is None
    assert walks.find(request(user("1")), tools) is not None
    walks.remember(request(user("2"), spans=False), canonical(asked, {}), instead_of=None)
    assert walks.find(request(user("1")), tools) is not None

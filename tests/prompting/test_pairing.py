import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prompting.talk import call, request, result, said, user

from bridle.prompting.calls import Orphan
from bridle.prompting.canonical import AtomMemo, canonical
from bridle.types import Message, Role, TextPart


def answer(call_id=None, name=None):
    return Message(Role.TOOL, (TextPart("r"),), tool_call_id=call_id, name=name)


def orphans(*messages):
    return canonical(request(*messages), {}).pairing.orphans


def unpaired(*messages):
    return len(list(canonical(request(*messages), {}).pairing.unpaired))


IDS = st.sampled_from("abcd")
STEPS = st.lists(
    st.one_of(
        st.builds(lambda ids: said(calls=[call(i) for i in ids]), st.lists(IDS, max_size=3)),
        st.builds(answer, IDS),
        st.just(user("go on")),
    ),
    max_size=10,
)


@given(STEPS)
def test_a_result_is_an_orphan_if_no_earlier_call_has_its_id(messages):
    expected = [
        message.tool_call_id
        for place, message in enumerate(messages)
        if message.role is Role.TOOL
        and not any(c.id == message.tool_call_id for m in messages[:place] for c in m.tool_calls)
    ]
    assert sorted(o.call_id or "" for o in orphans(*messages)) == sorted(expected)


@given(st.lists(st.tuples(STEPS, st.integers(0, 10)), max_size=5))
def test_orphans_do_not_depend_on_earlier_requests(requests):
    memo, sent = AtomMemo(), []
    for more, keep in requests:
        sent = [*sent[:keep], *more]
        known = canonical(request(*sent), memo).pairing
        assert known == canonical(request(*sent), {}).pairing


@given(st.lists(IDS, unique=True, min_size=1), st.data())
def test_without_its_call_a_result_is_an_orphan_and_without_its_result_a_call_is_served(ids, data):
    turns = [said(calls=[call(i)]) for i in ids]
    results = data.draw(st.permutations([answer(i) for i in ids]))
    assert orphans(*turns, user("hm"), *results) == []
    assert orphans(*turns[1:], *results) == [Orphan(ids[0], None)]
    assert (orphans(*turns, *results[1:]), unpaired(*turns, *results[1:])) == ([], 1)
    assert orphans(*results, *turns) == [Orphan(r.tool_call_id, None) for r in results]


def test_a_result_without_an_id_is_matched_by_its_name():
    asked = said(calls=[call("1", name="look"), call("2", name="say")])
    assert orphans(asked, answer(name="say"), answer(name="look")) == []
    assert orphans(asked, answer(name="say"), answer(name="say")) == []
    assert orphans(asked, answer(name="look"), answer(name="say"), answer(name="run")) == [
        Orphan(None, "run")
    ]
    assert unpaired(asked, answer(name="say")) == 1
    assert orphans(user("go"), answer(name="look")) == [Orphan(None, "look")]


def test_a_result_under_another_name_answers_the_first_call_that_has_none():
    asked = said(calls=[call("1", name="look"), call(None, name="say")])
    results = answer(name="look"), answer(name="server:say")
    assert (orphans(asked, *results), unpaired(asked, *results)) == ([], 0)
    assert orphans(asked, *results, answer(name="server:say")) == [Orphan(None, "server:say")]


def test_a_result_without_id_and_name_is_matched_by_order():
    asked = said(calls=[call(""), call(None)])
    assert (orphans(asked, answer(""), answer()), unpaired(asked, answer(""), answer())) == ([], 0)
    assert orphans(answer(), asked) == [Orphan(None, None)]
    assert unpaired(asked, answer()) == 1


def test_a_result_with_an_id_may_answer_a_call_that_came_back_without_one():
    asked = said(calls=[call(None, name="look"), call("2", name="say")])
    assert orphans(asked, answer("1", "look")) == []
    assert orphans(asked, answer("1", "say")) == [Orphan("1", "say")]


@pytest.mark.timeout(60)
def test_thousands_of_calls_without_ids_are_matched_in_linear_time():
    many = range(20_000)
    calls = [said(calls=[call(None, name=f"tool{number % 3}")]) for number in many]
    assert orphans(*calls, *(answer(name=f"tool{number % 3}") for number in many)) == []


def test_a_result_may_name_its_call_s_item_id():
    turn = Message(Role.ASSISTANT, tool_calls=(call("call_1"),), issued_ids=("fc_1",))
    assert orphans(turn, answer("fc_1")) == []


def test_results_need_not_stand_beside_their_calls():
    assert orphans(said(calls=[call("a")]), user("wait"), said("yes"), answer("a")) == []
    assert orphans(said(calls=[call("a")]), result("a", "1"), result("a", "2")) == []

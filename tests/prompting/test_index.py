"""An exchange is found by what a client can have seen of it, and by nothing else."""

from tests.prompting.talk import call, request, said, user

from bridle.prompting.canonical import answer_atoms, canonical
from bridle.prompting.index import Index, id_key
from bridle.types import DeliveryState

ASKED = canonical(request(user("u")), {})
TURN = said("text", calls=[call("call_1")], reasoning="hm", issued=["sig-_a="])
ANSWERED = canonical(request(user("u"), TURN), {})


def committed():
    index = Index()
    index.commit("x", ASKED, answer_atoms((TURN,), ()), ["call_1", "sig-_a="])
    return index


def test_an_exchange_in_flight_is_found_by_its_prompt_only():
    index = Index()
    index.begin("x", ASKED)
    (found,) = index.prompts_at(ASKED.chain[-1])
    assert (found.exchange_id, found.committed, found.usable) == ("x", False, False)
    assert index.turns_at(ANSWERED.chain[-1]) == []
    index.forget("x")
    index.forget("x")
    assert index.prompts_at(ASKED.chain[-1]) == []


def test_a_committed_exchange_is_found_by_its_turn_its_prompt_and_its_ids():
    index = committed()
    (found,) = index.turns_at(ANSWERED.chain[-1])
    assert index.prompts_at(ASKED.chain[-1]) == [found]
    assert index.owner_of("call_1") is found
    assert index.owner_of("call_2") is None
    assert len(found.reasoning) == 1
    assert found.usable


def test_base64_is_the_same_id_in_both_alphabets_and_without_padding():
    assert committed().owner_of("sig+/a") is not None
    assert id_key("ab-_") == id_key("ab+/==")


def test_an_answer_without_atoms_is_no_turn():
    index = Index()
    index.commit("x", ASKED, answer_atoms((said(reasoning="hm", issued=["r"]),), ()), ["r"])
    assert index.turns_at(ASKED.chain[-1]) == []
    owner = index.owner_of("r")
    assert owner is not None
    assert owner.answer == ()


def test_a_cut_reply_is_found_by_what_was_delivered_of_it():
    index = committed()
    index.mark("x", DeliveryState.CUT, delivered=answer_atoms((said("te"),), ()))
    assert index.turns_at(ANSWERED.chain[-1]) == []
    partly = canonical(request(user("u"), said("te")), {})
    assert len(index.turns_at(partly.chain[-1])) == 1
    index.mark("x", DeliveryState.CUT, delivered=())
    assert index.turns_at(partly.chain[-1]) == []
    index.mark("x", DeliveryState.DELIVERED)
    assert len(index.turns_at(ANSWERED.chain[-1])) == 1


def test_a_cut_reply_of_unknown_extent_and_an_abandoned_one_stay_findable():
    index = committed()
    index.mark("x", DeliveryState.CUT)
    assert index.turns_at(ANSWERED.chain[-1])[0].usable
    index.mark("x", DeliveryState.ABANDONED)
    assert not index.turns_at(ANSWERED.chain[-1])[0].usable


def test_marking_unknown_or_running_exchanges_changes_nothing():
    index = Index()
    index.mark("nobody", DeliveryState.DELIVERED)
    index.begin("x", ASKED)
    index.mark("x", DeliveryState.CUT)
    assert index.prompts_at(ASKED.chain[-1])[0].state is None


def test_forgetting_one_of_two_equal_prompts_keeps_the_other():
    index = committed()
    index.begin("y", ASKED)
    index.forget("y")
    assert [found.exchange_id for found in index.prompts_at(ASKED.chain[-1])] == ["x"]

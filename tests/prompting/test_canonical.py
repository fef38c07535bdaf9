"""Keys hold all that the model must see, and nothing that harnesses change without meaning."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prompting.talk import BASH, EDIT, call, image, request, result, said, system, user

from bridle.prompting.calls import Pairing
from bridle.prompting.canonical import (
    NO_TOOLS,
    SEEDS,
    AtomKind,
    AtomMemo,
    answer_atoms,
    canonical,
    chain_after,
    messages_after,
    results_in_call_order,
    tools_digest,
)
from bridle.types import Dialect, ToolSpec


def key(*messages, **more):
    return canonical(request(*messages, **more), {}).chain[-1]


def kinds(*messages):
    return "".join(atom.kind.value for atom in canonical(request(*messages), {}).atoms)


# ---- atoms


def test_each_thing_that_the_model_sees_is_an_atom_in_its_place():
    assert (
        kinds(
            system("s"),
            user("a", image("1"), "b"),
            said("t", calls=[call("1"), call("2")]),
            result("1", "r"),
            result("2"),
            system("m"),
            user(image("2", "application/json")),
            said("drawn", image("3"), "here"),
        )
        == "SUIUACCTTSXAIA"
    )


def test_the_chain_begins_with_the_dialect_and_covers_every_atom():
    whole = canonical(request(system("s"), user("u")), {})
    assert whole.chain[0] == SEEDS[Dialect.OPENAI_CHAT]
    assert len(whole.chain) == len(whole.atoms) + 1
    assert chain_after(whole.chain[1], whole.atoms[1:]) == whole.chain[-1]
    assert key(user("u"), dialect=Dialect.ANTHROPIC) != key(user("u"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([user("ab", "c")], [user("abc")]),
        ([user("go", "")], [user("go")]),
        ([user("a"), user()], [user("a")]),
        ([system("a", "b")], [system("ab")]),
        ([result("1", "a", "b")], [result("2", "ab")]),
        ([result("1", "x", name="n")], [result("1", "x")]),
        ([said("t", calls=[call("1")])], [said("", "t", calls=[call("2")])]),
        ([said("t", calls=[call("1")])], [said("t"), said(calls=[call(None)])]),
        ([said(" ok \n")], [said("ok")]),
        ([said(" \n", calls=[call("1")])], [said(calls=[call("1")])]),
        ([said("ok", reasoning="hm")], [said("ok", issued=["sig"])]),
        ([said(reasoning="hm"), said("ok")], [said("ok")]),
        ([said(calls=[call("1", '{"a": 1}')])], [said(calls=[call("1", '{"a":1.0}')])]),
        ([user(image("d"))], [user(image("d"))]),
    ],
)
def test_equivalent_messages_have_one_key(one, other):
    assert key(*one) == key(*other)


@pytest.mark.parametrize(
    "distinct",
    [
        [[user("ab")], [user("a"), user("b")], [user("ab ")], [user("AB")], [system("ab")]],
        [[user("a"), said("b")], [said("b"), user("a")], [user("a"), user("b")]],
        [[user(image("1"))], [user(image("2"))], [user(image("1", "image/jpeg"))], [user("1")]],
        [[user("a", image("1"))], [user(image("1"), "a")]],
        [[result("1", "a")], [result("1", "a ")], [result("1", image("a"))], [result("1")], []],
        [
            [said(calls=[call("1", "{}", name="bash")])],
            [said(calls=[call("1", "{}", name="Bash")])],
            [said(calls=[call("1", '{"a":1}')])],
            [said(calls=[call("1", "{}", custom=True)])],
            [said("bash")],
        ],
        [
            [said(calls=[call("1", "{}"), call("2", '{"b":1}')])],
            [said(calls=[call("1", '{"b":1}'), call("2", "{}")])],
        ],
    ],
)
def test_different_messages_have_different_keys(distinct):
    assert len({key(*messages) for messages in distinct}) == len(distinct)


def test_text_with_separator_bytes_does_not_collide_with_other_messages():
    assert key(user("a\x00S"), user("b")) != key(user("a"), user("S\x00b"))


def test_lone_surrogates_are_hashed_like_any_text():
    assert key(user("\ud800")) != key(user("\ud801"))


def test_results_of_google_are_compared_by_value_and_others_by_text():
    one, other = [result("1", '{"a": 1}')], [result("1", '{"a":1.0}')]
    assert key(*one, dialect=Dialect.GOOGLE) == key(*other, dialect=Dialect.GOOGLE)
    assert key(*one) != key(*other)
    plain = [result("1", "[1]")]
    assert key(*plain, dialect=Dialect.GOOGLE) != key(*one, dialect=Dialect.GOOGLE)


def test_custom_calls_are_compared_by_their_input_text():
    assert key(said(calls=[call("1", "{ }", custom=True)])) != key(
        said(calls=[call("1", "{}", custom=True)])
    )


# ---- results in call order


CALLS = said(calls=[call("a", '{"n":1}'), call("b", '{"n":2}'), call("c", '{"n":3}')])


def test_results_in_order_of_completion_have_the_key_of_call_order():
    ordered = [CALLS, result("a", "1"), result("b", "2"), result("c", "3")]
    shuffled = [CALLS, ordered[3], ordered[1], ordered[2]]
    assert key(*shuffled) == key(*ordered)
    assert results_in_call_order(shuffled) == results_in_call_order(ordered)
    assert [m.text for m in results_in_call_order(shuffled)[1:]] == ["1", "2", "3"]
    seen = canonical(request(*shuffled), {})
    assert seen.message_of == (0, 0, 0, 2, 3, 1)


def test_results_whose_ids_are_not_all_known_stay_as_they_came():
    shuffled = [CALLS, result("c", "3"), result("x", "?"), result("a", "1")]
    assert [m.text for m in results_in_call_order(shuffled)[1:]] == ["3", "?", "1"]
    assert key(*shuffled) != key(CALLS, result("a", "1"), result("x", "?"), result("c", "3"))
    unnamed = [CALLS, result(None, "2"), result(None, "1")]
    assert results_in_call_order(unnamed) == tuple(unnamed)


def test_results_that_repeat_a_call_id_are_not_reordered():
    twice = [CALLS, result("b", "2"), result("b", "2"), result("a", "1")]
    assert [m.text for m in results_in_call_order(twice)[1:]] == ["2", "2", "1"]
    assert canonical(request(*twice), {}).message_of == (0, 0, 0, 1, 2, 3)


def test_a_result_without_a_name_gets_that_of_its_call():
    messages = [CALLS, result("c", "3"), result("x", "?"), result("a", "1", name="own"), user("u")]
    named = [(m.text, m.name) for m in results_in_call_order(messages)[1:]]
    assert named == [("3", "bash"), ("?", None), ("1", "own"), ("u", None)]


def test_each_run_of_results_is_ordered_by_its_own_calls():
    again = said(calls=[call("a", '{"n":9}'), call("b")])
    messages = [
        CALLS,
        result("b", "2"),
        result("a", "1"),
        again,
        result("b", "4"),
        result("a", "3"),
    ]
    ordered = results_in_call_order(messages)
    assert [m.text for m in ordered if m.tool_call_id] == ["1", "2", "3", "4"]


def test_the_messages_after_an_answer_come_in_the_order_of_its_calls():
    messages = (user("u"), CALLS, result("b", "2"), result("a", "1"), user("v"))
    assert [m.text for m in messages_after(messages, 2)] == ["1", "2", "v"]
    assert messages_after(messages, 5) == ()
    assert messages_after(messages, 0)[:2] == messages[:2]


# ---- evidence


def test_call_ids_and_reasoning_are_kept_beside_the_hashed_atoms():
    seen = canonical(
        request(user("u"), said("t", reasoning=" hm\n", issued=["sig"], calls=[call("id")])), {}
    )
    assert [atom.ids for atom in seen.atoms] == [(), (), ("id",)]
    (hint,) = seen.hints
    assert (hint.position, hint.message, hint.ids) == (1, 1, ("sig",))
    again = canonical(request(user("u"), said("t", reasoning="hm")), {}).hints[0]
    assert again.reasoning == hint.reasoning


def test_a_reasoning_only_turn_leaves_a_hint_at_its_position():
    seen = canonical(request(user("u"), said(reasoning="hm", issued=["r"]), user("v")), {})
    assert kinds(user("u"), said(reasoning="hm", issued=["r"]), user("v")) == "UU"
    assert [(hint.position, hint.ids) for hint in seen.hints] == [(1, ("r",))]


# ---- spans, memo, tools


def test_the_canonical_form_is_the_same_with_and_without_byte_spans():
    messages = [
        system("s"),
        user("u"),
        said("t", reasoning="r", calls=[call("1")]),
        result("1", "x"),
    ]
    plain = canonical(request(*messages, spans=False), {})
    assert canonical(request(*messages, head=1), {}) == plain
    several = request(*messages, head=1)
    several = replace(
        several, span_digests=several.span_digests[:2], span_lengths=(1, 2), head_messages=1
    )
    assert canonical(several, {}) == plain


def test_a_known_span_is_not_normalised_again():
    memo = AtomMemo()
    first = canonical(request(user("u"), said("t", calls=[call("1")])), memo)
    altered = replace(
        request(user("u"), said("t", calls=[call("1")]), user("v")),
        messages=(user("never read"), said("never read"), user("v")),
    )
    second = canonical(altered, memo)
    assert second.atoms[:3] == first.atoms
    assert second.chain[:4] == first.chain
    assert canonical(altered, dict(memo)) == second


def test_a_schema_default_applies_only_under_the_tools_that_declare_it():
    memo = AtomMemo()
    echoed = said(calls=[call("1", {"path": "p", "all": False}, name="edit")])
    bare = said(calls=[call("1", {"path": "p"}, name="edit")])

    def under(message, *tools):
        return canonical(request(message, tools=tools), memo).chain[-1]

    assert under(echoed, EDIT) == under(bare, EDIT)
    assert under(echoed) != under(bare)
    changed = ToolSpec("edit", "Edit.", {"properties": {"path": {}, "all": {"default": True}}})
    assert under(echoed, changed) != under(bare, changed)
    assert answer_atoms((bare,), (EDIT,))[0].digest == answer_atoms((echoed,), (EDIT,))[0].digest


def test_the_tools_digest_is_their_order_names_descriptions_and_schemas():
    assert tools_digest(()) == NO_TOOLS
    different = [
        (BASH,),
        (EDIT,),
        (BASH, EDIT),
        (EDIT, BASH),
        (replace(BASH, name="b"),),
        (replace(BASH, description=None),),
        (replace(BASH, parameters=None),),
    ]
    assert len({tools_digest(tools) for tools in different}) == len(different)
    assert tools_digest([replace(BASH, strict=True)]) == tools_digest([BASH])


def test_sessions_with_one_tool_list_share_its_digest():
    asked = request(user("hi"), tools=(replace(BASH), EDIT))
    first, second = (canonical(asked, AtomMemo()).tools_digest for _ in range(2))
    assert first is second, "it was computed once"
    other = canonical(request(user("hi"), tools=(replace(BASH), EDIT)), AtomMemo())
    assert other.tools_digest == first


def test_the_tools_digest_is_computed_once_per_raw_list():
    memo = AtomMemo()
    asked = request(user("u"), tools=(BASH,))
    first = canonical(asked, memo).tools_digest
    assert canonical(replace(asked, tools=(EDIT,)), memo).tools_digest == first
    unnamed = canonical(replace(asked, tools=(EDIT,), tools_span=None), memo)
    assert unnamed.tools_digest == tools_digest((EDIT,))


def test_tools_and_sampling_are_not_in_the_chain():
    assert key(user("u"), tools=(BASH,)) == key(user("u"))


def test_the_beginning_of_a_request_has_the_atoms_and_the_chain_of_a_request_of_its_own():
    messages = [system("s"), user("a", image("1"))]
    ends = [2]
    for turn in range(3):
        calls = [call(f"{turn}a"), call(f"{turn}b")]
        messages += [said("t", calls=calls, reasoning="hm"), result(f"{turn}b"), result(f"{turn}a")]
        ends.append(len(messages))
        messages += [said("done", issued=["id"]), user("go", "on")]
        ends.append(len(messages))
    whole = canonical(request(*messages), {})
    for end in ends:
        own = canonical(request(*messages[:end]), {})
        assert whole.until(end) == replace(own, pairing=Pairing())


# ---- laws


roles = st.sampled_from(["user", "system", "said", "result"])
texts = st.text(max_size=4)


@st.composite
def conversations(draw):
    make = {
        "user": user,
        "system": system,
        "said": lambda text: said(text, calls=[call("i", text)] * draw(st.integers(0, 2))),
        "result": lambda text: result(draw(st.sampled_from(["i", "j", None])), text),
    }
    return [make[draw(roles)](draw(texts)) for _ in range(draw(st.integers(0, 8)))]


@given(conversations(), st.integers(0, 8))
def test_the_canonical_form_is_the_same_with_and_without_the_memo(messages, seen):
    memo = AtomMemo()
    canonical(request(*messages[:seen]), memo)
    assert canonical(request(*messages), memo) == canonical(request(*messages, spans=False), {})


@given(conversations(), conversations())
def test_a_longer_history_extends_the_chain_of_the_shorter(messages, more):
    short = canonical(request(*messages, user("x")), {})
    long = canonical(request(*messages, user("x"), *more), {})
    assert long.chain[: len(short.chain)] == short.chain


@given(conversations())
def test_an_answer_has_the_same_atoms_as_its_echo_in_a_request(messages):
    turn = [message for message in messages if message.role.value == "assistant"]
    echoed = canonical(request(*turn), {})
    answered = [a for a in answer_atoms(turn, ()) if a.kind is not AtomKind.EVIDENCE]
    assert [atom.digest for atom in answered] == [atom.digest for atom in echoed.atoms]

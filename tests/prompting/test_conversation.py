"""A request finds what it continues: the edge cases of the matching document, each as one truth.

Longer than other files: the document's list of cases stands here whole.
"""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prompting.talk import BASH, EDIT, Talk, call, request, result, said, system, user

from bridle.prompting.canonical import answer_atoms
from bridle.prompting.conversation import PlacementKind, _Search
from bridle.types import DeliveryState, Dialect, ToolSpec

ROOT, CHILD, REWRITTEN = PlacementKind.ROOT, PlacementKind.CHILD, PlacementKind.REWRITTEN
PARTIAL, FORK = PlacementKind.PARTIAL, PlacementKind.FORK

TASK = (system("s"), user("do it"))
TURN = said("I look.", calls=[call("call_1", {"command": "ls"})])
SEEN = result("call_1", "a.txt")


@pytest.fixture
def talk():
    """A session with one exchange `a`: the task, answered by a call."""
    made = Talk()
    made.exchange("a", TASK, TURN)
    return made


def is_fork(placement, parent, reason):
    assert (placement.kind, placement.parent) == (FORK, parent)
    assert placement.reason == reason
    return True


# ---- plain growth


def test_the_first_request_is_a_root():
    placement = Talk().place(*TASK)
    assert (placement.kind, placement.parent, placement.reason) == (ROOT, None, "first")
    assert not placement.extend


def test_a_continuation_is_a_child_and_its_new_messages_come_after_the_answer(talk):
    placement = talk.place(*TASK, TURN, SEEN)
    assert (placement.kind, placement.parent) == (CHILD, "a")
    assert (placement.extend, placement.reason, placement.drift) == (True, None, None)
    assert placement.new_from == 3


@pytest.mark.parametrize(
    "echo",
    [
        said("I look.\n", calls=[call("call_1", '{ "command":"ls" }')]),
        said("I ", "look.", calls=TURN.tool_calls, reasoning="echoed"),
    ],
)
def test_an_echo_in_another_form_is_the_same_turn(talk, echo):
    assert talk.place(*TASK, echo, SEEN).extend


def test_a_turn_in_several_items_is_the_same_turn(talk):
    placement = talk.place(
        *TASK, said(reasoning="r"), said("I look."), said(calls=TURN.tool_calls), said(""), SEEN
    )
    assert (placement.kind, placement.new_from) == (CHILD, 6)


def test_a_chain_of_children_reaches_back_exchange_by_exchange(talk):
    second = said("done")
    talk.exchange("b", (*TASK, TURN, SEEN), second)
    placement = talk.place(*TASK, TURN, SEEN, second, user("more"))
    assert (placement.parent, placement.new_from) == ("b", 5)


def test_a_request_in_another_dialect_is_never_a_child(talk):
    other = Talk(Dialect.ANTHROPIC)
    other.conversation = talk.conversation
    assert other.place(*TASK, TURN, SEEN).kind is FORK
    assert Talk(Dialect.ANTHROPIC).place(*TASK, TURN, SEEN).kind is ROOT


# ---- 1 to 20 of the document


def test_1_a_request_may_end_with_an_assistant_turn(talk):
    placement = talk.place(*TASK, TURN)
    assert (placement.kind, placement.parent, placement.new_from) == (CHILD, "a", 3)
    prefill = talk.place(*TASK, said("Sure, "))
    assert (prefill.kind, prefill.reason) == (ROOT, "foreign")


BEGUN = said("Two and two")


@pytest.mark.parametrize(
    ("text", "calls"), [(" is 4.", ()), (" is", TURN.tool_calls), ("", TURN.tool_calls)]
)
@pytest.mark.parametrize("issued", [(), ("sig",)])
def test_a_turn_that_comes_back_in_one_piece_with_its_prefill_is_the_same_turn(calls, text, issued):
    talk = Talk(Dialect.ANTHROPIC)
    answer = said(text, calls=calls, issued=issued)
    talk.exchange("p", (*TASK, BEGUN), answer, begun="Two and two")
    after = SEEN if calls else user("on")
    for turn in ((said(f"Two and two{text}", calls=calls),), (BEGUN, answer)):
        placement = talk.place(*TASK, *turn, after)
        assert (placement.kind, placement.parent, placement.drift) == (CHILD, "p", None)
        assert placement.extend
        assert placement.new_from == len(TASK) + len(turn)


def test_a_turn_that_differs_from_its_prefill_plus_reply_is_no_child():
    talk = Talk(Dialect.ANTHROPIC)
    talk.exchange("p", (*TASK, BEGUN), said(" is 4."), begun="Two and two")
    for text in ("Two and twois 4.", "Two and two is", "Two and two  is 4."):
        placement = talk.place(*TASK, said(text), user("on"))
        assert (placement.kind, placement.reason) == (ROOT, "foreign")
    assert is_fork(talk.place(*TASK, said("is 4."), user("on")), "p", "history_changed")
    # Of a reply that was cut only what was written can come back.
    talk.conversation.mark("p", DeliveryState.CUT, delivered=answer_atoms((said(" is"),), ()))
    assert talk.place(*TASK, said("Two and two is 4."), user("on")).kind is ROOT


def test_a_prefill_with_an_empty_reply_is_a_repeated_root():
    talk = Talk(Dialect.ANTHROPIC)
    talk.exchange("p", (*TASK, BEGUN), said(""), begun="Two and two")
    placement = talk.place(*TASK, BEGUN)
    assert (placement.kind, placement.repeats) == (ROOT, ("p",))


def test_2_equal_visible_answers_are_distinguished_by_reasoning():
    talk = Talk()
    for name, thought in (("a", "left"), ("b", "right"), ("c", "left again")):
        talk.exchange(name, TASK, said("ok", reasoning=thought))
    placement = talk.place(*TASK, said("ok", reasoning=" right\n"), user("go"))
    assert (placement.parent, placement.tie) == ("b", "reasoning")


def test_2_equal_visible_answers_are_distinguished_by_the_ids_of_their_calls():
    talk = Talk()
    for name in ("a", "b", "c"):
        talk.exchange(name, TASK, said(calls=[call(f"call_{name}")]))
    placement = talk.place(*TASK, said(calls=[call("call_b")]), result("call_b", "x"))
    assert (placement.parent, placement.tie, placement.extend) == ("b", "id", True)


def test_2_equal_visible_answers_are_distinguished_by_their_signatures():
    talk = Talk(Dialect.GOOGLE)
    for name in ("a", "b"):
        talk.exchange(name, TASK, said("ok", issued=[f"sig-{name}=="]))
    placement = talk.place(*TASK, said("ok", issued=["sig+a"]), user("go"))
    assert (placement.parent, placement.tie) == ("a", "id")


def test_3_identical_live_requests_repeat_each_other_and_continue_nothing():
    talk = Talk()
    talk.begin("a", *TASK)
    talk.begin("b", *TASK)
    placement = talk.place(*TASK)
    assert (placement.kind, placement.repeats) == (ROOT, ("a", "b"))
    talk.conversation.forget("a")
    assert talk.place(*TASK).repeats == ("b",)


def test_4_a_child_is_found_from_the_moment_its_parent_is_indexed():
    talk = Talk()
    talk.begin("a", *TASK)
    assert talk.place(*TASK, TURN, SEEN).reason == "foreign"
    talk.commit("a", TASK, TURN, state=None)
    assert talk.place(*TASK, TURN, SEEN).parent == "a"


def test_5_of_an_aborted_exchange_only_the_delivered_part_is_found_as_a_parent():
    talk = Talk()
    whole = said("I look.", calls=[call("call_1"), call("call_2")])
    talk.exchange("a", TASK, whole)
    kept = said("I look.", calls=[call("call_1")])
    talk.conversation.mark("a", DeliveryState.CUT, delivered=answer_atoms((kept,), ()))
    placement = talk.place(*TASK, kept, user("go on"))
    assert (placement.kind, placement.parent, placement.reason) == (PARTIAL, "a", "partial")
    assert not placement.extend
    shown = talk.place(*TASK, whole, result("call_1", "x"), result("call_2", "y"))
    assert (shown.kind, shown.parent) == (CHILD, "a")


def test_5_a_cut_turn_kept_in_part_is_known_without_ids_by_its_beginning():
    talk = Talk()
    talk.exchange("a", TASK, said("I look at the files"), state="cut")
    placement = talk.place(*TASK, said("I look at"), user("go on"))
    assert (placement.kind, placement.parent, placement.drift) == (PARTIAL, "a", "partial")


def test_5_text_of_a_cut_turn_joined_to_calls_of_the_next_is_a_fork():
    talk = Talk()
    cut = said("I look.", calls=[call("call_1")])
    talk.exchange("a", TASK, cut, state="cut")
    second = said(calls=[call("call_2")])
    talk.exchange("b", (*TASK, said("I look."), user("go on")), second)
    joined = said("I look.", calls=[call("call_2")])
    assert is_fork(talk.place(*TASK, joined, result("call_2", "x")), "b", "history_changed")


def test_5_completed_items_of_a_cut_turn_stay_beside_the_next_turn_and_match_exactly():
    talk = Talk(Dialect.OPENAI_RESPONSES)
    cut = (said("One", issued=["msg_1"]), said(calls=[call("fc_1")]))
    talk.exchange("a", TASK, cut)
    talk.conversation.mark("a", DeliveryState.CUT, delivered=answer_atoms(cut[:1], ()))
    again = talk.place(*TASK, cut[0])
    assert (again.kind, again.parent) == (PARTIAL, "a")
    second = said("Two", calls=[call("fc_2")])
    talk.exchange("b", (*TASK, cut[0]), second)
    placement = talk.place(*TASK, cut[0], second, result("fc_2", "x"))
    assert (placement.kind, placement.parent, placement.extend) == (CHILD, "b", True)


def test_6_an_answer_of_reasoning_only_is_found_by_its_id():
    talk = Talk(Dialect.OPENAI_RESPONSES)
    silent = said(reasoning="hm", issued=["rs_1"])
    talk.exchange("a", TASK, silent)
    placement = talk.place(*TASK, silent, user("well?"))
    assert (placement.kind, placement.parent, placement.new_from) == (CHILD, "a", 3)
    changed = talk.place(system("other"), *TASK[1:], silent, user("well?"))
    assert is_fork(changed, "a", "history_changed")
    assert talk.place(*TASK, said(issued=["unknown"]), user("well?")).kind is ROOT


@pytest.mark.parametrize("echo", [said(reasoning="hm"), said(reasoning=" hm\n"), said("")])
def test_6_an_answer_of_reasoning_only_is_proved_by_its_reasoning_or_its_place(echo):
    talk = Talk()
    talk.exchange("a", TASK, said(reasoning="hm"))
    placement = talk.place(*TASK, echo, user("well?"))
    assert (placement.kind, placement.parent, placement.new_from) == (CHILD, "a", 3)
    assert talk.place(*TASK, said(reasoning="other"), user("well?")).kind is ROOT


def test_6_reasoning_beside_a_visible_turn_is_not_taken_for_a_silent_one(talk):
    placement = talk.place(*TASK, said("I look.", calls=TURN.tool_calls, issued=["x"]), SEEN)
    assert (placement.kind, placement.parent) == (CHILD, "a")
    trailing = talk.place(*TASK, TURN, SEEN, said(issued=["call_1"]), user("x"))
    assert (trailing.kind, trailing.parent) == (CHILD, "a")


def test_7_a_foreign_id_in_our_form_proves_nothing(talk):
    turn = said("Other.", calls=[call("call_9")])
    placement = talk.place(*TASK, turn, result("call_9", "x"))
    assert (placement.kind, placement.reason) == (ROOT, "foreign")


def test_8_a_copied_call_id_needs_the_equal_prompt(talk):
    memory = (system("remember"), user("log"), TURN, SEEN, user("sum up"))
    assert is_fork(talk.place(*memory), "a", "history_changed")
    assert not talk.place(*memory).extend


def test_9_results_in_order_of_completion_continue_the_turn_of_the_calls():
    talk = Talk()
    turn = said(calls=[call("c1", {"n": 1}), call("c2", {"n": 2})])
    talk.exchange("a", TASK, turn)
    shuffled = (*TASK, turn, result("c2", "2"), result("c1", "1"))
    assert talk.place(*shuffled).extend
    talk.exchange("b", shuffled, said("done"))
    ordered = (*TASK, turn, result("c1", "1"), result("c2", "2"), said("done"), user("more"))
    assert talk.place(*ordered).parent == "b"
    unknown = (*TASK, turn, result("c2", "2"), result("zz", "1"))
    talk.exchange("c", unknown, said("odd"))
    assert talk.place(*unknown, said("odd"), user("more")).parent == "c"


@pytest.mark.parametrize("arguments", ['{"a": ', "", "null", "[" * 3000, '{"a":NaN}', '"\\ud800"'])
def test_10_odd_arguments_that_come_back_as_they_were_are_a_plain_child(arguments):
    talk = Talk()
    turn = said(calls=[call("call_1", arguments)])
    talk.exchange("a", TASK, turn)
    assert talk.place(*TASK, turn, SEEN).extend


def test_11_arguments_match_across_number_spellings_but_not_across_types():
    for other, extends in (("1.0", True), ("true", False), ('"1"', False), ("null", False)):
        talk = Talk()
        talk.exchange("a", TASK, said(calls=[call("call_1", '{"n":1}')]))
        placement = talk.place(*TASK, said(calls=[call("call_1", f'{{"n":{other}}}')]), SEEN)
        assert (placement.kind is CHILD) is extends, other
        assert placement.drift == (None if extends else "edited_args")


def test_12_text_in_parts_is_one_text_but_two_messages_are_two():
    talk = Talk()
    talk.exchange("a", (user("ab", "c"),), said("x"))
    assert talk.place(user("abc"), said("x"), user("y")).kind is CHILD
    two = talk.place(user("ab"), user("c"), said("x"), user("y"))
    assert is_fork(two, "a", "history_changed")


def test_13_a_schema_default_is_no_change_and_another_value_is():
    talk = Talk()
    tools = (EDIT,)
    turn = said(calls=[call("call_1", {"path": "p"}, name="edit")])
    talk.exchange("a", TASK, turn, tools=tools)
    echoed = said(calls=[call("call_1", {"path": "p", "all": False}, name="edit")])
    assert talk.place(*TASK, echoed, SEEN, tools=tools).drift is None
    other = said(calls=[call("call_1", {"path": "p", "all": True}, name="edit")])
    assert talk.place(*TASK, other, SEEN, tools=tools).drift in {"edited_args", "normalised_args"}


def test_arguments_that_validation_coerced_extend():
    talk = Talk()
    tools = (ToolSpec("add", None, {"properties": {"n": {"type": "integer"}}}),)
    talk.exchange("a", TASK, said(calls=[call("call_1", {"n": "5"}, name="add")]), tools=tools)
    echoed = said(calls=[call("call_1", {"n": 5}, name="add")])
    placement = talk.place(*TASK, echoed, SEEN, tools=tools)
    assert (placement.drift, placement.extend) == ("normalised_args", True)


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ((BASH, EDIT), None),
        ((EDIT, BASH), "tools_changed"),
        ((BASH,), "tools_changed"),
        ((), "tools_removed"),
    ],
)
def test_14_other_tools_continue_the_messages_but_not_the_ids(tools, reason):
    talk = Talk()
    talk.exchange("a", TASK, TURN, tools=(BASH, EDIT))
    placement = talk.place(*TASK, TURN, SEEN, tools=tools)
    assert (placement.kind, placement.parent, placement.reason) == (CHILD, "a", reason)
    assert placement.extend is (reason is None)


def test_15_a_masked_old_result_forks_from_the_turn_it_shows(talk):
    second = said(calls=[call("call_2")])
    talk.exchange("b", (*TASK, TURN, SEEN), second)
    masked = (*TASK, TURN, result("call_1", "[masked]"), second, result("call_2", "x"))
    assert is_fork(talk.place(*masked), "b", "history_changed")
    third = said(calls=[call("call_3")])
    talk.exchange("c", masked, third)
    assert talk.place(*masked, third, result("call_3", "y")).extend


def test_16_after_a_dropped_turn_the_earlier_exchange_is_extended(talk):
    talk.exchange("b", (*TASK, TURN, SEEN), said("does not parse"))
    placement = talk.place(*TASK, TURN, SEEN, user("format error"))
    assert (placement.kind, placement.parent) == (CHILD, "a")


def test_17_few_shot_turns_before_the_first_exchange_are_part_of_its_prompt():
    talk = Talk()
    shots = (system("s"), user("q"), said("shot"), user("do it"))
    placement = talk.place(*shots)
    assert (placement.kind, placement.reason) == (ROOT, "foreign")
    talk.exchange("a", shots, TURN)
    assert talk.place(*shots, TURN, SEEN).extend


def test_18_a_cache_mark_that_moved_changes_the_span_but_not_the_turn(talk):
    marked = (system("", "s"), user("do it", ""))
    assert talk.place(*marked, TURN, SEEN).extend


def test_a_summary_request_with_a_handwritten_last_turn_forks_from_the_sampled_turn(talk):
    summed = (system("sum up"), user("do it"), TURN, SEEN, said("(interrupted)"), user("sum up"))
    placement = talk.place(*summed)
    assert is_fork(placement, "a", "history_changed")
    assert not placement.extend


def test_19_a_compaction_that_keeps_our_last_call_is_a_fork_with_its_lineage(talk):
    compacted = (system("s"), user("summary"), said("Understood."), user("go"), TURN, SEEN)
    assert is_fork(talk.place(*compacted), "a", "history_changed")


def test_20_a_signature_in_the_url_safe_base64_alphabet_is_recognised():
    talk = Talk(Dialect.GOOGLE)
    talk.exchange("a", TASK, said(calls=[call(None)], issued=["ab+/cd=="]))
    placement = talk.place(*TASK, said(calls=[call(None, {"x": 1})], issued=["ab-_cd"]), SEEN)
    assert (placement.kind, placement.parent) == (REWRITTEN, "a")


# ---- rewritten turns


@pytest.mark.parametrize(
    ("echo", "drift", "extends"),
    [
        (said("I look.", calls=[call("call_1", "{}")]), "edited_args", False),
        (said(calls=TURN.tool_calls), "text_dropped", True),
        (said("I look.", calls=[call("call_1", name="invalid")]), "rewritten_call", True),
        (said("I\nlook.", calls=TURN.tool_calls), "whitespace", True),
        (said("I look. Noted.", calls=TURN.tool_calls), "text_appended", False),
        (said("Other.", calls=TURN.tool_calls), "changed", False),
    ],
)
def test_an_id_of_ours_under_the_equal_prompt_proves_a_rewritten_turn(talk, echo, drift, extends):
    placement = talk.place(*TASK, echo, SEEN)
    assert (placement.kind, placement.parent) == (REWRITTEN, "a")
    assert (placement.drift, placement.extend) == (drift, extends)
    assert placement.reason == (None if extends else drift)


@pytest.mark.parametrize("text", ["I look.", ""])
def test_reasoning_sent_back_as_text_extends(text):
    talk = Talk()
    talk.exchange("a", TASK, said(text, reasoning="hm"))
    placement = talk.place(*TASK, said(f"<think>\nhm\n</think>\n{text}"), user("on"))
    assert (placement.parent, placement.drift, placement.extend) == ("a", "thought_inlined", True)


def test_after_a_rewritten_turn_the_chain_matches_again(talk):
    echo = said("I look.", calls=[call("call_1", "{}")])
    talk.exchange("b", (*TASK, echo, SEEN), said("done"))
    placement = talk.place(*TASK, echo, SEEN, said("done"), user("more"))
    assert (placement.kind, placement.parent) == (CHILD, "b")


def test_rewritten_turns_fork_with_on_rewrite_fork():
    talk = Talk(on_rewrite="fork")
    talk.exchange("a", TASK, TURN)
    placement = talk.place(*TASK, said(calls=TURN.tool_calls), SEEN)
    assert (placement.kind, placement.extend, placement.reason) == (
        REWRITTEN,
        False,
        "text_dropped",
    )
    assert talk.place(*TASK, TURN, SEEN).extend


def test_calls_written_into_the_text_are_known_by_the_id_in_it():
    talk = Talk()
    long_id = "call_0123456789abcdef01234567"
    talk.exchange("a", TASK, said(calls=[call(long_id)]))
    echo = said(f"Calling tools: [{{'id': '{long_id}', 'name': 'bash'}}]")
    placement = talk.place(*TASK, echo, user("Observation: x"))
    assert (placement.kind, placement.parent, placement.drift) == (REWRITTEN, "a", "calls_as_text")
    assert not placement.extend
    elsewhere = talk.place(user("other"), echo, user("x"))
    assert (elsewhere.kind, elsewhere.reason) == (ROOT, "foreign")


def test_without_ids_the_text_decides_under_the_equal_prompt_only():
    talk = Talk()
    talk.exchange("a", TASK, said("Thought: x\n<call>"))
    placement = talk.place(*TASK, said("Thought: x\n\n<call>"), user("out"))
    assert (placement.kind, placement.drift, placement.extend) == (REWRITTEN, "whitespace", True)
    appended = talk.place(*TASK, said("Thought: x\n<call> {id: 7}"), user("out"))
    assert (appended.drift, appended.extend) == ("text_appended", False)
    other = talk.place(user("q"), said("Thought: x\n\n<call>"), user("out"))
    assert (other.kind, other.reason) == (ROOT, "foreign")


def test_an_answer_without_text_is_never_known_by_its_text():
    talk = Talk()
    talk.exchange("a", TASK, said(calls=[call(None)]))
    assert talk.place(*TASK, said("anything"), user("x")).reason == "foreign"


def test_a_delivered_turn_is_not_taken_for_a_cut_one():
    talk = Talk()
    talk.exchange("a", TASK, said("I look at the files"))
    assert talk.place(*TASK, said("I look at"), user("go on")).kind is ROOT


# ---- unknown turns


def test_a_turn_that_the_harness_wrote_extends_what_is_before_it(talk):
    placement = talk.place(*TASK, TURN, SEEN, said("written by hand"), user("go"))
    assert is_fork(placement, "a", "unknown_turn")
    assert (placement.extend, placement.new_from) == (True, 3)
    beside = talk.place(*TASK, TURN, said("written by hand"), user("go"))
    assert is_fork(beside, "a", "unknown_turn")
    assert beside.new_from == 3


def test_changed_tools_prevent_extension_at_unknown_turns_too(talk):
    placement = talk.place(*TASK, TURN, SEEN, said("by hand"), user("go"), tools=(BASH,))
    assert is_fork(placement, "a", "tools_changed")
    assert not placement.extend


# ---- guards, ties, delivery


def test_other_template_arguments_continue_the_messages_but_not_the_ids():
    talk = Talk()
    talk.exchange("a", TASK, TURN, template_args=True)
    assert talk.place(*TASK, TURN, SEEN, template_args=True).extend
    placement = talk.place(*TASK, TURN, SEEN, template_args=False)
    assert (placement.parent, placement.reason) == ("a", "template_args_changed")


def test_an_abandoned_exchange_is_no_parent_unless_a_call_id_proves_it():
    talk = Talk()
    talk.exchange("a", TASK, said("ok"), state="abandoned")
    assert is_fork(talk.place(*TASK, said("ok"), user("x")), "a", "parent_abandoned")
    talk.exchange("b", TASK, said("ok"))
    assert talk.place(*TASK, said("ok"), user("x")).parent == "b"
    talk.exchange("c", TASK, TURN, state="abandoned")
    assert talk.place(*TASK, TURN, SEEN).parent == "c"
    assert talk.place(*TASK, TURN, SEEN, said("by hand"), user("x")).parent == "c"


def test_an_abandoned_text_turn_further_back_is_passed_over():
    talk = Talk()
    talk.exchange("a", TASK, said("ok"), state="abandoned")
    assert talk.place(*TASK, said("ok"), user("x"), said("by hand"), user("y")).kind is ROOT


def test_a_delivered_reply_is_preferred_as_parent_over_equal_cut_ones():
    talk = Talk()
    for name, state in (("a", "superseded"), ("b", "delivered"), ("c", "cut")):
        talk.exchange(name, TASK, said("ok"), state=state)
    placement = talk.place(*TASK, said("ok"), user("x"))
    assert (placement.parent, placement.tie) == ("b", "delivery")


def test_identical_replies_get_one_continuation_each_the_newest_first():
    talk = Talk()
    talk.exchange("a", TASK, said("ok"))
    talk.exchange("b", TASK, said("ok"))
    first = talk.place(*TASK, said("ok"), user("x"))
    assert (first.parent, first.tie) == ("b", "newest")
    talk.begin("c", *TASK, said("ok"), user("x"))
    second = talk.place(*TASK, said("ok"), user("y"))
    assert (second.parent, second.tie) == ("a", "childless")


def test_a_failed_child_does_not_count_as_a_continuation():
    talk = Talk()
    for name in ("a", "b"):
        talk.exchange(name, TASK, said("ok"))
    asked = (*TASK, said("ok"), user("x"))
    talk.begin("c", *asked)
    talk.conversation.forget("c")
    assert talk.place(*asked).tie == "newest"
    talk.begin("c", *asked)
    assert talk.place(*asked).tie == "childless"


def test_only_a_request_begun_as_a_child_counts_as_a_continuation():
    talk = Talk()
    for name in ("a", "b"):
        talk.exchange(name, TASK, said("ok"))
    asked = (*TASK, said("ok"), user("x"))
    talk.place(*asked)
    talk.conversation.begin("c", talk.canonical(*TASK))
    assert talk.place(*asked).tie == "newest"
    talk.conversation.begin("d", talk.canonical(*asked))
    assert talk.place(*asked).tie == "childless"


def test_repeats_name_every_exchange_with_the_very_prompt_oldest_first():
    talk = Talk()
    talk.exchange("a", TASK, said("one"))
    talk.begin("b", *TASK)
    assert talk.place(*TASK).repeats == ("a", "b")
    assert talk.place(*TASK, user("more")).repeats == ()


# ---- laws


turns = st.lists(
    st.tuples(st.sampled_from(["text", "call", "both"]), st.integers(0, 2)), min_size=1, max_size=6
)


@given(turns, st.randoms(use_true_random=False))
def test_an_append_only_conversation_is_one_path_beside_other_calls(shape, random):
    talk = Talk()
    history = [system("s"), user("task")]
    last = None
    for number, (form, results) in enumerate(shape):
        name = f"x{number}"
        placement = talk.place(*history)
        assert placement.parent == last
        assert placement.extend is (last is not None)
        calls = [call(f"call_{number}_{i}", {"n": i}) for i in range(max(1, results))]
        turn = said(
            "" if form == "call" else f"step {number % 2}", calls=[] if form == "text" else calls
        )
        talk.exchange(name, tuple(history), turn)
        if random.random() < 0.5:  # a side call and a retry of the same prompt
            talk.exchange(f"side{number}", (user("title?"),), said("title"))
            talk.begin(f"retry{number}", *history)
        history += [turn, *[result(c.id, "out") for c in turn.tool_calls], user(f"more {number}")]
        last = name


ANSWERS = [
    said("ok"),
    said("ok", reasoning="hm"),
    said("ok", issued=["s1"]),
    said("ok", calls=[call("c1")]),
    said(calls=[call("c1"), call("c2")], issued=["s2"]),
    said(reasoning="hm", issued=["s3"]),
]
SENT = [user("go"), user("on"), result("c1", "1"), result("c2", "2"), *ANSWERS]
STATES = ["delivered", "delivered", "delivered", "superseded", "abandoned", None]


@pytest.mark.parametrize("seed", range(10))
def test_the_shortcut_for_linear_turns_finds_the_same_parent_as_the_full_search(seed):
    """Twins, turns of others, copied ids, turns of reasoning alone, lost replies, branches."""
    choose, plain = Random(seed), 0
    for _ in range(10):
        talk, history = Talk(), [user("go")]
        for number in range(12):
            answer = choose.choice(ANSWERS)
            talk.exchange(f"x{number}", tuple(history), answer, state=choose.choice(STATES))
            shown = choose.choice([answer, answer, choose.choice(ANSWERS)])
            history = [*history[: choose.choice([None, None, 1, 3])], shown]
            history += choose.choices(SENT, k=choose.choice([1, 1, 2]))
            asked, canon = request(*history), talk.canonical(*history)
            found = talk.conversation._plainly(asked, canon)
            searched = _Search(talk.conversation, asked, canon).run()
            assert found in (None, searched)
            plain += found is not None
    assert plain


def test_a_linear_turn_is_found_without_a_search(talk):
    asked = (*TASK, TURN, SEEN)
    found = talk.conversation._plainly(request(*asked), talk.canonical(*asked))
    assert found is not None
    assert found.exchange is not None
    assert (found.exchange.exchange_id, found.new_from) == ("a", len(TASK) + 1)


@given(turns)
def test_placing_a_request_twice_gives_the_same_placement(shape):
    talk = Talk()
    talk.exchange("a", TASK, TURN)
    asked = (*TASK, TURN, SEEN, *[said(form) for form, _ in shape])
    assert talk.place(*asked) == talk.place(*asked)
    assert request(*asked).messages == asked

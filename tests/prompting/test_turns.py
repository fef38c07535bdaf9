"""Every assistant turn that a request shows is counted as what it is."""

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prompting.talk import Talk, call, request, result, said, system, user

from bridle.prompting.canonical import canonical
from bridle.prompting.turns import TurnCounts, count_turns

TASK = (system("s"), user("do it"))


class Counting(Talk):
    """A session that counts as the gateway does."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.counts = {}

    def ask(self, name, messages, answer, *, tokens=5):
        """One exchange of `tokens` sampled tokens; its counts."""
        asked = request(*messages, dialect=self.dialect)
        key = canonical(asked, self.memo)
        placement = self.conversation.place(asked, key)
        before = self.counts[placement.parent] if placement.extend else None
        self.counts[name] = count_turns(
            self.conversation, messages, key, first=placement.new_from, before=before
        )
        self.conversation.begin(name, key)
        self.commit(name, messages, answer, tokens=tokens)
        return self.counts[name]


def shown(counts):
    return astuple(counts)


def test_an_append_only_conversation_is_verbatim():
    talk, messages = Counting(), [*TASK]
    for turn in range(4):
        counts = talk.ask(f"x{turn}", messages, said(f"turn {turn}"))
        assert counts == TurnCounts(verbatim=turn)
        messages += [said(f"turn {turn}"), user("on")]


def test_a_clock_in_the_system_prompt_renders_every_turn_again():
    talk, history = Counting(), [user("do it")]
    for turn in range(10):
        counts = talk.ask(f"x{turn}", [system(f"It is {turn}"), *history], said(f"turn {turn}"))
        assert counts == TurnCounts(rerendered=turn, tokens_rerendered=5 * turn)
        history += [said(f"turn {turn}"), user("on")]


def test_a_sliding_window_renders_what_it_still_shows_again():
    talk, history = Counting(), [user("do it")]
    for turn in range(6):
        window = [system("s"), *history[-5:]]
        counts = talk.ask(f"x{turn}", window, said(f"turn {turn}"))
        history += [said(f"turn {turn}"), user(f"on {turn}")]
    assert counts == TurnCounts(rerendered=2, tokens_rerendered=10)


def test_turns_behind_a_masked_result_are_rendered_again():
    talk, history = Counting(), [*TASK]
    for turn in range(4):
        answer = said(f"turn {turn}", calls=[call(f"call_{turn}")])
        talk.ask(f"x{turn}", history, answer)
        history += [answer, result(f"call_{turn}", "long")]
    masked = [*history[:3], result("call_0", "[gone]"), *history[4:]]
    counts = talk.ask("y", masked, said("done"))
    assert (counts.verbatim, counts.rerendered, counts.foreign) == (0, 4, 0)


def test_an_edited_turn_is_recognised_by_its_call_id_and_counts_as_rerendered():
    talk = Counting()
    talk.ask("a", TASK, said("I look.", calls=[call("call_1", {"command": "ls"})]))
    edited = said("I did not look.", calls=[call("call_1", {"command": "rm"})])
    counts = talk.ask("b", [system("other"), user("x"), edited, result("call_1", "a")], said("k"))
    assert counts == TurnCounts(rerendered=1, tokens_rerendered=5)


@pytest.mark.parametrize("echo", [said(reasoning="hm"), said("")])
def test_a_reply_of_reasoning_only_stays_verbatim(echo):
    talk = Counting()
    talk.ask("a", TASK, said(reasoning="hm"))
    assert talk.ask("b", [*TASK, echo, user("well?")], said("x")) == TurnCounts(verbatim=1)


def test_a_reply_of_reasoning_only_counts_as_rerendered_under_another_history():
    talk = Counting()
    talk.ask("a", TASK, said(reasoning="hm"))
    counts = talk.ask("b", [user("x"), said(reasoning="hm"), user("well?")], said("x"))
    assert counts == TurnCounts(rerendered=1, tokens_rerendered=5)


def test_unsampled_turns_are_foreign_and_those_before_any_reply_are_given():
    talk = Counting()
    examples = [*TASK, said("an example"), user("now you")]
    assert talk.ask("a", examples, said("one")) == TurnCounts(given=1)
    grown = [*examples, said("one"), user("on")]
    assert talk.ask("b", grown, said("two")) == TurnCounts(verbatim=1, given=1)
    later = [*grown, said("written by hand"), user("on")]
    assert talk.ask("c", later, said("three")) == TurnCounts(verbatim=1, foreign=1, given=1)
    window = [system("t"), *later[1:]]
    assert talk.ask("d", window, said("four")) == TurnCounts(
        rerendered=1, foreign=1, given=1, tokens_rerendered=5
    )


def test_adjacent_replies_in_one_run_are_counted_separately():
    talk = Counting()
    talk.ask("a", TASK, said("one"))
    talk.ask("b", TASK, said("two", calls=[call("call_1")]))
    run = [said("one"), said("two", calls=[call("call_1")]), said("three")]
    counts = talk.ask("c", [system("t"), user("x"), *run, user("y")], said("done"))
    assert (counts.rerendered, counts.foreign) == (2, 1)


def test_an_abandoned_reply_that_nobody_got_is_not_recognised_by_its_text():
    talk = Counting()
    talk.exchange("a", TASK, said("ok"), state="abandoned")
    assert talk.ask("b", [user("x"), said("ok"), user("y")], said("z")).rerendered == 0


def test_an_extension_looks_at_its_new_turns_only():
    talk = Counting()
    history, before = [*TASK], None
    for turn in range(300):
        before = talk.ask(f"x{turn}", history, said(f"turn {turn}"))
        history += [said(f"turn {turn}"), user("on")]
    key = talk.canonical(*history)
    unread = [said("not looked at")] * (len(history) - 1)
    counts = count_turns(
        talk.conversation, [*unread, history[-1]], key, first=len(history) - 1, before=before
    )
    assert counts == TurnCounts(verbatim=300)


STEPS = st.lists(
    st.sampled_from(["append", "clock", "window", "by_hand", "mask"]), min_size=1, max_size=8
)


def requests_of(name, steps):
    """Yield a harness's messages and the answer, in turn, for this treatment of its history."""
    head, history = [system(f"{name}")], [user(f"{name} begins")]
    for number, step in enumerate(steps):
        if step == "clock":
            head = [system(f"{name} at {number}")]
        if step == "window":
            history = history[-3:]
        if step == "by_hand":
            history += [said(f"{name} by hand {number}"), user("on")]
        if step == "mask":
            history[0] = user(f"{name} [gone {number}]")
        answer = said(f"{name} {number}", calls=[call(f"{name}_{number}")] if number % 2 else ())
        yield [*head, *history], answer
        history += [answer]
        history += [result(f"{name}_{number}", "r")] if number % 2 else [user("on")]


def played(order, plans):
    """The counts of each conversation's requests, played in this order."""
    talk, found = Counting(), {name: [] for name in plans}
    waiting = {name: requests_of(name, steps) for name, steps in plans.items()}
    for name in order:
        messages, answer = next(waiting[name])
        found[name].append(talk.ask(f"{name}{len(found[name])}", messages, answer))
    return found


@given(st.dictionaries(st.sampled_from("abc"), STEPS, min_size=1), st.randoms())
def test_counts_are_the_same_in_any_interleaving(plans, random):
    order = [name for name, steps in plans.items() for _ in steps]
    one = played(order, plans)
    random.shuffle(order)
    other = played(order, plans)
    for name in plans:
        for left, right in zip(one[name], other[name], strict=True):
            # Whether a turn was given depends on whether the session had any reply by then.
            assert left.foreign + left.given == right.foreign + right.given
            assert (left.verbatim, left.rerendered) == (right.verbatim, right.rerendered)
            assert left.tokens_rerendered == right.tokens_rerendered


@given(STEPS)
def test_every_turn_shown_is_counted_once(steps):
    talk = Counting()
    for number, (messages, answer) in enumerate(requests_of("a", steps)):
        counts = talk.ask(f"x{number}", messages, answer)
        runs = sum(
            one.role == "assistant" and (at == 0 or messages[at - 1].role != "assistant")
            for at, one in enumerate(messages)
        )
        turns = counts.verbatim + counts.rerendered + counts.foreign + counts.given
        assert runs <= turns <= runs + steps.count("by_hand")

"""Each habit of a harness with an echoed turn has its own name."""

import pytest
from tests.prompting.talk import call, said

from bridle.prompting.canonical import AtomKind, answer_atoms
from bridle.prompting.turns import EXTENDABLE, WEAK, Drift, drift_of, has_text, is_beginning
from bridle.types import ToolSpec

TURN = said("I look at it.", calls=[call("1", '{"path": "a"}', name="read"), call("2")])


def atoms(*messages):
    return answer_atoms(messages, ())


@pytest.mark.parametrize(
    ("echo", "drift"),
    [
        (said("I look  at\n\nit.", calls=TURN.tool_calls), Drift.WHITESPACE),
        (
            said("I look at it.", calls=[call("1", "{}", name="read"), call("2")]),
            Drift.EDITED_ARGS,
        ),
        (
            said("I look at\nit.", calls=[call("1", '{"path": "b"}', name="read"), call("2")]),
            Drift.EDITED_ARGS,
        ),
        (
            said("I look at it.", calls=[call("1", "{}", name="invalid"), call("2")]),
            Drift.REWRITTEN_CALL,
        ),
        (said("I look at it. And more.", calls=TURN.tool_calls), Drift.TEXT_APPENDED),
        (said("I look at it.\nread(path='a')\nbash()"), Drift.CALLS_AS_TEXT),
        (said("I look at it."), Drift.PARTIAL),
        (said("I look"), Drift.PARTIAL),
        (said("I look at it.", calls=TURN.tool_calls[:1]), Drift.PARTIAL),
        (said("Something else", calls=TURN.tool_calls), Drift.CHANGED),
        (said("I look at it. More", calls=TURN.tool_calls[:1]), Drift.CHANGED),
        (said(calls=TURN.tool_calls), Drift.TEXT_DROPPED),
        (said(calls=[call("9", '{"path": "a"}', name="read"), call("8")]), Drift.CHANGED),
        (said(calls=[call("1", '{"path": "b"}', name="read"), call("2")]), Drift.EDITED_ARGS),
    ],
)
def test_a_changed_echo_gets_the_drift_kind_of_its_change(echo, drift):
    assert drift_of(atoms(echo), atoms(TURN)) is drift


@pytest.mark.parametrize("echo", ["{}", '{"path": "a"}', '{"raw": "{\\"path\\": "}', "{"])
def test_malformed_arguments_that_were_replaced_are_rewritten(echo):
    made = atoms(said(calls=[call("1", '{"path": ')]))
    assert drift_of(atoms(said(calls=[call("1", echo)])), made) is Drift.REWRITTEN_ARGS


def test_valid_arguments_that_validation_changed_are_normalised():
    sampled = atoms(said(calls=[call("1", '{"n": "5", "extra": 1}')]))
    echo = atoms(said(calls=[call("1", '{"n": 5, "all": false}')]))
    schema = {"properties": {"n": {"type": "integer"}, "all": {"type": "boolean"}}}
    tool = ToolSpec("bash", None, schema)
    assert drift_of(echo, sampled, tools=[tool]) is Drift.NORMALISED_ARGS
    assert drift_of(echo, sampled) is Drift.EDITED_ARGS


@pytest.mark.parametrize("tag", ["think", "thinking"])
def test_reasoning_that_came_back_as_text_is_inlined(tag):
    sampled = said("I look.", reasoning="hm, so")
    reasoning = {atom.reasoning for atom in atoms(sampled)} - {None}
    shown = tuple(atom for atom in atoms(sampled) if atom.kind is not AtomKind.EVIDENCE)
    echo = atoms(said(f"<{tag}>\nhm, so\n</{tag}>\n\nI look."))
    assert drift_of(echo, shown, reasoning=reasoning) is Drift.THOUGHT_INLINED
    other = atoms(said(f"<{tag}>\nsomething else\n</{tag}>\n\nI look."))
    assert drift_of(other, shown, reasoning=reasoning) is Drift.TEXT_APPENDED


def test_calls_echoed_as_text_have_drift_calls_as_text():
    assert drift_of(atoms(said("bash()")), atoms(said(calls=[call("1")]))) is Drift.CALLS_AS_TEXT


@pytest.mark.parametrize(
    ("echo", "begins"),
    [
        (said("I look at"), True),
        (said("I look at it."), True),
        (said("I look at it.", calls=TURN.tool_calls[:1]), True),
        (TURN, False),
        (said("look"), False),
        (said("I look at it.", calls=[*TURN.tool_calls, call("3")]), False),
        (said("I look at", calls=TURN.tool_calls[:1]), False),
        (said(calls=TURN.tool_calls[:1]), False),
        (said(), False),
    ],
)
def test_a_partial_echo_is_whole_atoms_and_possibly_part_of_a_text(echo, begins):
    assert is_beginning(atoms(echo), atoms(TURN)) is begins


def test_has_text_is_true_only_for_answers_with_text():
    assert has_text(atoms(TURN))
    assert not has_text(atoms(said(calls=[call("1")])))


def test_echoes_with_edited_added_or_missing_content_are_not_extendable():
    forks = {
        Drift.EDITED_ARGS,
        Drift.TEXT_APPENDED,
        Drift.CALLS_AS_TEXT,
        Drift.PARTIAL,
        Drift.CHANGED,
    }
    assert set(Drift) - forks == EXTENDABLE
    assert WEAK[0] is Drift.WHITESPACE

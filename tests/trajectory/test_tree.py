"""A conversation drawn for people."""

import dataclasses

import pytest
from tests.capture.made import MadeSession
from tests.trajectory.test_init import a_hard_session

from bridle.errors import StoreError
from bridle.trajectory import DEFAULT_TRAIN
from bridle.trajectory.transcript import draw, explain_fork
from bridle.types import DeliveryState, Kind


def drawn(made):
    return draw(made.capture(), DEFAULT_TRAIN)


def heads(made):
    """Depth and first word of each line."""
    return [(depth, text.split()[0]) for depth, text in drawn(made)]


def test_a_linear_conversation_is_drawn_flat_with_one_line_per_turn():
    made = MadeSession()
    made.call()
    made.call("x0")
    lines = drawn(made)
    assert lines[0] == (0, "root: first")
    assert [depth for depth, _ in lines] == [0, 1, 1]
    assert lines[1][1].startswith(
        "x0 agent | system, user -> assistant | 0+10 ids -> 5 sampled (stop) | trains | x0: "
    )
    assert lines[2][1].startswith("x1 agent | user -> assistant | 15+10 ids -> 5 sampled")


def test_the_longest_branch_stays_at_its_depth_and_others_are_indented():
    made = MadeSession()
    made.call()
    made.call("x0")
    made.call("x0")
    made.call("x2")
    made.call(None, continues="x3", root_reason="tools_changed")
    assert heads(made) == [
        *((0, "root:"), (1, "x0"), (2, "x1"), (1, "x2"), (1, "x3")),
        *((0, "root:"), (1, "x4")),
    ]
    assert drawn(made)[5][1] == "root: tools_changed, continues x3"


def test_a_drawn_turn_shows_its_mask_reason_and_its_drift():
    made = MadeSession()
    made.call(state=DeliveryState.ABANDONED)
    made.call(None, kind=Kind.SIDE, extra={"drift": "whitespace"})
    texts = [text for _, text in drawn(made)]
    assert "| masked: abandoned |" in texts[1]
    assert "| masked: kind | drift: whitespace |" in texts[3]


def test_exchanges_whose_parent_is_missing_are_listed_as_left_out():
    made = MadeSession()
    made.call()
    made.call("x0")
    del made.exchanges[0]
    assert drawn(made) == [(0, "x1: left out: unknown_parent, 5 sampled")]


def test_drawn_replies_are_cut_to_one_line():
    made = MadeSession()
    made.call(output=300)
    _, text = drawn(made)[1]
    assert text.endswith("...")
    assert "\n" not in text
    assert len(text) < 160


def test_unreadable_messages_are_drawn_as_blank():
    made = MadeSession()
    made.call(reply=b"not json")
    made.bodies.clear()
    assert drawn(made)[1][1].endswith(
        "x0 agent | ? -> assistant | 0+10 ids -> 5 sampled (stop) | trains"
    )


def test_the_tree_shows_tool_calls_with_their_arguments():
    made = MadeSession()
    reply = (
        b'{"choices":[{"index":0,"finish_reason":"tool_calls","message":{"role":"assistant",'
        b'"content":"Let me see.","tool_calls":[{"id":"c","type":"function","function":'
        b'{"name":"bash","arguments":"{}"}},{"id":"d","type":"function","function":'
        b'{"name":"bash","arguments":"{}"}}]}}]}'
    )
    made.call(reply=reply)
    assert drawn(made)[1][1].endswith("| Let me see. bash({}) bash({})")


def test_a_session_of_200_turns_is_drawn_in_short_lines_of_depth_2():
    """200 turns, 3 sub-agents, 2 compactions, a retry every tenth turn."""
    made, lost = a_hard_session()
    lines = drawn(made)
    assert len(lines) == len(made.exchanges) + 6
    assert max(depth for depth, _ in lines) == 2
    assert max(2 * depth + len(text) for depth, text in lines) < 160
    aside = {text.split()[0]: text for depth, text in lines if depth == 2}
    assert {name for name, text in aside.items() if "abandoned" in text} == set(lost)
    assert [text for depth, text in lines if depth == 0].count("root: first") == 4
    assert sum("history_changed, continues" in text for _, text in lines) == 2


# ---- why two exchanges did not merge


def explained(made, one, two, decode=None):
    return "\n".join(explain_fork(made.capture(), one, two, decode))


def test_a_fork_is_explained_by_its_first_differing_position():
    made = MadeSession()
    made.call(new=[1, 2, 3], output=[4, 5])
    made.call(None, continues="x0", root_reason="history_changed", new=[1, 2, 3, 4, 9, 9])
    text = explained(made, "x0", "x1")
    assert "x1 was recorded with parent None, continues x0, root reason history_changed" in text
    assert "they part at position 4, in x0's sampled ids" in text
    assert "x0 around it: [1, 2, 3, 4, 5]\nx1 around it: [1, 2, 3, 4, 9, 9]" in text
    decoded = explained(made, "x0", "x1", lambda ids: "".join(map(str, ids)))
    assert "x1 around it: [1, 2, 3, 4, 9, 9] '123499'" in decoded


def test_a_fork_inside_the_prompt_is_explained_as_such():
    made = MadeSession()
    made.call(new=[1, 2, 3])
    made.call(None, new=[1, 7, 3], continues=None)
    assert "they part at position 1, in x0's prompt" in explained(made, "x0", "x1")


def test_an_extension_and_a_prompt_that_ends_early_are_reported():
    made = MadeSession()
    made.call()
    made.call("x0")
    assert "x1 extends x0: its prompt begins with all 15 ids" in explained(made, "x0", "x1")
    made.call("x0", kept=12, new=0)
    assert "x2's prompt ends at position 12, inside x0's sampled ids" in explained(made, "x0", "x2")


def test_explaining_a_fork_of_an_unknown_or_lost_exchange_raises_an_error():
    made = MadeSession()
    made.call()
    made.call("x0")
    made.exchanges[1] = dataclasses.replace(made.exchanges[1], parent_id="gone")
    with pytest.raises(StoreError, match="'x1' has no place in the conversation: unknown_parent"):
        explained(made, "x0", "x1")
    with pytest.raises(StoreError, match="no exchange 'x9'; it has x0"):
        explained(made, "x0", "x9")

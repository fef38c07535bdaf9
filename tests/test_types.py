"""The vocabulary."""

import dataclasses
import pickle

import numpy as np

from bridle.types import (
    MediaPart,
    Message,
    Role,
    Sampling,
    TextPart,
    ToolCall,
    VersionSpan,
    first_difference,
    record,
)


def test_the_text_of_a_message_joins_its_text_parts_without_a_separator():
    media = MediaPart("image/png", "00", "data:,")
    message = Message(Role.USER, (TextPart("a"), media, TextPart("b")))

    assert message.text == "ab"
    assert Message(Role.ASSISTANT).text == ""


def test_first_difference_is_the_first_unequal_position_or_the_shorter_length():
    one = np.array([1, 2, 3], np.int32)
    assert first_difference(one, np.array([1, 9, 3], np.int32)) == 1
    assert first_difference(one, one) == 3
    assert first_difference(one, one[:2]) == 2
    assert first_difference(one, one[:0]) == 0


def test_value_types_survive_pickling():
    values = [
        Message(Role.TOOL, (TextPart("x"),), tool_call_id="c"),
        ToolCall("c", "f", "{}"),
        Sampling(temperature=0.5),
        VersionSpan(1, 0, 3),
    ]

    assert pickle.loads(pickle.dumps(values)) == values  # noqa: S301 - our own bytes


def test_records_compare_by_fields_unless_eq_is_false():
    @record()
    class Pair:
        left: int
        right: tuple[int, ...] = ()

    @record(eq=False)
    class Apart:
        left: int

    one, same = Pair(1, (2,)), Pair(1, (2,))
    assert (one == same, hash(one) == hash(same), one == Pair(2, (2,))) == (True, True, False)
    assert dataclasses.replace(one, left=3) == Pair(3, (2,))
    assert not hasattr(one, "__dict__")
    assert Apart(1) != Apart(1)
    assert len({Apart(1), Apart(1)}) == 2

"""The vocabulary."""

import dataclasses
import pickle

from bridle.types import (
    MediaPart,
    Message,
    Role,
    Sampling,
    TextPart,
    ToolCall,
    VersionSpan,
    record,
)


def test_a_messages_text_is_its_text_parts_with_nothing_between():
    media = MediaPart("image/png", "00", "data:,")
    message = Message(Role.USER, (TextPart("a"), media, TextPart("b")))

    assert message.text == "ab"
    assert Message(Role.ASSISTANT).text == ""


def test_values_cross_processes():
    values = [
        Message(Role.TOOL, (TextPart("x"),), tool_call_id="c"),
        ToolCall("c", "f", "{}"),
        Sampling(temperature=0.5),
        VersionSpan(1, 0, 3),
    ]

    assert pickle.loads(pickle.dumps(values)) == values  # noqa: S301 - our own bytes


def test_record_is_a_value_by_its_fields_and_with_eq_false_by_itself():
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

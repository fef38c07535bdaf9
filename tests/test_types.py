"""The vocabulary."""

import pickle

from bridle.types import MediaPart, Message, Role, Sampling, TextPart, ToolCall, VersionSpan


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

"""Values are written for people."""

import time

import pytest

from bridle.dashboard.app import (
    NONE,
    ago,
    clock,
    columns,
    count,
    dots,
    environment,
    number,
    seconds,
    segments,
)  # fmt: skip
from bridle.dashboard.session import cut, parts, pretty, said
from bridle.trajectory.scores import share


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, NONE), (0.0123, "12 ms"), (3.42, "3.4 s"), (302, "5 min 2 s"),
        (7440, "2 h 4 min"), (90_000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_durations_are_formatted_with_the_fitting_unit(value, text):
    assert seconds(value) == text


def test_points_in_time_are_formatted_as_age_and_as_utc_clock():
    assert ago(time.time() - 7200) == "2 h ago"
    assert ago(time.time() + 5) == "0 s ago"
    assert clock(0) == "1970-01-01 00:00:00 UTC"
    assert ago(None) == clock(None) == NONE


def test_counts_and_numbers_are_formatted_with_thousands_separators_and_rounded():
    assert count(12345) == "12\u202f345"
    assert count(None) == number(None) == NONE
    assert number(0.123456) == "0.123"
    assert number(3690.4) == "3\u202f690"
    assert share(1, 0) == "0.0 %"


def test_long_texts_are_cut_with_the_number_of_omitted_characters():
    assert cut("abc", 3) == "abc"
    assert cut("abcdef", 3) == "abc\n… 3 characters more"


def test_json_text_is_indented_and_other_text_unchanged():
    assert pretty('{"a":1}') == '{\n  "a": 1\n}'
    assert pretty("{a") == "{a"
    assert pretty({"a": object}).startswith("{")
    assert pretty("\udcff") == "\udcff"


def test_only_images_in_png_data_urls_are_shown_as_images():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    far = {"type": "image_url", "image_url": {"url": "https://evil.example/a.png"}}
    drawn = {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,AA"}}

    assert parts([image, far, drawn, {"type": "text", "text": "t"}, 3]) == [
        ("image", "data:image/png;base64,AA"),
        ("other", "image at https://evil.example/a.png"),
        ("other", "image at data:image/svg+xml;base64,AA"),
        ("text", "t"),
        ("other", "3"),
    ]
    assert parts(None) == parts("") == []


def test_a_malformed_message_is_formatted_without_an_error():
    call = {"id": "c", "function": {"name": "bash", "arguments": "{}"}}

    full = said({"role": "assistant", "content": "a", "tool_calls": [call, 3, {"function": 1}]})

    assert full.calls == [("bash", "c", "{}"), ("?", "", ""), ("?", "", "")]
    assert said({}).role == "unknown"
    assert said({"content": {"odd": 1}}).parts == [("other", "{'odd': 1}")]


def test_bar_segments_are_proportional_and_fill_the_width():
    found = segments([("a", 1), ("none", 0), ("b", 3)])

    assert [(name, x, wide) for name, _, x, wide in found] == [("a", 0, 25), ("b", 25, 75)]
    assert segments([]) == []
    assert [(done, other) for _, done, other, _ in columns([(0, 1, 1), (1, 2, 0)])] == [
        (50, 50), (100, 0),
    ]  # fmt: skip


def test_dots_of_equal_rewards_are_stacked():
    assert dots([1.0, 0.0, 1.0]) == [(0.0, 1.0, 0.0), (100.0, 1.0, 1.0), (100.0, 2.0, 1.0)]
    assert dots([]) == []
    assert dots([-1.0, 1.0])[0][0] == 0.0


def test_templates_escape_html():
    made = environment().from_string("{{ text }}")

    assert made.render(text="<b>") == "&lt;b&gt;"

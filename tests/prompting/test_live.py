"""Early parts of a reply are a prefix of the whole reply, wherever its ids are split."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.prompting.test_family import FAMILIES

from bridle.prompting.family import live_marks, plain_parser
from bridle.prompting.reply import (
    INCOMPLETE_MOST,
    LiveReader,
    ReplyDelta,
    marker_prefix_length,
    parse_reply,
    read_calls,
)
from bridle.types import FinishReason

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'
BROKEN = "<tool_call>\n{'name'}\n</tool_call>"
MALFORMED = '<tool_call>\n{"name": "bash", "arguments": {"a": oops}}\n</tool_call>'
TURN = f"<think>\nhm, é 🦊\n</think>\n\nI look.\n{CALL}\n{CALL}<|im_end|>"
LIVE = [name for name in FAMILIES if not name.startswith(("gemma", "llama", "inkling", "hy3"))]
LIVE.remove("deepseek-v4")


class Reading:
    """One family, its reader and its parser."""

    def __init__(self, tokenizer, family, name):
        self.tokenizer = tokenizer
        self.family = family
        marks = live_marks(name, tokenizer)
        assert marks is not None
        self.marks = marks
        self.ids_read = 0

    def reader(self, *, thinking=False, stops=()):
        numbers = itertools.count(1)
        made = []

        def calls(region):
            self.ids_read += len(region)
            known = iter(made)
            found = read_calls(
                self.family,
                region,
                tools=None,
                new_id=lambda: next(known, None) or f"c{next(numbers)}",
            )
            made[:] = [call.id for call in found]
            return found

        return LiveReader(
            self.marks,
            self.tokenizer,
            thinking=thinking,
            stop_ids=frozenset(self.family.get_stop_token_ids()),
            stops=stops,
            read_calls=calls,
        )

    def stream(self, ids, cuts=None, **options):
        """Everything that leaves, and the pieces."""
        reader = self.reader(**options)
        cuts = range(len(ids) + 1) if cuts is None else sorted({0, len(ids), *cuts})
        pieces = [reader.feed(ids[a:b]) for a, b in itertools.pairwise(cuts)]
        whole = ReplyDelta(
            "".join(piece.reasoning for piece in pieces),
            "".join(piece.text for piece in pieces),
            [call for piece in pieces for call in piece.calls],
        )
        return whole, pieces

    def parse(self, ids, *, tail=(), stop_text=None):
        numbers = itertools.count(1)
        return parse_reply(
            self.family,
            self.tokenizer,
            list(ids),
            tools=None,
            prompt_tail=list(tail),
            finish=FinishReason.STOP,
            stop_text=stop_text,
            new_id=lambda: f"c{next(numbers)}",
        )

    def check(self, ids, cuts, **options):
        """Return what leaves is a beginning of each part, and the parts leave in order."""
        early, pieces = self.stream(ids, cuts, **options)
        final = self.parse(ids)
        assert (final.reasoning or "").startswith(early.reasoning)
        assert final.content.startswith(early.text)
        assert list(final.tool_calls[: len(early.calls)]) == early.calls
        order = [
            part
            for piece in pieces
            for part, value in enumerate((piece.reasoning, piece.text, piece.calls))
            if value
        ]
        assert order == sorted(order)
        return early, final


def reading_of(look_alike, name):
    tokenizer, family = look_alike(name)
    return Reading(tokenizer, family, name)


@pytest.fixture(scope="module")
def qwen3(look_alike):
    return reading_of(look_alike, "qwen3")


@pytest.fixture(scope="module")
def plain(tokens):
    return Reading(tokens, plain_parser(tokens), None)


@pytest.fixture
def encode(qwen3):
    return qwen3.tokenizer.encode


def test_reasoning_text_and_calls_are_emitted_before_the_end_of_a_turn(qwen3, encode):
    early, final = qwen3.check(encode(TURN), None)
    assert (early.reasoning, early.text) == ("hm, é 🦊", "I look.")
    assert early.calls == list(final.tool_calls)
    assert len(early.calls) == 2


def test_text_is_emitted_at_once_and_trailing_white_space_held_back(qwen3, encode):
    reader = qwen3.reader()
    assert reader.feed(encode("Hello")).text == "Hello"
    assert reader.feed(encode(" there")).text == " there"
    assert not reader.feed(encode(" \n"))
    assert reader.feed(encode("you")).text == " \nyou"


def test_a_character_of_several_tokens_is_emitted_when_complete(qwen3, encode):
    reader = qwen3.reader()
    ids = encode("🦊")
    assert len(ids) > 1
    assert not any(reader.feed([id_]) for id_ in ids[:-1])
    assert reader.feed(ids[-1:]).text == "🦊"


def test_incomplete_utf_8_bytes_hold_back_all_later_text(qwen3, encode):
    lead = encode("🦊")[0]
    early, final = qwen3.check([*encode("a"), *[lead] * (INCOMPLETE_MOST + 5), *encode("b")], None)
    assert early.text == "a"
    assert final.content.endswith("b")


def test_a_broken_character_at_the_end_of_a_part_belongs_to_it(qwen3, encode):
    lead = encode("🦊")[0]
    ids = [*encode("<think>hm"), lead, *encode("</think>ok"), lead, *encode(CALL)]
    early, final = qwen3.check(ids, None)
    assert (early.reasoning, early.text) == (final.reasoning, final.content)
    assert early.text == "ok\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_and_its_beginning_at_the_end_are_never_emitted(qwen3, encode):
    ids = encode("Thought: x Observation: made up")
    early, _ = qwen3.stream(ids, stops=("Observation:",))
    assert early.text == "Thought: x"
    final = qwen3.parse(ids, stop_text="Observation:")
    assert final.content == "Thought: x "
    beginning, _ = qwen3.stream(encode("x Observ"), stops=("Observation:",))
    assert beginning.text == "x"
    other, _ = qwen3.stream(encode("x Observe this"), stops=("Observation:",))
    assert other.text == "x Observe this"


def test_call_markup_inside_reasoning_is_held_back_until_the_end(qwen3, encode):
    drafted = encode(f"<think>\nI could {CALL} or not\n</think>\n\nok")
    early, final = qwen3.check(drafted, None)
    assert (early.reasoning, early.text, early.calls) == ("I could", "", [])
    assert final.tool_calls == ()
    called, parsed = qwen3.check(encode(f"<think>\nI call {CALL}<|im_end|>"), None)
    assert called.calls == []
    assert len(parsed.tool_calls) == 1


def test_a_call_without_a_readable_name_is_text_at_the_end(qwen3, encode):
    early, final = qwen3.check(encode(f"a {BROKEN}{CALL}{BROKEN}<|im_end|>"), None)
    assert early.text == "a"
    assert early.calls == list(final.tool_calls)
    assert final.content == f"a\n{BROKEN}\n{BROKEN}"


def test_a_call_with_malformed_arguments_is_emitted_when_closed(qwen3, encode):
    early, final = qwen3.check(encode(f"a {MALFORMED}{CALL}<|im_end|>"), None)
    assert early.calls == list(final.tool_calls)
    assert [call.arguments for call in early.calls] == ['{"a": oops}', '{"command":  "ls"}']
    assert final.content == "a"


def test_text_after_reasoning_opened_by_the_prompt_is_emitted_as_reasoning(qwen3, encode):
    early, _ = qwen3.stream(encode("\nhm</think>\n\nok"), thinking=True)
    assert (early.reasoning, early.text) == ("hm", "ok")


def test_text_after_a_misplaced_marker_is_held_back(qwen3, encode):
    for text, shown in (
        ("a<think>b", "a"),
        ("a</think>b", "a"),
        ("a<|im_start|>b", "a"),
        ("a<|im_end|>b", "a"),
        ("<think>a</think>b<think>c", "b"),
        ("<think>a</think><think>c", ""),
    ):
        early, _ = qwen3.check(encode(text), None)
        assert early.text == shown


def test_text_after_a_marker_spelled_as_plain_text_is_held_back(qwen3, tokens):
    ids = tokens.encode(tokens.escape("<think>") + "no</think>yes")
    early, _ = qwen3.check(ids, None)
    assert early.text == ""


def test_families_without_call_marker_tokens_have_no_live_parsing(look_alike, tokens, folder):
    for name in ("llama-3", "deepseek-v4", "inkling", "gemma4", "gpt-oss"):
        tokenizer = look_alike(name)[0] if name != "gpt-oss" else tokens
        assert live_marks(name, tokenizer) is None
    assert live_marks("kimi-k2", tokens) is None


def test_a_template_of_no_family_is_parsed_live_and_holds_back_its_end_token(tokens):
    marks = live_marks(None, tokens)
    assert marks is not None
    assert "<|im_end|>" in marks.held


def test_every_family_is_either_live_or_known_not_to_be(look_alike):
    live = {name for name in FAMILIES if live_marks(name, look_alike(name)[0]) is not None}
    assert live == set(LIVE)


def turns(reading, seed):
    """Ids that look like replies: words, markers, bytes, in any order."""
    tokenizer = reading.tokenizer
    words = [tokenizer.encode(text) for text in (" a", "\n", "  ", "🦊", "</", "thi", "x>", "{")]
    marks = reading.marks
    known = [marks.think, marks.think_end, *marks.openers, *marks.closers]
    control = [id_ for id_ in known if id_ is not None]
    block = st.sampled_from([tokenizer.encode(text) for text in (CALL, BROKEN, MALFORMED)])
    loose = st.integers(0, seed).map(lambda id_: [id_])
    pieces = st.one_of(
        st.sampled_from(words), st.sampled_from(control).map(lambda id_: [id_]), block, loose
    )
    return st.lists(pieces, max_size=14).map(lambda found: list(itertools.chain(*found)))


@pytest.mark.parametrize("name", LIVE)
@given(data=st.data())
def test_live_pieces_are_a_prefix_of_the_parsed_reply_for_any_ids_and_splits(
    look_alike, name, data
):
    reading = reading_of(look_alike, name)
    stop = reading.family.get_stop_token_ids()[0]
    ids = [*data.draw(turns(reading, 2040)), *data.draw(st.sampled_from([[], [stop]]))]
    thinking = not reading.family.parse_response(
        reading.tokenizer.encode("x"), tools=None, prompt_ids=[]
    ).content
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    early, _ = reading.check(ids, cuts, thinking=thinking)
    assert reading.stream(ids, thinking=thinking)[0] == early


@given(data=st.data())
def test_live_pieces_are_a_prefix_of_the_parsed_reply_for_a_template_of_no_family(plain, data):
    ids = data.draw(turns(plain, 2047))
    plain.check(ids, data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))


@given(st.text(alphabet="ab\n", max_size=12), st.lists(st.text("ab\n", min_size=1), max_size=3))
@example("aab", ["abb"])
def test_marker_prefix_length_is_that_of_the_longest_marker_prefix_at_the_end(text, markers):
    count = marker_prefix_length(text, markers)
    beginnings = {marker[:n] for marker in markers for n in range(len(marker))}
    longest = max(len(b) for b in {"", *beginnings} if text.endswith(b))
    assert count == longest


def test_a_live_reply_of_many_calls_is_read_in_linear_time(qwen3, encode):
    ids, before = encode(CALL + "\n") * 1000, qwen3.ids_read
    early, _ = qwen3.check(ids, range(0, len(ids), 100))
    assert qwen3.ids_read - before < 40 * len(ids)
    assert len(early.calls) > 800


def test_call_ids_emitted_live_are_kept_in_the_parsed_reply(renderer, tokens):
    ids = np.array(tokens.encode(TURN), dtype=np.int32)
    tail = np.array(tokens.encode("<|im_start|>assistant\n"), dtype=np.int32)
    reader = renderer.live(tools=(), prompt_tail=tail, stops=("",))
    piece = reader.feed(ids.tolist())
    given_ids = [call.id for call in piece.calls]
    assert len(set(given_ids)) == 2
    reply = renderer.parse(
        ids,
        tools=(),
        prompt_tail=tail,
        finish=FinishReason.STOP,
        stop_text=None,
        call_ids=given_ids[:1],
    )
    assert reply.tool_calls[0] == piece.calls[0]
    assert reply.tool_calls[1].id not in given_ids


@given(data=st.data())
def test_live_pieces_are_a_prefix_of_the_parsed_reply_with_calls_as_text(renderer, plain, data):
    ids = data.draw(turns(plain, 2047))
    tail = np.array(plain.tokenizer.encode("<|im_start|>assistant\n"), dtype=np.int32)
    reader = renderer.live(tools=(), prompt_tail=tail, stops=(), calls_as_text=True)
    piece = reader.feed(ids)
    final = renderer.parse(
        np.array(ids, dtype=np.int32),
        tools=(),
        prompt_tail=tail,
        finish=FinishReason.STOP,
        stop_text=None,
        calls_as_text=True,
    )
    assert (piece.calls, final.tool_calls) == ([], ())
    assert final.content.startswith(piece.text)
    assert (final.reasoning or "").startswith(piece.reasoning)


def test_live_text_is_reasoning_only_if_the_prompt_left_reasoning_open(renderer, tokens):
    def first(prompt):
        tail = np.array(tokens.encode(prompt), dtype=np.int32)
        return renderer.live(tools=(), prompt_tail=tail, stops=()).feed(tokens.encode("hm"))

    assert first("<|im_start|>assistant\n<think>\n").reasoning == "hm"
    assert first("<|im_start|>assistant\n<think>\n\n</think>\n\n").text == "hm"

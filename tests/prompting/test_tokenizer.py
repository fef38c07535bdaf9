"""Message text never becomes a control token; scaffold does; nothing is lost or added."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import builtin_tokenizer_dir
from bridle.errors import RenderError
from bridle.prompting.tokenizer import (
    JOINER,
    LONG,
    MARK,
    SHORT,
    PromptTokenizer,
    load_tokenizer,
    stop_ids_of,
)

NAMES = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|endoftext|>"]

nasty = st.lists(
    st.sampled_from(
        [
            *NAMES,
            MARK,
            MARK + "0",
            MARK + "1",
            "\\u007f",
            "0",
            "1",
            "\\",
            "a",
            " ",
            "\n",
            "<",
            "|",
            "é",
        ]
    )
    | st.text(max_size=3)
).map("".join)


@given(nasty)
def test_escaped_text_has_no_control_token_and_decodes_to_itself(tokens, text):
    ids = tokens.encode(tokens.escape(text))
    assert not tokens.control_ids.intersection(ids)
    assert tokens.decode(ids) == text


@given(nasty)
def test_text_that_a_server_tokenises_holds_no_control_token_and_loses_nothing(tokens, text):
    made = tokens.apart(text)
    assert not tokens.control_ids.intersection(tokens.fast.encode(made))
    assert made.replace(JOINER, "") == text.replace(JOINER, "")
    marked = any(name in text for name in tokens.added)
    assert (made != text) == marked


@given(nasty, nasty)
def test_scaffold_around_escaped_text_keeps_its_control_tokens(tokens, before, after):
    text = f"<|im_start|>user\n{tokens.escape(before)}<|im_end|>\n{tokens.escape(after)}<think>"
    ids = tokens.encode(text)
    control = [id_ for id_ in ids if id_ in tokens.control_ids]
    assert control == [tokens.added[name] for name in ("<|im_start|>", "<|im_end|>", "<think>")]
    assert tokens.decode(ids) == f"<|im_start|>user\n{before}<|im_end|>\n{after}<think>"


@given(st.text())
def test_text_without_control_tokens_is_tokenised_as_always(tokens, text):
    plain = tokens.fast.encode(text, add_special_tokens=False)
    assert tokens.encode(text.replace(MARK, "")) == tokens.fast.encode(
        text.replace(MARK, ""), add_special_tokens=False
    )
    if not any(name in text for name in tokens.added):
        assert tokens.encode(tokens.escape(text)) == plain


@given(nasty)
def test_escaped_text_inside_json_is_the_json_of_the_text(tokens, text):
    for ascii_only in (True, False):
        wrapped = json.dumps({"k": tokens.escape(text)}, ensure_ascii=ascii_only)
        ids = tokens.encode(wrapped)
        assert not tokens.control_ids.intersection(ids)
        assert tokens.decode(ids) == json.dumps({"k": text}, ensure_ascii=ascii_only)


def test_escaping_leaves_innocent_text_alone(tokens):
    text = "for i in <range>: |x| <im_end>"
    assert tokens.escape(text) is text


def test_lone_surrogates_become_the_replacement_character(tokens):
    assert tokens.escape("a\ud800b") == "a\ufffdb"
    assert tokens.escape("\ud83d\ude00") == "\U0001f600"
    assert tokens.decode(tokens.encode(tokens.escape("\udfff<think>"))) == "\ufffd<think>"


def test_the_prompt_tokenizer_has_the_interface_of_the_renderers_package(tokens):
    assert tokens.convert_tokens_to_ids("<think>") == tokens.added["<think>"]
    assert tokens.convert_tokens_to_ids(["<think>", "nowhere"]) == [tokens.added["<think>"], None]
    assert tokens.decode(tokens.added["<|im_end|>"]) == "<|im_end|>"
    assert tokens.decode([tokens.added["<|im_end|>"]], skip_special_tokens=True) == ""
    assert tokens.eos_token == "<|im_end|>"
    assert len(tokens) == 2048
    assert not callable(tokens)
    with pytest.raises(AttributeError):
        tokens.__getattr__("__call__")


def test_added_tokens_that_strip_spaces_do_so_beside_escape_marks_too(tokens, folder):
    made = json.loads((folder / "tokenizer.json").read_text())
    for token in made["added_tokens"]:
        if token["content"] == "<|im_end|>":
            token["rstrip"] = token["lstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(made))
    greedy = load_tokenizer(folder)
    plain = greedy.encode("a <|im_end|>\n b")
    marked = greedy.encode("a <|im_end|>\n b" + greedy.escape("<think>"))
    assert marked[: len(plain)] == plain
    assert len(plain) < len(tokens.encode("a <|im_end|>\n b"))


def test_a_tokenizer_without_added_tokens_still_escapes_the_mark_character(tokens):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE(vocab={"a": 0, MARK: 1}, merges=[]))
    made = PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=bare))
    assert made.escape("a" + MARK) == "a" + MARK + "0"
    assert made.encode(made.escape("a" + MARK)) == [0, 1]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(RenderError, match=rf"{tmp_path}: no tokenizer.json; give"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RenderError, match=f"{tmp_path}: loading the tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "stops"),
    [
        (None, [2024]),
        ('{"eos_token_id": [2024, 2022]}', [2024, 2022]),
        ('{"eos_token_id": 2022}', [2024, 2022]),
        ("{}", [2024]),
    ],
)
def test_the_generation_config_names_more_end_tokens(folder, tokens, config, stops):
    if config is not None:
        (folder / "generation_config.json").write_text(config)
    assert stop_ids_of(folder, tokens) == stops


def test_a_broken_generation_config_is_named(folder, tokens):
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(RenderError, match="generation_config"):
        stop_ids_of(folder, tokens)


@pytest.mark.parametrize("text", ["user\n", "word " * 1000, "", "x" * SHORT, "x" * LONG])
def test_cached_ids_of_a_text_are_not_changed_by_a_caller(tokens, text):
    first = tokens.encode(text)
    kept = list(first)
    first.append(-1)  # a caller may do what it likes with its list
    assert tokens.encode(text) == kept == PromptTokenizer(tokens.fast).encode(text)


def test_the_cache_of_long_texts_evicts_the_least_recently_used_first(tokens):
    tokens = PromptTokenizer(tokens.fast, long_kept_chars=3 * LONG)
    texts = [str(n) * LONG for n in range(3)]
    for n in (0, 1, 2, 0):
        tokens.encode(texts[n])
    tokens.encode("new " * (LONG // 4))
    references = [sys.getrefcount(texts[n]) for n in range(3)]
    assert references[0] == references[2] > references[1], "only the second is let go"


def test_overlapping_markers_are_both_split_and_white_space_is_kept():
    fast = load_tokenizer(builtin_tokenizer_dir()).fast
    fast.add_tokens(["<a", "a>", "    "])
    tokens = PromptTokenizer(fast)
    made = tokens.apart("<a>    <a")
    assert made.replace(JOINER, "") == "<a>    <a"
    assert "    " in made
    named = {tokens.added[name] for name in ("<a", "a>")}
    assert not named.intersection(fast.encode(made))


def test_many_first_characters_of_control_tokens_are_escaped_too():
    fast = load_tokenizer(builtin_tokenizer_dir()).fast
    names = [f"{chr(ord('a') + at)}<end>" for at in range(12)]
    fast.add_tokens(names, special_tokens=True)
    tokenizer = PromptTokenizer(fast)
    for name in [*names, "<|im_end|>"]:
        ids = tokenizer.encode(tokenizer.escape(f"so {name} it"))
        assert tokenizer.control_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == f"so {name} it"

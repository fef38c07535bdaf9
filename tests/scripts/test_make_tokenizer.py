"""The shipped tokenizer is what scripts/make_tokenizer makes, keeps any text, and speaks Qwen3."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.config import builtin_tokenizer_dir


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(builtin_tokenizer_dir())


def test_the_shipped_tokenizer_files_equal_the_generated_ones(load_script):
    for name, text in load_script("make_tokenizer").make_files().items():
        assert (builtin_tokenizer_dir() / name).read_text(encoding="utf-8") == text, name


def test_make_tokenizer_writes_into_the_given_folder(load_script, tmp_path, capsys):
    load_script("make_tokenizer").main([str(tmp_path / "made")])
    shipped = (builtin_tokenizer_dir() / "tokenizer.json").read_bytes()
    assert (tmp_path / "made" / "tokenizer.json").read_bytes() == shipped
    assert "tokenizer.json" in capsys.readouterr().out


def test_the_tokenizer_has_2048_entries_with_qwen3_s_added_tokens_last(tokenizer):
    assert len(tokenizer) == 2048
    added = tokenizer.added_tokens_encoder
    assert list(added)[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert sorted(added.values()) == list(range(2022, 2048))
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert "<think>" not in tokenizer.all_special_tokens
    assert "<|vision_pad|>" not in tokenizer.decode([added["<|vision_pad|>"]], True)


def test_the_tokenizer_encodes_each_digit_as_one_token(tokenizer):
    assert len(tokenizer.encode("20481024", add_special_tokens=False)) == 8


@given(st.text())
def test_the_tokenizer_decodes_any_encoded_text_to_itself(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text

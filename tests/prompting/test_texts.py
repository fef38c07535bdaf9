"""The text of recorded ids, by the tokenizer that the session's record names."""

import shutil

import numpy as np
import pytest

from bridle.config import builtin_tokenizer_dir
from bridle.errors import RenderError
from bridle.prompting.renderer import load_renderer
from bridle.prompting.texts import KEY, decoder_of, tokenizer_record


@pytest.fixture
def folder(tmp_path):
    """A tokenizer's folder that a test may change."""
    shutil.copytree(builtin_tokenizer_dir(), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def ids_of(source: str) -> np.ndarray:
    encoded = load_renderer(source).tokenizer("<|im_end|> grüße").input_ids
    return np.array(encoded, dtype=np.int32)


@pytest.mark.parametrize("builtin", [True, False])
def test_a_record_of_a_tokenizer_gives_the_text_of_ids_with_control_tokens(folder, builtin):
    source = "builtin" if builtin else str(folder)

    decode = decoder_of({KEY: tokenizer_record(source)})

    assert decode is not None
    assert decode(ids_of(source)) == "<|im_end|> grüße"


def test_a_relative_folder_is_found_from_anywhere(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    record = tokenizer_record("tokenizer")
    monkeypatch.chdir("/")

    assert decoder_of({KEY: record}) is not None


def test_ids_are_not_decoded_without_the_session_s_exact_tokenizer(folder):
    record = tokenizer_record(str(folder))
    assert decoder_of({}) is None
    assert decoder_of({KEY: {"source": str(folder)}}) is None
    assert decoder_of({KEY: "builtin"}) is None

    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert decoder_of({KEY: record}) is None

    shutil.rmtree(folder)
    assert decoder_of({KEY: record}) is None


def test_a_file_that_is_no_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{}")
    decode = decoder_of({KEY: tokenizer_record(str(folder))})

    assert decode is not None
    with pytest.raises(RenderError, match=str(folder)):
        decode(np.array([1], dtype=np.int32))

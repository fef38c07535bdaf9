"""The builtin tokenizer and its renderer, loaded once; and look-alikes of other families'."""

import re

import numpy as np
import pytest
from tokenizers import AddedToken

from bridle.config import builtin_tokenizer_dir
from bridle.errors import RenderError
from bridle.prompting.family import make_family
from bridle.prompting.renderer import load_renderer
from bridle.prompting.tokenizer import PromptTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokens():
    return load_tokenizer(builtin_tokenizer_dir())


@pytest.fixture(scope="session")
def renderer():
    return load_renderer("builtin")


@pytest.fixture(scope="session")
def encode(tokens):
    """Ids of text, control tokens recognised, as sampled ids come."""
    return lambda text: np.array(tokens.encode(text), dtype=np.int32)


@pytest.fixture
def folder(tmp_path):
    """A copy of the builtin tokenizer's folder, to be changed."""
    for path in builtin_tokenizer_dir().iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.fixture(scope="session")
def look_alike():
    """`look_alike(name)`: our tokenizer with the control tokens that a family asks for."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = with_tokens_of(name)
        return made[name]

    return make


def with_tokens_of(name):
    fast = load_tokenizer(builtin_tokenizer_dir()).fast
    while True:
        try:
            tokenizer = PromptTokenizer(fast)
            return tokenizer, make_family(name, tokenizer, thinking=None, history="exact")
        except RenderError as error:
            missing = re.search(r"oken[^'\"]*['\"](\S+?)['\"]", str(error).partition(":")[2])
            if missing is None:
                raise
            fast.add_tokens([AddedToken(missing.group(1), special=True, normalized=False)])

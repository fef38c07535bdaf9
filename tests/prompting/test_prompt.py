"""A prompt is its parent, what was sampled, and a suffix; every form of it is the same ids."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.prompting.prompt import PromptIds


def ids(*values):
    return np.array(values, dtype=np.int32)


segments = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(lambda values: ids(*values))


@given(segments, st.lists(st.tuples(segments, segments), max_size=6), st.integers(0, 40))
def test_array_json_digest_and_tail_are_the_same_ids(first, steps, count):
    prompt, whole = PromptIds.root(first), first.tolist()
    for output, suffix in steps:
        if count % 2:
            prompt.array()
            prompt.json()
        prompt = prompt.extend(output, suffix)
        whole += output.tolist() + suffix.tolist()
    assert len(prompt) == len(whole)
    assert prompt.array().tolist() == whole
    assert prompt.array().dtype == np.int32
    assert json.loads(prompt.json()) == whole
    assert b" " not in prompt.json()
    assert prompt.digest == hashlib.sha256(np.array(whole, dtype="<i4").tobytes()).digest()
    assert prompt.tail(count).tolist() == (whole[-count:] if count else [])


def test_a_root_keeps_nothing_and_a_child_keeps_parent_and_output():
    root = PromptIds.root(ids(1, 2))
    child = root.extend(ids(3), ids(4, 5))
    assert (root.kept, root.suffix.tolist()) == (0, [1, 2])
    assert (child.kept, child.suffix.tolist()) == (3, [4, 5])
    assert child.array()[: child.kept].tolist() == [*root.array(), 3]


def test_siblings_share_their_parent_and_nothing_else():
    root = PromptIds.root(ids(1))
    one, other = root.extend(ids(2), ids(3)), root.extend(ids(4), ids(5))
    assert (one.array().tolist(), other.array().tolist()) == ([1, 2, 3], [1, 4, 5])
    assert root.array().tolist() == [1]


def test_a_prompt_s_arrays_are_copied_and_read_only():
    given_ids = ids(1, 2, 3)
    prompt = PromptIds.root(given_ids)
    given_ids[0] = 9
    assert prompt.array().tolist() == [1, 2, 3]
    for view in (prompt.array(), prompt.tail(2), prompt.suffix):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 7


def test_a_prompt_caches_its_array_and_json_until_it_is_extended():
    prompt = PromptIds.root(ids(1, 2))
    assert prompt.array() is prompt.array()
    assert prompt.json() is prompt.json()
    text = prompt.json()
    prompt.extend(ids(3), ids(4))
    assert prompt.json() is not text
    assert prompt.json() == text


def test_ids_of_another_type_or_layout_are_taken_as_int32():
    strided = np.arange(10, dtype=np.int32)[::2]
    prompt = PromptIds.root(strided).extend(np.array([7], dtype=np.int64), ids())
    assert prompt.json() == b"[0,2,4,6,8,7]"
    assert prompt.suffix.dtype == np.int32


def test_read_only_ids_are_not_copied():
    fixed = ids(1, 2)
    fixed.flags.writeable = False
    assert PromptIds.root(fixed).suffix is fixed

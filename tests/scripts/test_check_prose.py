"""scripts/check_prose refuses private words, and docstrings that open with a question word."""

from functools import partial

import pytest


@pytest.fixture
def findings(findings_in):
    return partial(findings_in, "check_prose")


QUESTION = 'def names():\n    """What the folder says."""\n'
VERB = 'def names():\n    """Return the names that the folder lists."""\n'


def test_a_docstring_that_opens_with_a_question_word_is_reported_with_its_line(findings):
    (found,) = findings({"src/bridle/gateway/app.py": QUESTION})
    assert found.startswith("src/bridle/gateway/app.py:2: ")


def test_a_docstring_that_opens_with_a_verb_passes(findings):
    assert findings({"src/bridle/gateway/app.py": VERB, "tests/a.py": "x = 1\n"}) == []


def test_source_function_docstrings_must_open_with_a_verb_except_properties(findings):
    noun = 'def size():\n    """The size."""\n'
    found = findings({"src/bridle/a.py": noun, "tests/test_a.py": noun})
    assert [line.split(": ")[0] for line in found] == ["src/bridle/a.py:2"]
    assert findings({"src/bridle/a.py": "@property\n" + noun}) == []


def test_docstrings_of_tests_and_benchmarks_are_checked(findings):
    found = findings({"tests/gateway/test_a.py": QUESTION, "benchmarks/b.py": QUESTION})
    assert [line.split(":")[0] for line in found] == ["benchmarks/b.py", "tests/gateway/test_a.py"]


def test_attribute_docstrings_are_checked_in_sources_only(findings):
    text = 'class A:\n    """A pool."""\n\n    size: int\n    """How many there are."""\n'
    found = findings({"src/bridle/a.py": text, "tests/test_a.py": text})
    assert [line.split(": ")[0] for line in found] == ["src/bridle/a.py:5"]


@pytest.mark.parametrize("text", ["HEARD = 1", "X = TOLD_ERROR", "# HAS GONE ON"])
def test_a_forbidden_word_in_names_or_comments_is_reported(findings, text):
    (found,) = findings({"src/bridle/a.py": text.lower()})
    assert found.startswith("src/bridle/a.py:1: private word ")


def test_a_word_that_contains_a_forbidden_word_passes(findings):
    assert findings({"src/bridle/a.py": "stolder = unheardof = 1\n"}) == []

"""scripts/check_prose counts docstrings that open with a question word, per folder."""

import pytest


@pytest.fixture
def findings(load_script, tmp_path):
    """Writes the given files into a fresh checkout and checks it with the given numbers."""
    script = load_script("check_prose")

    def check(files, left):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return list(script.findings(tmp_path, left))

    return check


QUESTION = 'def names():\n    """What the folder says."""\n'
VERB = 'def names():\n    """Return the names that the folder lists."""\n'


def test_a_question_word_is_reported_with_its_place(findings):
    (found,) = findings({"src/bridle/gateway/app.py": QUESTION}, {})
    assert found.startswith("src/bridle/gateway: 1 docstrings")
    assert found.endswith("src/bridle/gateway/app.py:2")


def test_a_docstring_that_opens_with_a_verb_passes(findings):
    assert findings({"src/bridle/gateway/app.py": VERB, "tests/a.py": "x = 1\n"}, {}) == []


def test_a_folder_may_have_as_many_as_its_number_says(findings):
    files = {"src/bridle/gateway/app.py": QUESTION, "src/bridle/gateway/data.py": QUESTION}
    assert findings(files, {"src/bridle/gateway": 2}) == []
    assert len(findings(files, {"src/bridle/gateway": 1})) == 1


def test_files_outside_packages_are_counted_by_their_top_folder(findings):
    files = {"tests/gateway/test_a.py": QUESTION, "src/bridle/types.py": QUESTION}
    found = findings(files, {"tests": 1})
    assert [line.split(":")[0] for line in found] == ["src"]

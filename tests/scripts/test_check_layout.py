"""scripts/check_layout finds each thing that it promises to find, in a small checkout."""

from functools import partial

import pytest


@pytest.fixture
def findings(findings_in):
    return partial(findings_in, "check_layout")


def test_a_source_folder_without_tests_is_reported(findings):
    found = findings({"src/bridle/gateway/app.py": "", "tests/gateway/conftest.py": ""})
    assert found == ["src/bridle/gateway: has no tests in tests/gateway"]


def test_tests_of_a_folder_may_have_any_name(findings):
    files = {"src/bridle/gateway/app.py": "", "tests/gateway/test_replies.py": ""}
    assert findings(files) == []


def test_a_long_file_is_reported_unless_its_docstring_gives_a_reason(findings):
    found = findings(
        {"tests/a.py": "x = 1\n" * 701, "tests/b.py": '"""Longer than most: a table."""\n' * 701}
    )
    assert found == ["tests/a.py: 701 lines, over 700 without a reason"]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_long_function_is_reported_unless_its_docstring_gives_a_reason(findings, kind):
    body = "    x = 1\n" * 60
    found = findings(
        {
            "tests/a.py": f"{kind} f():\n{body}",
            "tests/b.py": f'{kind} f():\n    """Longer than most: one table."""\n{body}',
            "tests/c.py": f'{kind} f():\n    """One.\n\n    Two.\n    """\n{body[10:]}',
        }
    )
    assert found == ["tests/a.py:1: f has 61 lines, over 60"]


def test_a_public_class_name_in_two_source_files_is_reported(findings):
    text = "class Node: ...\nclass _Part: ...\n"
    found = findings(
        {
            "src/bridle/a.py": text,
            "src/bridle/b.py": text,
            "src/bridle/c.py": "class Other:\n    class Node: ...\n",
            "tests/test_a.py": text,
        }
    )
    assert found == ["class Node is defined in src/bridle/a.py, src/bridle/b.py"]


def test_scripts_without_a_file_suffix_are_checked(findings):
    found = findings({"scripts/it": "#!/usr/bin/env python3\n" + "x = 1\n" * 700})
    assert found == ["scripts/it: 701 lines, over 700 without a reason"]


def test_files_of_examples_and_golden_folders_are_not_checked_as_code(findings):
    assert findings({"examples/a/files/a.py": "birch py", "tests/golden/a.py": "no python"}) == []


def test_a_file_named_utils_is_reported(findings):
    assert findings({"tests/utils.py": ""}) == ["tests/utils.py: name it by its subject"]


@pytest.mark.parametrize(
    "text",
    [
        "https://py" + "pi.org/simple",
        "https://files.pythonhos" + "ted.org/x",
        "https://registry.npm" + "js.org/x",
        "https://download.pyt" + "orch.org/whl/cpu",
        "cd /wor" + "k/main",
        "/op" + "t/wheels",
    ],
)
def test_package_registries_and_machine_paths_in_files_are_reported(findings, text):
    (found,) = findings({"docs/setup.md": f"First\n{text}\n"})
    assert found.startswith("docs/setup.md:2: names ")


def test_other_paths_and_binary_files_are_not_reported(findings, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe/wor" + b"k/main")
    assert findings({"a.md": "/workspace/main /work/repo /optional"}) == []


def test_files_ignored_by_git_are_not_checked(findings):
    assert findings({".gitignore": "runs/\n", "runs/utils.py": ""}) == []


def test_check_layout_exits_with_1_when_it_has_findings(load_script, monkeypatch, capsys):
    check_layout = load_script("check_layout")
    monkeypatch.setattr(check_layout, "findings", lambda _: iter(["a finding"]))
    assert check_layout.main() == 1
    assert capsys.readouterr().out == "a finding\ncheck_layout: 1 findings\n"
    monkeypatch.setattr(check_layout, "findings", lambda _: iter([]))
    assert check_layout.main() == 0

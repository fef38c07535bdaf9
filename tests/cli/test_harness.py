"""`bridle harness`: the table of harnesses, and the exit codes of a check."""

import os

from bridle.harnesses import HARNESSES
from bridle.harnesses.bundles import MARKER


def test_the_list_has_every_harness_with_version_dialects_and_whether_it_is_here(
    say, tmp_path, monkeypatch
):
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path))
    rows = {row["harness"]: row for row in say("harness", "list", "--json").json}

    assert set(rows) == set(HARNESSES)
    assert rows["aider"]["dialects"] == ["openai_chat"]
    assert rows["cline"]["dialects"][0] == "openai_chat"
    assert set(rows["cline"]["dialects"]) == set(rows["command"]["dialects"])
    assert rows["qwen_code"]["dialects"] == ["openai_chat", "anthropic", "google"]
    here = {name for name, row in rows.items() if row["installed"]}
    assert here == {name for name, row in rows.items() if row["version"] is None}

    bundle = tmp_path / "bundles" / f"pi-{rows['pi']['version']}-0123456789ab"
    bundle.mkdir(parents=True)
    assert not installed(say, "pi")
    (bundle / MARKER).write_text("{}")
    assert installed(say, "pi")


def installed(say, name):
    [row] = [row for row in say("harness", "list", "--json").json if row["harness"] == name]
    return row["installed"]


def test_the_list_is_a_table_for_people(say):
    said = say("harness", "list").out

    assert "installed" in said
    assert "qwen_code" in said


def test_a_check_that_works_is_code_0(say):
    said = say("harness", "check", "function", "--json")

    assert (said.code, said.json["works"]) == (0, True)


def test_an_unknown_name_is_code_2(say):
    said = say("harness", "check", "nobody")

    assert said.code == 2
    assert "known:" in said.err


def test_what_nobody_uses_is_removed_and_told(say, tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDLE_CACHE", str(tmp_path))
    bundle = tmp_path / "bundles" / "pi-0.1-0123456789ab"
    bundle.mkdir(parents=True)
    (bundle / MARKER).write_text('{"size_mb": 7}')
    os.utime(bundle / MARKER, (1.0, 1.0))

    [row] = say("harness", "prune", "--dry-run", "--json").json
    assert (row["bundle"], row["size_mb"]) == (bundle.name, 7)
    assert bundle.exists()

    said = say("harness", "prune").out
    assert "removed: 1 bundles, 7 MB" in said
    assert not bundle.exists()
    assert say("harness", "prune", "--json").json == []

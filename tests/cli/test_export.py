"""`bridle export`: the forms that others read."""

import json

import pytest

from bridle.bridges.parquet import read_trajectories


@pytest.fixture
def export(say, finished_run, tmp_path):
    """Export the finished run in a form: what was said, and the lines."""

    def call(form, *options):
        out = tmp_path / f"{form}.out"
        said = say("export", finished_run, "--format", form, "--out", out, *options, "--json")
        text = "" if form == "parquet" or said.code else out.read_text()
        return said, [json.loads(line) for line in text.splitlines()]

    return call


def test_every_form_holds_every_session(say, finished_run, tmp_path, export):
    lines = say("export", finished_run, "--format", "jsonl", "--out", tmp_path / "t.jsonl")
    parquet, _ = export("parquet")
    sft, examples = export("sft")
    atif, documents = export("atif")

    assert lines.code == 0
    assert "3 of 3 tasks gave something" in lines.out
    assert (tmp_path / "t.jsonl").read_bytes() == (finished_run / "trajectories.jsonl").read_bytes()
    assert parquet.json["traces"] == len(read_trajectories(tmp_path / "parquet.out")) == 3
    assert sft.json["examples"] == 3
    assert [m["role"] for m in examples[0]["messages"]] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert atif.json["documents"] == len(documents) == 3
    assert sft.json["statistics"]["accepted"] == 3
    assert sft.json["statistics"]["sources"]["tasks / command"]["turns_mean"] == 2


def test_what_is_not_good_enough_is_left_out_and_counted(export):
    sft, examples = export("sft", "--min-reward", 1.5)
    parquet, _ = export("parquet", "--turns", "3:")
    lines, kept = export("jsonl", "--turns", ":2", "--unique", "--keep", 1, "--finish", "stop")

    assert (sft.json["examples"], sft.json["rejected"], examples) == (0, 3, [])
    assert sft.json["statistics"]["rejected"] == {"reward": 3}
    assert parquet.json["traces"] == 0
    assert (len(kept), lines.json["statistics"]["accepted"]) == (3, 3)


def test_what_was_left_out_is_told(say, finished_run, tmp_path):
    said = say(
        "export", finished_run, "--format", "sft", "--out", tmp_path / "s.jsonl",
        "--max-repetition", 0, "--max-tokens", 1,
    )  # fmt: skip
    assert "rejected: length 3" in said.out


def test_groups_without_a_difference_give_no_pairs(export):
    said, lines = export("pairs")
    assert (said.json["pairs"], said.json["left_out"], lines) == (0, {"flat": 3}, [])


def test_turns_that_are_no_range_are_refused(export):
    for wrong in ("3", "a:"):
        said, _ = export("sft", "--turns", wrong)
        assert said.code == 2
        assert "is not MIN:MAX" in said.err

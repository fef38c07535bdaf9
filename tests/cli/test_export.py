"""`bridle export`: the forms that others read."""

import json

from bridle.bridges.parquet import read_trajectories


def test_every_form_holds_every_session(say, finished_run, tmp_path):
    lines = say("export", finished_run, "--format", "jsonl", "--out", tmp_path / "t.jsonl")
    parquet = say(
        "export", finished_run, "--format", "parquet", "--out", tmp_path / "t.parquet", "--json"
    )
    sft = say("export", finished_run, "--format", "sft", "--out", tmp_path / "s.jsonl", "--json")

    assert lines.code == 0
    assert (tmp_path / "t.jsonl").read_bytes() == (finished_run / "trajectories.jsonl").read_bytes()
    assert parquet.json["traces"] == len(read_trajectories(tmp_path / "t.parquet")) == 3
    assert sft.json["examples"] == 3
    assert "messages" in json.loads((tmp_path / "s.jsonl").read_text().splitlines()[0])


def test_sft_leaves_out_what_is_not_good_enough(say, finished_run, tmp_path):
    said = say(
        "export", finished_run, "--format", "sft", "--out", tmp_path / "s.jsonl", "--min-reward",
        "1.5", "--json",
    )  # fmt: skip

    assert (said.json["examples"], said.json["rejected"]) == (0, 3)

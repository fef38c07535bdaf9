"""`bridle rebuild`: the same bytes, or another builder's."""

import shutil


def test_the_same_builder_gives_the_same_bytes(say, finished_run, tmp_path):
    said = say("rebuild", finished_run, "--out", tmp_path)

    assert said.code == 0
    for name in ("trajectories.jsonl", "trajectories.parquet"):
        assert (tmp_path / name).read_bytes() == (finished_run / name).read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_another_builder_gives_its_own_traces_from_the_capture_file_alone(
    say, finished_run, tmp_path
):
    said = say(
        "rebuild", finished_run / "capture.sqlite", "--builder", "per_request", "--out", tmp_path,
        "--json",
    )  # fmt: skip

    assert said.json["traces"] == said.json["exchanges"] == 6


def test_an_unknown_builder_is_named_with_the_known_ones(say, finished_run):
    said = say("rebuild", finished_run, "--builder", "magic")

    assert said.code == 2
    assert "'magic'" in said.err
    assert "prefix_merging" in said.err


def test_the_workers_of_a_gateway_are_rebuilt_together(say, finished_run, tmp_path):
    for number in range(2):
        (tmp_path / f"worker-{number}").mkdir()
        shutil.copy(finished_run / "capture.sqlite", tmp_path / f"worker-{number}")

    said = say("rebuild", tmp_path, "--json")

    assert (said.json["sessions"], said.json["exchanges"]) == (6, 12)
    once = (finished_run / "trajectories.jsonl").read_bytes()
    assert (tmp_path / "rebuilt" / "trajectories.jsonl").read_bytes() == once * 2

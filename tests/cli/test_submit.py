"""`bridle submit`; with a server it is tested in `test_serve`."""

import json


def test_a_file_that_is_wrong_is_told_before_the_server_is_asked(tmp_path, say):
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([{"task_id": "a"}]))
    said = say("submit", file, "--server", "http://127.0.0.1:1")
    assert (said.code, "instruction" in said.err) == (2, True)


def test_a_priority_out_of_bounds_is_refused(tmp_path, say):
    assert say("submit", tmp_path, "--priority", "101").code == 2

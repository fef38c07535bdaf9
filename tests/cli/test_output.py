"""Tables, numbers and JSON."""

import json

from bridle.cli import output


def test_json_goes_to_stdout_as_one_document(capsys):
    output.print_json({"a": [1, None]})

    assert json.loads(capsys.readouterr().out) == {"a": [1, None]}


def test_columns_marked_as_numbers_are_aligned_right_and_missing_cells_are_empty():
    made = output.table("t", ("name", "#count"), [("a", None)])

    assert [column.justify for column in made.columns] == ["left", "right"]
    assert list(made.columns[1].cells) == [""]

"""`bridle harness`: the table of harnesses. `check` on real ones is in tests/real_clients."""

from bridle.harnesses import HARNESSES


def test_the_list_has_every_harness_with_version_and_dialect(say):
    said = say("harness", "list", "--json")

    assert {row["harness"] for row in said.json} == set(HARNESSES)
    assert all(row["version"] and row["dialect"] for row in said.json)
    assert "pi" in say("harness", "list").out


def test_an_unknown_name_is_code_2(say):
    said = say("harness", "check", "nobody")

    assert said.code == 2
    assert "known:" in said.err

"""scripts/coverage_gate judges rooms by coverage's own report."""

import pytest


@pytest.fixture
def gate(load_script, monkeypatch, tmp_path):
    """The script, in a checkout whose rooms are dialects and capture."""
    module = load_script("coverage_gate")
    for room in ("dialects", "capture"):
        (tmp_path / "src" / "bridle" / room).mkdir(parents=True)
        (tmp_path / "src" / "bridle" / room / "a.py").touch()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def report_of(**covered_of_100):
    """A report with one file of 80 lines and 20 branches per room, so much of it covered."""
    return {
        "files": {
            f"src/bridle/{room}/a.py": {
                "summary": {
                    "num_statements": 80,
                    "covered_lines": 80,
                    "num_branches": 20,
                    "covered_branches": covered - 80,
                },
                "missing_lines": [],
                "missing_branches": [] if covered == 100 else [[3, 5]],
            }
            for room, covered in covered_of_100.items()
        }
    }


def test_coverage_of_a_package_counts_lines_and_branches_alike(gate):
    assert gate.room_percents(report_of(dialects=97, capture=100)) == {
        "dialects": 97.0,
        "capture": 100.0,
    }


def test_a_package_below_the_coverage_bound_fails_with_its_files(gate, monkeypatch, capsys):
    monkeypatch.setattr(gate, "read_report", lambda: report_of(dialects=97, capture=98))
    assert gate.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "coverage: bridle/dialects 97.0 % below 98 %"
    assert lines[1] == "    src/bridle/dialects/a.py: lines [], branches [[3, 5]]"
    assert lines[-1] == "coverage: bridle/capture 98.0 % ok"


def test_a_missing_package_does_not_fail_the_coverage_gate(gate, monkeypatch, capsys):
    monkeypatch.setattr(gate, "read_report", lambda: report_of(dialects=100, capture=100))
    assert gate.main() == 0
    assert "coverage: bridle/trajectory does not exist yet" in capsys.readouterr().out


def test_a_package_without_measured_coverage_fails(gate, monkeypatch, capsys):
    monkeypatch.setattr(gate, "read_report", lambda: report_of(dialects=100))
    assert gate.main() == 1
    assert "coverage: bridle/capture 0.0 % below 98 %" in capsys.readouterr().out


def test_a_missing_coverage_data_file_is_an_empty_report(gate, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.coverage.run]\ndata_file = 'none'\n")
    assert gate.read_report() == {"files": {}}

"""The workflow calls the scripts of this repository, and the issue forms are valid."""

from pathlib import Path

import yaml  # type: ignore[import-untyped]  # it ships no types

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"


def test_the_github_workflow_runs_only_scripts_of_the_repository():
    jobs = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]

    assert lines == ["bash .ci/run", "make test", "make dist ARGS=python${{ matrix.python }}"]
    assert (ROOT / ".ci/run").is_file()
    assert (ROOT / "scripts/test").is_file()
    assert (ROOT / "scripts/dist").is_file()
    assert jobs["ci"]["timeout-minutes"] == 90


def test_issue_forms_have_unique_field_ids_and_labels():
    forms = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))

    assert [form.stem for form in forms] == ["bug", "feature"]
    for form in forms:
        content = yaml.safe_load(form.read_text())
        ids = [field["id"] for field in content["body"]]
        assert len(ids) == len(set(ids))
        assert all(field["attributes"]["label"] for field in content["body"])

"""Everything that is chosen by name is documented, and every documented name can be chosen."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridle.config import Budgets, EvaluatorSpec, Limits, Task
from bridle.engines import ENGINES
from bridle.evaluators import EVALUATORS, open_evaluator
from bridle.gateway.metrics import Metrics
from bridle.harnesses import HARNESSES
from bridle.runtimes import RUNTIMES
from bridle.telemetry import TRACKERS
from bridle.trajectory import BUILDERS, MaskReason
from bridle.types import Cause

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


@pytest.mark.parametrize(
    ("names", "where"),
    [
        (EVALUATORS, "guides/evaluators.md"),
        (RUNTIMES, "guides/tasks.md"),
        (TRACKERS, "guides/telemetry.md"),
        (BUILDERS, "guides/tasks.md"),
        (Task.model_fields, "guides/tasks.md"),
        (Limits.model_fields, "guides/tasks.md"),
        (Budgets.model_fields, "guides/tasks.md"),
        ([cause.value for cause in Cause], "guides/tasks.md"),
        (HARNESSES, "guides/harnesses/index.md"),
        ([name for name in ENGINES if name != "https"], "guides/engines.md"),
        ([reason.key for reason in MaskReason], "reference/trajectory.md"),
    ],
)
def test_every_evaluator_runtime_tracker_and_builder_name_is_documented(names, where):
    text = page(where)

    missing = [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]

    assert missing == []


def test_the_cli_reference_page_equals_the_generated_one(load_script):
    made = load_script("make_cli_docs").page()

    assert made == page("reference/cli.md")


@pytest.mark.parametrize("name", ["config.md", "http.md", "python.md"])
def test_each_reference_page_equals_the_generated_one(load_script, name):
    made = load_script("make_reference").PAGES[name]()

    assert made == page(f"reference/{name}"), "run scripts/make_reference"


def test_every_documented_environment_variable_sets_its_config_key():
    from bridle.cli.config import from_environment

    shown = re.findall(r"^\| `\w+` \| `(BRIDLE_\w+)` ", page("reference/config.md"), re.MULTILINE)

    assert len(shown) > 80
    assert [name for name in shown if not from_environment({name: "1"})] == []


BETWEEN_PROCESSES = {
    *("BRIDLE_CHECKING_HARNESS", "BRIDLE_EXEC", "BRIDLE_IN_"),
    *("BRIDLE_IMPORTS_SCORER", "BRIDLE_PLACE", "BRIDLE_RUNTIME", "BRIDLE_SESSION"),
}
"""Variables that Bridle sets for programs that it starts."""


def test_every_environment_variable_read_by_the_code_is_documented():
    sources = "".join(path.read_text() for path in (ROOT / "src" / "bridle").rglob("*.py"))
    read = set(re.findall(r"[\"'](BRIDLE_[A-Z_]+)[\"']", sources)) - BETWEEN_PROCESSES

    assert read
    assert [name for name in read if f"`{name}`" not in page("reference/config.md")] == []


def test_every_make_target_that_the_readme_names_exists():
    targets = subprocess.run(
        ["make", "-pRrq", "-C", ROOT], capture_output=True, check=False, text=True
    ).stdout
    named = re.findall(r"^make ([\w-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)

    assert named
    for target in named:
        assert re.search(rf"^{target}:", targets, re.MULTILINE), target


def test_every_toml_and_json_example_of_the_docs_is_valid(tmp_path):
    import json
    import tomllib

    from bridle.scripted.script import make_script

    toml = re.findall(r"```toml\n(.*?)```", page("guides/tasks.md"), re.DOTALL)
    scripts = re.findall(r"```json\n(.*?)```", page("guides/engines.md"), re.DOTALL)

    assert toml
    assert scripts
    for text in toml:
        Task.model_validate(tomllib.loads(text))
    for text in re.findall(r"```toml\n(.*?)```", page("guides/evaluators.md"), re.DOTALL):
        open_evaluator(EvaluatorSpec(**tomllib.loads(text)["evaluator"]))
    for text in scripts:
        make_script(json.loads(text), "engines.md")


def test_the_rooms_of_the_architecture_page_are_those_that_lint_checks():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers, pure, *_ = project["tool"]["importlinter"]["contracts"]
    text = page("architecture.md").partition("\n## Rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| (.+) \|$", text, re.MULTILINE)
    said = re.findall(r"^The modules (.+?) are pure", text, re.MULTILINE | re.DOTALL)

    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == [
        set(re.findall(r"\((\w+)\)", layer)) for layer in layers["layers"]
    ]
    assert set(re.findall(r"`([\w.]+)`", said[0])) == {
        module.removeprefix("bridle.") for module in pure["source_modules"]
    }


def test_python_m_bridle_cli_runs_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "bridle.cli", "--version"],
        capture_output=True, check=True, text=True,
    )  # fmt: skip

    assert done.stdout.startswith("bridle ")


def test_the_harness_page_has_a_result_for_every_harness_dialect_and_column(load_script):
    table = load_script("make_harness_table")
    said = table.read(page("harnesses.md"))

    wanted = {(*row, column) for column in table.COLUMNS for row in table.rows_of(column)}
    assert said.keys() == wanted
    for (harness, *_), (outcome, note, version) in said.items():
        assert outcome in {"ok", "fails", "n/a"}
        assert note or outcome == "ok"
        assert version == table.version(harness)


def test_every_metric_of_a_gateway_is_in_the_reference():
    text = Metrics().render().decode()
    names = set(re.findall(r"(?m)^# TYPE (\w+)", text))

    listed = set(re.findall(r"`(bridle_\w+)", page("reference/gateway.md")))

    assert {name for name in names if not name.endswith("_created")} - listed == set()

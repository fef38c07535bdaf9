"""Rows of SWE-bench and of sets in its form (SWE-Gym) -> tasks.

A row is recognised by its fields, in JSONL, JSON or Parquet. The agent gets the problem statement
in the repository's image, at `/testbed`. A row that brings its `eval_script`, `log_parser` and
`image` (SWE-bench 5) is graded by the package `swebench`. Any other is graded by
`test_on_output`: the row's `test_patch` is applied in a fresh container after the agent's own
patch, and the tests that it names must pass. What solves a task (`patch`, `test_patch`) is only in
the evaluator's config, which no harness sees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridle.errors import ConfigError
from bridle.types import JSON

MARKS = frozenset({"instance_id", "problem_statement", "base_commit", "FAIL_TO_PASS"})
GRADED = ("image", "eval_script", "log_parser", "eval_type")
"""What `swebench.harness.utils.make_test_spec` (5.0) needs beside the marks."""
WORKDIR = "/testbed"
CONDA = "source /opt/miniconda3/bin/activate testbed 2>/dev/null || true"
"""Both sets' images keep the repository's own Python there."""


def is_swe(row: object) -> bool:
    """Return whether `row` is a row of a SWE-bench-like data set."""
    return isinstance(row, dict) and row.keys() >= MARKS


def swe_task(row: Mapping[str, Any], where: str) -> JSON:
    """A row as the fields of a `Task`. `ConfigError` names `where` and what is missing."""
    fail, keep = (_names(row, field, where) for field in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    if not fail:
        raise ConfigError(f"{where}: FAIL_TO_PASS: names no test")
    by_package = all(row.get(name) is not None for name in GRADED)
    config = _by_package(row) if by_package else _by_names(row, fail, keep, where)
    return {
        "task_id": row["instance_id"],
        "instruction": row["problem_statement"],
        "runtime": {"backend": "docker", "image": _image(row), "workdir": WORKDIR},
        "budgets": {"agent_s": 3600, "evaluate_s": 1800, "init_s": 1800},
        "evaluator": {
            "strategy": "swebench" if by_package else "test_on_output",
            "config": config,
        },
        "metadata": {name: row[name] for name in ("repo", "version", "base_commit") if name in row},
    }


def _names(row: Mapping[str, Any], field: str, where: str) -> list[str]:
    given = row.get(field) or []
    try:
        names = json.loads(given) if isinstance(given, str) else list(given)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: {field}: must be a list of test names, not {given!r:.80}")
    return names


def _image(row: Mapping[str, Any]) -> str:
    """The row's own image, else the one that SWE-bench publishes for the instance."""
    image = row.get("image") or row.get("image_name") or row.get("docker_image")
    if image:
        return str(image)
    name = str(row["instance_id"]).lower().replace("__", "_1776_")
    return f"swebench/sweb.eval.x86_64.{name}:latest"


def _by_package(row: Mapping[str, Any]) -> JSON:
    used = (*MARKS, *GRADED, "repo", "version", "PASS_TO_PASS", "image_assets")
    names = sorted(set(used) - {"problem_statement"})
    return {"instance": {name: row[name] for name in names if row.get(name) is not None}}


def _by_names(row: Mapping[str, Any], fail: Sequence[str], keep: Sequence[str], where: str) -> JSON:
    patch = str(row.get("test_patch") or "")
    files = re.findall(r"(?m)^\+\+\+ b/(\S+)", patch)
    if not files:
        raise ConfigError(f"{where}: test_patch: changes no file that could be tested")
    tests = [name for name in files if name.endswith(".py")]
    return {
        "command": f"{CONDA}; python -m pytest -rA {' '.join(tests)}",
        "fail_to_pass": list(fail),
        "pass_to_pass": list(keep),
        "base": row["base_commit"],
        "exclude": files,
        "test_patch": patch,
    }

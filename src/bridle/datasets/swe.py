"""Rows of SWE-bench and of the sets in its form, as published -> tasks.

A row is recognised by its `instance_id`; it may stand under `instance` (SkyRL-v0-293) or
`metadata.instance` (Polar's). The agent gets the problem statement in the set's own image, at
`/testbed`, and evaluator `swebench` runs the set's own test command. Where that comes from:

    a row with GRADED            the row itself (SWE-bench since package `swebench` 5)
    a row with `install_config`  the row itself (SWE-rebench)
    an image of SWE-smith        package `swesmith`, at grading time
    a repository of SPECS        `swe_specs.json` (SWE-bench's classic rows, Multilingual and
                                 Multimodal's too, SWE-Gym), whose entries name their source;
                                 `scripts/make_swe_specs` writes it

Any other row is refused, as is one with a version, a log parser or a field that cannot be graded.
What solves a task (`patch`, `test_patch`) is only in the evaluator's config, which no harness sees.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from bridle.errors import ConfigError
from bridle.types import JSON

GRADED = ("image", "eval_script", "log_parser", "eval_type")
"""Fields that `swebench.harness.utils.make_test_spec` (5.0) needs besides names of tests."""
SPECS = Path(__file__).with_name("swe_specs.json")
NOT_GRADED = {
    "expected_output_json": "R2E-Gym: its hidden tests lie in the image that the agent gets",
    "selected_test_files_to_run": "SWE-bench Pro: its test scripts and parsers are not in the rows",
    "fix_patch": "Multi-SWE-bench: its package grades, in images that it builds",
}
"""A field that only this set's rows have -> why they cannot be graded here."""
WORKDIR = "/testbed"
BOTH_KINDS = "pass_and_fail"
"""The log names tests that pass, too."""
CONDA = ("source /opt/miniconda3/bin/activate", "conda activate testbed")
"""All of these sets' images keep the repository's own Python there."""
START, END = ": '>>>>> Start Test Output'", ": '>>>>> End Test Output'"
NO_TESTS = (
    ".json",
    ".png",
    "csv",
    ".txt",
    ".md",
    ".jpg",
    ".jpeg",
    ".pkl",
    ".yml",
    ".yaml",
    ".toml",
)
"""Ends of files in a test patch that are no tests (`NON_TEST_EXTS` of package swebench)."""
MOST_BYTES = 1 << 20
"""Of a patch; the largest of these sets is a tenth of it."""
MOST_ARGUMENT = 100_000
"""Bytes of a patch that is a step of `runtime.prepare`: Linux takes 128 KiB in one argument."""
COMMIT = "git -c user.name=SWE-smith -c user.email=swesmith@example.org commit -q --allow-empty"


def is_swe(value: object) -> bool:
    """Return whether `value` is a row of a SWE-bench-like data set."""
    return _instance(value) is not None or _not_graded(value) is not None


def _not_graded(value: object) -> str | None:
    """Return the field by which a row is known to be of a set that cannot be graded."""
    if not isinstance(value, dict) or "task_id" in value:
        return None
    return next((field for field in NOT_GRADED if field in value), None)


def swe_task(value: object, where: str) -> JSON:
    """Return a row of a SWE-bench-like data set as the fields of a `Task`.

    `ConfigError` names `where` (the row's place), the field and what is wrong.
    """
    row = _instance(value) or {}
    graded = all(row.get(name) for name in GRADED)
    if not graded and (field := _not_graded(value)) is not None:
        raise ConfigError(
            f"{where}: {field}: rows with this field cannot be graded: {NOT_GRADED[field]}"
        )
    for field in ("instance_id", "problem_statement", "repo"):
        _text(row, field, where)
    fail, keep = (_names(row, field, where) for field in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    if not fail:
        raise ConfigError(f"{where}: FAIL_TO_PASS: the row names no test, so nothing can be graded")
    image = next(
        (row[name] for name in ("image", "image_name", "docker_image") if row.get(name)), ""
    )
    runtime: JSON = {"backend": "docker", "image": str(image), "workdir": WORKDIR}
    known = ("instance_id", "repo", "version", "base_commit", "image_assets")
    instance = {name: row[name] for name in known if name in row}
    instance |= {"image": image, "FAIL_TO_PASS": fail, "PASS_TO_PASS": keep}
    metadata: JSON = {name: row[name] for name in ("repo", "version", "base_commit") if name in row}
    if graded:
        instance |= {name: row[name] for name in GRADED}
    elif "swesmith." in str(image):
        runtime["prepare"] = [_with_bug(row, (*fail, *keep), fail, where)]
    else:
        spec, runtime["image"] = _spec(row, str(image), where)
        instance |= {name: spec[name] for name in ("log_parser", "eval_type")}
        instance |= {"image": runtime["image"], "eval_script": _script(row, spec, where)}
        metadata |= {"unverified": True} if spec.get("unverified") else {}
    runtime.setdefault("prepare", [{"type": "scrub_git", "target": WORKDIR}])
    instance.setdefault("version", "")
    return {
        "task_id": row["instance_id"],
        "instruction": row["problem_statement"],
        "runtime": runtime,
        "budgets": {"agent_s": 3600, "evaluate_s": 1800, "init_s": 1800},
        "evaluator": {"strategy": "swebench", "config": {"instance": instance}},
        "metadata": metadata,
    }


def swe_oracle(value: object, where: str) -> JSON:
    """Return the settings with which harness `oracle` applies a row's reference patch.

    `ConfigError` if it has none.
    """
    row = _instance(value) or {}
    reverse = "swesmith." in str(row.get("image_name"))
    return {"patch": _text(row, "patch", where), "reverse": reverse}


def _instance(value: object) -> JSON | None:
    """Return the row itself, or the one that is wrapped in it; empty cells are left out."""
    if not isinstance(value, dict) or "task_id" in value:
        return None
    metadata = decode_field(value.get("metadata"))
    inner = metadata.get("instance") if isinstance(metadata, dict) else None
    for found in (value, decode_field(value.get("instance")), decode_field(inner)):
        if isinstance(found, dict) and "instance_id" in found:
            return {name: cell for name, cell in found.items() if cell is not None}
    return None


def decode_field(value: object) -> object:
    """Return the value of a field that holds JSON text; any other value is returned as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _text(row: Mapping[str, Any], field: str, where: str, most: int = MOST_BYTES) -> str:
    value = row.get(field)
    if value is None or value == "":
        raise ConfigError(
            f"{where}: {field}: the row lacks this field; take the data set's row as published"
        )
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {field}: must be text, not {value!r:.80}")
    if (size := len(value.encode(errors="replace"))) > most:
        raise ConfigError(f"{where}: {field}: has {size:,} bytes, and at most {most:,} are taken")
    return value


def _names(row: Mapping[str, Any], field: str, where: str) -> list[str]:
    names = decode_field(row.get(field) or [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: {field}: must be a list of test names, not {names!r:.80}")
    return names


def _patch(row: Mapping[str, Any], field: str, where: str, most: int = MOST_BYTES) -> str:
    """Return a patch that stays in the repository, with one newline at its end."""
    patch = _text(row, field, where, most)
    for path in re.findall(r"(?m)^(?:---|\+\+\+|rename to|copy to) (?:[ab]/)?([^\t\n]+)", patch):
        if path != "/dev/null" and (path.startswith("/") or ".." in PurePosixPath(path).parts):
            raise ConfigError(
                f"{where}: {field}: the patch writes outside of the repository: {path!r}"
            )
    return patch.rstrip("\n") + "\n"


def _applied(patch: str, *words: str) -> str:
    """Return a command that applies a patch, which ends a line that no patch has."""
    end = f"EOF_{sha256(patch.encode(errors='replace')).hexdigest()[:16]}"
    return f"git apply {' '.join(words)} - <<'{end}'\n{patch}{end}"


@cache
def _specs() -> JSON:
    found: JSON = json.loads(SPECS.read_text(encoding="utf-8"))
    return found


def _spec(row: Mapping[str, Any], image: str, where: str) -> tuple[JSON, str]:
    """Return the commands of a row's tests with the kind and the parser of their log, and its
    image.
    """
    specs = _specs()
    own = decode_field(row.get("install_config"))
    if isinstance(own, dict):
        parser, known = str(own.get("log_parser")), specs["log_parsers"]
        if parser not in known["names"] or not isinstance(own.get("test_cmd"), str):
            raise ConfigError(
                f"{where}: install_config: needs one test_cmd, and a log_parser of the "
                f"{known['source']}, not {parser!r} (rows of SWE-rebench V2 cannot be graded yet)"
            )
        if not image:
            raise ConfigError(
                f"{where}: docker_image: the row names no image, and its tests need one"
            )
        return {"eval_type": BOTH_KINDS, **own}, image
    name, version = str(row["repo"]), str(row.get("version"))
    repo = specs["repos"].get(name.lower())
    if repo is None:
        raise ConfigError(
            f"{where}: repo: {name!r} is in no data set whose tests are known here; a row of any "
            f"repository can be graded if it brings {', '.join(GRADED)}"
        )
    source = specs["sets"][repo["set"]]
    spec = next((one for one in repo["specs"] if version in one["versions"]), None)
    if spec is None:
        raise ConfigError(
            f"{where}: version: {source['source']} has no tests for {name} {version}; known are "
            + ", ".join(sorted(each for one in repo["specs"] for each in one["versions"]))
        )
    own_image = source["image"].format(row["instance_id"].lower().replace("__", source["joint"]))
    graded = {"log_parser": repo["log_parser"], "eval_type": repo.get("eval_type", BOTH_KINDS)}
    return {**spec, **graded, "unverified": source.get("unverified", False)}, image or own_image


def _script(row: Mapping[str, Any], spec: Mapping[str, Any], where: str) -> str:
    """Return the set's evaluation: its own tests at their own state, run between the marks."""
    base = _text(row, "base_commit", where)
    if re.fullmatch(r"[0-9a-fA-F]{7,64}", base) is None:
        raise ConfigError(f"{where}: base_commit: must be the hash of a commit, not {base!r:.80}")
    patch = _patch(row, "test_patch", where)
    old = re.findall(r"(?m)^--- a/([^\t\n]+)", patch)
    reset = f"git checkout {base} {shlex.join(old)}" if old else "true"
    install = spec.get("install") or ()
    begin: tuple[str, ...] = ("set +u", *CONDA)
    ready = (*CONDA, *([install] if isinstance(install, str) else install))
    applied, tests = _applied(patch, "-v"), spec.get("commands")
    if tests is None:
        tests = [_tests(row["repo"], str(spec["test_cmd"]), patch, where)]
    else:  # all is installed in the image, and the commands name the tests
        begin, ready, applied = (), (), _applied(patch, "--verbose", "--reject")
        assets = decode_field(row.get("image_assets"))
        if isinstance(assets, dict) and assets.get("test_patch"):
            raise ConfigError(
                f"{where}: image_assets: the tests need pictures from the network, which a "
                "container that grades has not"
            )
    lines = [*begin, f"cd {WORKDIR}", *(spec.get("eval_commands") or ())]
    lines += [f"git config --global --add safe.directory {WORKDIR}", *ready, reset, applied]
    return "\n".join([*lines, *(spec.get("build") or ()), START, *tests, END, reset])


def _tests(repo: str, command: str, patch: str, where: str) -> str:
    """Return the command with the tests that a patch touches, in the repository's own way."""
    if command.endswith(" -k"):  # mypy's tests are cases in data files
        names = re.findall(r"\[case ([^\]]+)\]", patch)
        words = [shlex.quote(" or ".join(names))] if names else []
    else:
        gone = re.findall(r"(?m)^--- a/([^\t\n]+)\n\+\+\+ /dev/null", patch)
        files = re.findall(r"(?m)^diff --git a/.* b/(.*)$", patch)
        names = [name for name in files if not name.endswith(NO_TESTS) and name not in gone]
        if repo == "django/django":
            stems = (name.removesuffix(".py").removeprefix("tests/") for name in names)
            names = [stem.replace("/", ".") for stem in stems]
        words = [shlex.quote(name) for name in names]
    if not words:
        raise ConfigError(
            f"{where}: test_patch: the patch changes no test file, so there is no test to run"
        )
    return " ".join([command, *words])


def _with_bug(
    row: Mapping[str, Any], names: Sequence[str], fail: Sequence[str], where: str
) -> JSON:
    """Return the step that makes SWE-smith's image the task: its bug, and a history without the
    fix.

    As on the set's own branches, the first commit has the bug and the second lacks the tests that
    fail by it.
    """
    if any(".py::" not in name for name in names):
        raise ConfigError(
            f"{where}: FAIL_TO_PASS: of the data set SWE-smith only rows of Python repositories "
            "can be graded"
        )
    patch = _patch(row, "patch", where, MOST_ARGUMENT)
    hidden = sorted({name.partition("::")[0] for name in fail})
    lines = [
        "set -e",
        f"git config --global --add safe.directory {WORKDIR}",
        _applied(patch, "--index", "--whitespace=nowarn"),
        "files=$(mktemp)",
        'git ls-files -z > "$files"',
        "rm -rf .git",
        "git init -q",
        'xargs -0 git add -f -- < "$files"',
        f"{COMMIT} -m 'Task'",
        f"git rm -q --ignore-unmatch -- {shlex.join(hidden)}",
        f"{COMMIT} -m 'Without its tests'",
    ]
    return {"type": "exec", "command": "\n".join(lines)}

"""A task from releases as a folder that Harbor reads.

The image has the repository of the older release and what tests need; nothing of the newer one,
which lies in `tests/` and `solution/` alone. Tests run where the agent worked, as Harbor runs them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from bridle.datasets.environments import VirtualEnvironment
from bridle.evaluators import summary
from bridle.evaluators.base import OBEYED, PYTEST, RUN_PYTEST
from bridle.harnesses.base import as_toml
from bridle.types import JSON

DOCKERFILE: Final = """\
ARG BASE=python:{python}-slim
FROM ${{BASE}}
RUN command -v git || {{ apt-get update && apt-get install -y --no-install-recommends git; }}
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
COPY requirements.lock packages/ /opt/environment/
RUN cd /opt/environment \\
 && python -m pip install --no-cache-dir --only-binary :all: --require-hashes \\
    -r requirements.lock \\
 && rm requirements.lock \\
 && cp -r . "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
WORKDIR /work
COPY repo/ .
RUN {begin}
"""
TEST: Final = """\
#!/bin/bash
main() {{
  export PYTHONSAFEPATH=1
  cd /work || exit 1
  find . -path ./.git -prune -o \\( {obeyed} \\) -exec rm -rf {{}} +
  mapfile -d '' -t removed <"$tests/removed" && rm -rf -- "${{removed[@]}}"
  cp -a "$tests/files/." .
  output=$(mktemp)
  {command} >"$output"
  code=$?
  cat "$output"
  reward=0
  python -I "$tests/summary.py" "$tests/wanted.json" "$code" <"$output" && reward=1
  mkdir -p /logs/verifier && echo "$reward" >/logs/verifier/reward.txt
  exit
}}
tests=$(cd "$(dirname "$0")" && pwd)
main
"""
STARTUP_FILES: Final = sorted(name for name in OBEYED if "pytest" in name or name.endswith(".py"))
"""Files that `python` and `pytest` look for by themselves; deleted before the tests run."""


def write_harbor(
    made: Path,
    folder: Path,
    release: Path,
    environment: VirtualEnvironment,
    decides: Callable[[Path], bool],
) -> None:
    """Write the Harbor folder of the task in folder `made`.

    Its tests take the files that `decides` names from the tree of the newer release.
    """
    task = json.loads((made / "task.json").read_text())
    config, facts, budgets = task["evaluator"]["config"], task["metadata"], task["budgets"]
    shutil.rmtree(folder, ignore_errors=True)
    image, tests = folder / "environment", folder / "tests"
    shutil.copytree(made / "repo", image / "repo", symlinks=True)
    shutil.copytree(made / "solution", folder / "solution")
    shutil.copy(made / "requirements.lock", image)
    python, begin = facts["python"].rpartition(".")[0], task["runtime"]["prepare"][1]["command"]
    _write(image / "Dockerfile", DOCKERFILE.format(python=python, begin=begin))
    for name, text in environment.files.items():
        _write(image / "packages" / name, text)
    before, after = (
        {path for path in _files(tree) if decides(path)} for tree in (made / "repo", release)
    )
    for path in after:
        (tests / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(release / path, tests / "files" / path, follow_symlinks=False)
    _write(tests / "removed", "".join(f"{path}\0" for path in sorted(before - after)))
    _write(tests / "wanted.json", json.dumps(config["fail_to_pass"] + config["pass_to_pass"]))
    for program in (Path(summary.__file__), RUN_PYTEST):
        shutil.copy(program, tests / program.name)
    obeyed = " -o ".join(f"-name {name}" for name in STARTUP_FILES)
    command = PYTEST.sub(rf'\1 "$tests/{RUN_PYTEST.name}"', config["command"])
    _write(tests / "test.sh", TEST.format(obeyed=obeyed, command=command))
    _write(folder / "instruction.md", task["instruction"])
    fields: JSON = {
        "schema_version": "1.1",
        "metadata": facts,
        "agent": {"timeout_sec": float(budgets["agent_s"])},
        "verifier": {"timeout_sec": float(budgets["evaluate_s"])},
        "environment": {"build_timeout_sec": 900.0},
    }
    (folder / "task.toml").write_bytes(as_toml(fields))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def _files(tree: Path) -> Iterable[Path]:
    paths = (path for path in tree.rglob("*") if path.is_symlink() or not path.is_dir())
    return (path.relative_to(tree) for path in paths)

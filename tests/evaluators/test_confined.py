import json
import sys

import pytest

from bridle.errors import EvaluatorError
from bridle.evaluators.function import sandboxed

LOOK = """
import json, os, socket, sys
import tests.evaluators.scoring
seen = {}
for path in json.load(sys.stdin):
    try:
        seen[path] = os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError as error:
        seen[path] = type(error).__name__
try:
    socket.create_connection(("192.0.2.1", 80), 1)
except OSError as error:
    seen["network"] = type(error).__name__
json.dump(seen, sys.stdout)
"""


@pytest.mark.sandbox
async def test_sandboxed_scorer_sees_given_files_but_no_other_host_file_and_no_network(tmp_path):
    secret = tmp_path / "server.token"
    secret.write_text("a secret")
    given = tmp_path / "given.py"
    given.write_text("of the caller's")
    async with sandboxed("tests.evaluators.scoring", given) as place:
        result = await place.exec(
            [sys.executable, "-P", "-c", LOOK],
            stdin=json.dumps([str(secret), str(given)]).encode(),
            timeout_s=30,
            error_log=tmp_path / "log",
        )
    assert result.ok, (tmp_path / "log").read_text()
    seen = json.loads(result.stdout)
    assert seen[str(secret)] == "FileNotFoundError"
    assert seen[str(given)] == "of the caller's"
    assert seen["network"] == "OSError"


@pytest.mark.parametrize("name", ["no_such_module", "benchmarks_of_nobody.deep"])
async def test_sandboxing_a_missing_module_is_an_evaluator_error(name):
    with pytest.raises(EvaluatorError, match=name.partition(".")[0]):
        async with sandboxed(name):
            pass


async def test_sandboxing_a_package_without_init_py_is_refused(tmp_path, monkeypatch):
    """Such as the folder with the server's data, where the server was started above it."""
    (tmp_path / "runs" / "server").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EvaluatorError, match=r"'runs\.server'.*without __init__\.py"):
        async with sandboxed("runs.server"):
            pass

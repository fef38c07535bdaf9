"""Code of the agent in the checker's own process: each row of the table in `docs/security.md`.

What the table calls open gets a reward without the work; two processes close it.
"""

import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.sandbox.forgeries import Checker
from tests.sandbox.test_forgeries import Scene

from bridle.types import JSON

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(180)]

DOCS = Path(__file__).resolve().parents[2] / "docs/security.md"
HONEST = """
def answer(given):
    return str(sum(map(int, given.split())))
if __name__ == "__main__":
    print(answer(input()))
"""
REPORT = (
    "=========== short test summary info ===========\\nPASSED {id}\\n===== 1 passed in 0.01s ====="
)
ID = "tests/test_it.py::test_answer"
JUNIT = '<testsuite><testcase classname="tests.test_it" name="test_answer"/></testsuite>'

WAYS = {
    "ends the process with code 0 at import": "import os\nos._exit(0)",
    "ends it in the middle of the tests": "import os\ndef answer(given):\n    os._exit(0)",
    "skips or deselects the tests": (
        "import pytest\ndef answer(given):\n    pytest.skip('no')\nanswer if __name__ else 0"
    ),
    "skips a test for a reason that says `PASSED` in a line of its own": (
        f"import pytest\ndef answer(given):\n    pytest.skip('no\\nPASSED {ID}')"
        "\nanswer if __name__ else 0"
    ),
    "replaces `pytest`'s report functions in memory": """
from _pytest.reports import TestReport
made = TestReport.from_item_and_call.__func__
def well(cls, item, call):
    call.excinfo = None
    return made(cls, item, call)
TestReport.from_item_and_call = classmethod(well)
def answer(given):
    return "no"
""",
    "replaces `assert`, `==` or the expected value in memory": """
class Anything(str):
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
def answer(given):
    return Anything("no")
if __name__ == "__main__":
    print(answer(""))
""",
    "prints a whole summary of its own, then ends the process with code 0": f"""
import os
def pipes():
    for fd in range(1, 50):
        try:
            if os.readlink(f"/proc/self/fd/{{fd}}").startswith("pipe"):
                os.write(fd, b"{REPORT.format(id=ID)}\\n")
        except OSError:
            pass
pipes()
os._exit(0)
""",
    "writes the JUnit file itself, then ends the process with code 0": (
        f"import os\nopen('/work/out.xml', 'w').write({JUNIT!r})\nos._exit(0)"
    ),
    "reads the tests' files and gives what they expect": r"""
import pathlib, re
def answer(given):
    [test] = pathlib.Path("/work").glob("*/test_it.py")
    return re.search(r"== .(\d+)", test.read_text())[1]
if __name__ == "__main__":
    print(answer(""))
""",
    "starts a process that overwrites the reward file while the checker runs": """
import subprocess
late = "until [ -s /work/reward.txt ]; do sleep 0.01; done; echo 1 > /work/reward.txt"
subprocess.Popen(["bash", "-c", late], start_new_session=True,
                 stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
def answer(given):
    return "no"
""",
}
"""A row of the table -> the agent's `solution.py`."""

ANOTHER_USER = {*list(WAYS)[-2:]}
"""Ways that the checker's files open, so that the program needs a user of its own."""

PLAIN = "from solution import answer\ndef test_answer():\n    assert answer('17 25') == '42'\n"
TWO = """
import subprocess
def test_answer():
    program = [*{user}, "python3", "solution.py"]
    done = subprocess.run(program, input="17 25", capture_output=True, text=True, timeout=10)
    assert done.stdout == "42\\n"
"""
SETPRIV = ("setpriv", "--reuid=65534", "--clear-groups")
PYTEST = "python3 -m pytest -p no:cacheprovider -q -rA"
ENV = {"PYTHONPATH": "/opt/site:/work", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@dataclass(frozen=True)
class Agent:
    """The part of a forgery's `Way` that is needed: the agent's command."""

    left: str


def checker(strategy, way, test):
    """A checker of that kind whose test file is `test`."""
    if strategy == "test_on_output":
        begin = (
            "git init -q . && git config user.name a && git config user.email a@b && mkdir tests"
            f" && cat > tests/test_it.py <<'END'\n{test}\nEND\n"
            "echo > solution.py && git add -A && git commit -qm begin"
        )
        line = f"chmod 700 tests; {PYTEST} tests"
        config: JSON = {"command": line, "fail_to_pass": [ID], "exclude": ["tests/*"]}
        if "JUnit" in way:
            config |= {"command": f"{PYTEST} --junitxml out.xml tests", "junit": "out.xml",
                       "fail_to_pass": ["tests.test_it::test_answer"]}  # fmt: skip
        return Checker(config, strategy, {}, ENV, begin, programs=True)
    line = f"chmod 700 check; {PYTEST} check"
    config = {"command": line, "files": None}
    if "reward file" in way:
        line += " && echo 1 > reward.txt || echo 0 > reward.txt; sleep 0.5"
        config |= {"command": line, "reward_file": "reward.txt"}
    return Checker(config, strategy, {"check/test_it.py": test}, ENV, programs=True)


async def reward(backend, strategy, way, test, solution, folder):
    """Return what `solution` is worth to that checker."""
    scene = Scene(backend, checker(strategy, way, test), folder, trusted=False)
    async with AsyncExitStack() as resources:
        agents = await scene.runtime(resources)
        assert (await agents.exec(f"cat > solution.py <<'END'\n{solution}\nEND")).ok
        await agents.kill()
        return await scene.reward(agents, resources)


def rows():
    """(the agent's code, what the table says of `test_on_output`, of `command`)."""
    found = DOCS.read_text().partition("## Code of the agent in a test")[2]
    return re.findall(r"(?m)^\| (.+?) \| (.+?) \| (.+?) \|$", found)[1:]


def cases():
    """Every way, in each evaluator whose table says something of it."""
    for way, *said in rows():
        for strategy, words in zip(("test_on_output", "command"), said, strict=True):
            if way in WAYS and words != "not read":
                marks = pytest.mark.drawn_with(f"{strategy} {way}")
                yield pytest.param(strategy, way, words == "open", id=way, marks=marks)


@pytest.mark.parametrize(("strategy", "way", "is_open"), list(cases()))
async def test_each_attack_in_the_checker_s_process_succeeds_exactly_where_the_docs_say(
    strategy, way, is_open, tmp_path
):
    found = await reward("bubblewrap", strategy, way, PLAIN, WAYS[way], tmp_path)
    assert (found == 1.0) is is_open


@pytest.mark.parametrize(("strategy", "way", "is_open"), list(cases()))
async def test_a_checker_in_its_own_process_defeats_each_attack(strategy, way, is_open, tmp_path):
    backend, user = ("docker", SETPRIV) if way in ANOTHER_USER else ("bubblewrap", ())
    test = TWO.format(user=user)
    found = await reward(backend, strategy, way, test, WAYS[way], tmp_path / "forged")
    assert found != 1.0
    assert await reward(backend, strategy, way, test, HONEST, tmp_path / "honest") == 1.0


@pytest.mark.core
def test_every_attack_in_the_docs_table_is_tried_by_a_test():
    others = {
        "prints a second, better summary after the runner's",
        "prints a summary before the runner's",
        "brings a `conftest.py`, `pytest.ini` or `sitecustomize.py`",
    }
    assert {way for way, *_ in rows()} == {*WAYS, *others}

"""Every packaged harness, unmodified, in a sandbox: the profile keeps it from none of its work."""

import pytest
from tests.real_clients.matrix import MINI_ENDS
from tests.real_clients.real import TURNS, did_its_work, run
from tests.real_clients.test_harness_apis import CASES

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(900)]

NAMES = sorted({name for name, _ in CASES})
"""All but Aider, which has no tools."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.drawn_with(name)) for name in NAMES]
)
async def test_every_packaged_harness_completes_a_task_in_a_sandbox(name, tmp_path):
    turns = TURNS
    if name == "mini_swe_agent":
        turns = [*TURNS[:-1], {**TURNS[-1], "shell": [MINI_ENDS]}]
    result, exchanges = await run(tmp_path, name, runtime={"backend": "bubblewrap"}, turns=turns)
    did_its_work(result, exchanges)
    assert result.metadata["limits"] in {"kernel", "watched"}


@pytest.mark.drawn_with("aider")
async def test_aider_writes_files_in_a_sandbox(tmp_path):
    result, exchanges = await run(
        tmp_path,
        "aider",
        agent={"settings": {"files": ["made.txt"]}},
        runtime={"backend": "bubblewrap"},
        turns=[{"content": "made.txt\n```\nhello\n```"}],
        check='test "$(cat made.txt)" = hello',
    )
    did_its_work(result, exchanges, calls=1)

"""The suite itself: it passes on what conforms, and says what is wrong on what does not."""

from dataclasses import replace

import pytest

from bridle.config import RuntimeSpec
from bridle.runtimes.conformance import CHECKS, bench, run_conformance
from bridle.runtimes.local import LocalRuntime


def local(session_id, scratch, mounts):
    return LocalRuntime(RuntimeSpec(), session_id, scratch, mounts)


@pytest.mark.parametrize("name", CHECKS)
async def test_local_conforms(name, tmp_path):
    async with bench(local, tmp_path / "bench") as place:
        await CHECKS[name](place)


class Lying(LocalRuntime):
    """Says that everything went well, and forgets to kill."""

    async def exec(self, command, **options):
        result = await super().exec(command, **options)
        return replace(result, exit_code=0)

    async def kill(self):
        pass


async def test_a_runtime_that_lies_about_exit_codes_is_found(tmp_path):
    def lying(session_id, scratch, mounts):
        return Lying(RuntimeSpec(), session_id, scratch, mounts)

    names = ("exit_codes_are_true", "a_pipeline_fails_with_any_of_its_parts", "folders_come_out")
    kept = dict(CHECKS)
    try:
        for name in set(CHECKS) - set(names):
            del CHECKS[name]
        results = [result async for result in run_conformance(lying, tmp_path)]
    finally:
        CHECKS.update(kept)
    assert [(result.name, result.error is None) for result in results] == [
        (names[0], False),
        (names[1], False),
        (names[2], True),
    ]
    assert "ExecResult(exit_code=0" in str(results[0].error)

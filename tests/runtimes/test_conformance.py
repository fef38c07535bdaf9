"""The suite itself: it passes on what conforms, and says what is wrong on what does not."""

from dataclasses import replace

import pytest

from bridle.errors import RuntimeFailure
from bridle.runtimes import conformance
from bridle.runtimes.conformance import CHECKS, Nonconformity, run_check
from bridle.runtimes.local import LocalRuntime


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_local_runtime_passes_each_conformance_check(check, tmp_path):
    await run_check(check, LocalRuntime, tmp_path)


class Lying(LocalRuntime):
    """Says that everything went well, and keeps working when it was stopped."""

    async def exec(self, command, **options):
        self._usable = True
        result = await super().exec(command, **options)
        return replace(result, exit_code=0)


async def test_conformance_suite_detects_false_exit_codes(tmp_path):
    with pytest.raises(Nonconformity, match=r"ExecResult\(exit_code=0"):
        await run_check(conformance.exit_codes_are_true, Lying, tmp_path / "codes")
    await run_check(conformance.folders_come_out, Lying, tmp_path / "folders")


async def test_conformance_suite_detects_a_runtime_that_runs_commands_after_stop(tmp_path):
    with pytest.raises(
        Nonconformity, match="must raise RuntimeFailure here, and it returned ExecResult"
    ):
        await run_check(conformance.stop_can_be_repeated_and_is_the_end, Lying, tmp_path)


class Broken(LocalRuntime):
    async def start(self):
        raise RuntimeFailure("no such image")


async def test_conformance_check_raises_the_start_error_of_the_runtime(tmp_path):
    with pytest.raises(RuntimeFailure, match="no such image"):
        await run_check(conformance.exit_codes_are_true, Broken, tmp_path)

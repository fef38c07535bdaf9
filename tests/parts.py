"""One test run in two processes, told as one: the closing line counts the tests of both.

`--beside "ARGUMENTS"` starts a second pytest with these arguments at the same time; the paths among
them are left out here. It tells each of its reports in a file (`--tell`), from which they are told
again here, so that failures, counts and the exit status are those of one run. A second process that
ends in any other way than after its tests is an error of the run, with the end of what it wrote.

Which paths go beside is written in `scripts/test`; nothing is shared out while tests run.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

SHOWN_CHARS = 8000
"""How much of what a failed process wrote is shown."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--beside", metavar="ARGUMENTS", help="run these tests in a second process at the same time"
    )
    parser.addoption("--tell", metavar="FILE", type=Path, help="write every report to this file")


def pytest_configure(config: pytest.Config) -> None:
    if (arguments := config.getoption("beside")) is not None:
        config.pluginmanager.register(Beside(config, shlex.split(arguments)))
    if (path := config.getoption("tell")) is not None:
        config.pluginmanager.register(Teller(config, path))


class Teller:
    """Writes one line of JSON for each thing that the other process tells again."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._file = path.open("w")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tell("collected", len(session.items))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._tell("deselected", len(items))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tell("report", self._serialized(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._tell("collect", self._serialized(report))

    def pytest_sessionfinish(self) -> None:
        self._tell("finished", None)

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _serialized(self, report: pytest.TestReport | pytest.CollectReport) -> object:
        return self._config.hook.pytest_report_to_serializable(config=self._config, report=report)

    def _tell(self, what: str, value: object) -> None:
        self._file.write(json.dumps([what, value], default=str) + "\n")
        self._file.flush()


class Beside:
    """The other process, and what it told."""

    def __init__(self, config: pytest.Config, arguments: Sequence[str]) -> None:
        self._config = config
        self._arguments = arguments
        self._folder = tempfile.TemporaryDirectory(prefix="tests-beside-")
        self._told = Path(self._folder.name) / "told.jsonl"
        self._told.touch()
        self._lines = self._told.open()
        self._part = ""
        self._failed = self._ended = False
        self._process: subprocess.Popen[bytes] | None = None
        paths = [argument for argument in arguments if not argument.startswith("-")]
        config.option.ignore = [*(config.option.ignore or ()), *paths]

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "log.txt"

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        command = [sys.executable, "-m", "pytest", "-p", __name__, f"--tell={self._told}"]
        command += ["-o", f"cache_dir={self._folder.name}/cache"]
        command += [*self._same_settings(), *self._arguments]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        if (terminal := self._config.pluginmanager.getplugin("terminalreporter")) is not None:
            terminal.showfspath = False  # a line of tests of two processes has no one file

    def _same_settings(self) -> list[str]:
        """What both processes must be told: skips, and the order of tests."""
        same = ["--no-skips"] if self._config.getoption("--no-skips", default=False) else []
        seed = self._config.getoption("randomly_seed", default=None)
        return [*same, "-p", "no:randomly"] if seed is None else [*same, f"--randomly-seed={seed}"]

    def pytest_runtest_logfinish(self) -> None:
        self._tell_again()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        assert self._process is not None
        while True:
            try:
                code = self._process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                self._tell_again()
            else:
                break
        self._tell_again()
        # The code also says 2 for tests that could not be collected.
        if not self._ended or code not in ((1, 2) if self._failed else (0,)):
            why = f"ended with code {code}" if code else "ended before its last test"
            text = f"{why}:\n{self._log.read_text(errors='replace')[-SHOWN_CHARS:]}"
            report = pytest.CollectReport("tests beside", "failed", text, None)
            self._config.hook.pytest_collectreport(report=report)
        return result

    def _tell_again(self) -> None:
        """Tell what the other process told since the last time."""
        *whole, self._part = (self._part + self._lines.read()).split("\n")
        for line in whole:
            what, value = json.loads(line)
            getattr(self, f"_{what}")(value)

    def _collected(self, count: int) -> None:
        session = self._config.pluginmanager.getplugin("session")
        assert isinstance(session, pytest.Session)
        session.testscollected += count

    def _deselected(self, count: int) -> None:
        self._config.hook.pytest_deselected(items=[SimpleNamespace()] * count)

    def _finished(self, _: object) -> None:
        self._ended = True

    def _report(self, value: object) -> None:
        self._hear("pytest_runtest_logreport", value)

    def _collect(self, value: object) -> None:
        self._hear("pytest_collectreport", value)

    def _hear(self, hook: str, value: object) -> None:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=value)
        self._failed = self._failed or report.failed
        getattr(self._config.hook, hook)(report=report)

    def pytest_unconfigure(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._lines.close()
        self._folder.cleanup()

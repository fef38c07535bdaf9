"""Rules for every test.

- The environment is clean: nothing of the caller's keys, proxies or settings reaches a test, and
  model hubs are offline.
- A test leaves no asyncio task and no child process behind.
- Under `--no-skips`, which every suite script passes, a skip is a failure: a suite that could not
  look has not passed.

Settings meant for the tests themselves start with `BRIDLE_TEST_` and are kept.
`tests/test_conftest.py` holds the proofs.
"""

import asyncio
import inspect
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

FOREIGN_PREFIXES = ("BRIDLE_", "OPENAI_", "ANTHROPIC_", "GOOGLE_", "GEMINI_", "CLAUDE_", "CODEX_")
"""Environment variables that change what Bridle or a provider's client does."""

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")

GRACE_S = 5.0
"""How long tasks and processes that were asked to end may take to do so on a busy machine."""

# A busy machine is no finding: no deadline, and slow generation is no failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A gate gives one answer for one commit: where `CI` is set the examples are fixed. New ones are
# searched by every other run, and by thousands in `make long`.
settings.register_profile(
    "offline", patient, max_examples=50, derandomize="CI" in os.environ, database=None
)
settings.register_profile("long", patient, max_examples=3000)
settings.load_profile("offline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="a skipped test or module is a failure"
    )


def pytest_configure() -> None:
    for name in list(os.environ):
        foreign = name.startswith(FOREIGN_PREFIXES) and not name.startswith("BRIDLE_TEST_")
        if foreign or name.upper() in PROXIES:
            del os.environ[name]
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    # Servers of tests are not found by clients of whoever runs them.
    os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), f"bridle-tests-{os.getuid()}"))
    # Without cached bytecode each pytest that a test starts spends a second rewriting its plugins.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A shell starts what is in the background with this signal ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where a test does not say, containment is not its theme.
    os.environ["BRIDLE_RUNTIME"] = "local"


# ---- no skips


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):
        _refuse_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(collector.config, report)
    return report


def _refuse_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure that repeats its reason."""
    if report.skipped and config.getoption("--no-skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped under --no-skips: {reason}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread: the fastest for a tiny model, most of all on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- nothing left behind


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a task or a child process; such a process is ended here."""
    before = child_processes()
    if _is_async(request.function):
        request.getfixturevalue("no_task_left_behind")
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := child_processes() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        names = sorted(_command_line(pid) for pid in left)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"left child processes behind: {names}", pytrace=False)


@pytest.fixture
async def no_task_left_behind() -> AsyncIterator[None]:
    """Fail an async test whose loop still runs a task when all its other fixtures are closed."""
    before = asyncio.all_tasks()

    def left() -> set[asyncio.Task[object]]:
        return asyncio.all_tasks() - before - {asyncio.current_task()}

    yield
    deadline = time.monotonic() + GRACE_S
    while (tasks := left()) and (grace_s := deadline - time.monotonic()) > 0:
        await asyncio.wait(tasks, timeout=grace_s)
    if names := sorted({getattr(task.get_coro(), "__qualname__", str(task)) for task in left()}):
        pytest.fail(f"left tasks behind: {names}", pytrace=False)


def _is_async(function: Callable[..., object]) -> bool:
    """Return whether pytest-asyncio runs this test, also under hypothesis's wrapper."""
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    return inspect.iscoroutinefunction(inner)


def child_processes() -> set[int]:
    """Living children of this process; none where the system has no /proc.

    Python's own resource tracker is left out: it serves the whole run.
    """
    listed = Path("/proc/self/task").glob("*/children")
    pids = {int(pid) for path in listed for pid in _read(path).split()}
    return {pid for pid in pids if _is_alive(pid) and "resource_tracker" not in _command_line(pid)}


def _is_alive(pid: int) -> bool:
    """False for a zombie, which has ended and only waits to be collected."""
    state = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1]
    return bool(state) and state != ["Z"]


def _command_line(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it ended while we looked
        return ""

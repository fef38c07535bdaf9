"""Errors: one per boundary, classified once."""

import asyncio
import errno
import json
import re
import sqlite3
import tomllib
from pathlib import Path

import pytest

from bridle.errors import (
    ContextOverflowError,
    EngineError,
    EvaluatorError,
    RequestError,
    StoreError,
    boundary,
    requirement,
    root_cause,
)


@pytest.mark.parametrize(
    ("direct_url", "words"),
    [
        (None, "'bridle[train]'"),
        (
            {"url": "file:///home/me/my%20code", "dir_info": {"editable": True}},
            "-e '/home/me/my code[train]'",
        ),
        (
            {"url": "file:///tmp/bridle-0.1.0-py3-none-any.whl", "archive_info": {}},
            "'bridle[train] @ file:///tmp/bridle-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/bridle", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "'bridle[train] @ git+https://host/bridle'",
        ),
    ],
)
def test_the_pip_requirement_of_an_extra_fits_how_bridle_was_installed(direct_url, words):
    assert requirement(direct_url and json.dumps(direct_url), "train") == words


def test_an_exception_crossing_a_boundary_is_wrapped_in_the_boundary_s_error():
    with (
        pytest.raises(EvaluatorError, match="scoring: ValueError: bad") as caught,
        boundary(EvaluatorError, "scoring"),
    ):
        raise ValueError("bad")

    assert isinstance(caught.value.__cause__, ValueError)


def test_bridle_errors_and_cancellation_cross_a_boundary_unchanged():
    with pytest.raises(StoreError), boundary(EvaluatorError, "x"):
        raise StoreError("full")
    with pytest.raises(asyncio.CancelledError), boundary(EvaluatorError, "x"):
        raise asyncio.CancelledError


def test_engine_and_request_errors_have_status_retryability_and_counts():
    overflow = ContextOverflowError(100, 64, None)
    engine = EngineError("busy", retryable=True, status=503)
    request = RequestError("no", status=429, code="rate_limit", param="n", retry_after_s=2)
    assert not request.passes
    assert RequestError("no", status=503, code="overloaded").passes

    assert isinstance(overflow, EngineError)
    assert "100 tokens" in str(overflow)
    assert (engine.retryable, engine.status) == (True, 503)
    assert (request.status, request.param, request.retry_after_s) == (429, "n", 2)


ROOT = Path(__file__).resolve().parents[1]


def test_every_extra_named_in_an_install_message_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"""install_extra\(["'](\w+)["']\)""", sources))

    assert {"embedded", "ray"} <= named <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("where", ["README.md", "docs/**/*.md", "src/**/*.py", "examples/**/*.md"])
def test_no_text_tells_to_install_bridle_from_a_package_index(where):
    texts = {path: path.read_text() for path in ROOT.glob(where) if path.is_file()}

    assert texts
    assert [path for path, text in texts.items() if re.search(r"install\s+'?bridle", text)] == []


@pytest.mark.parametrize(
    ("cause", "result"),
    [
        (OSError(errno.ENOSPC, "x", "/secret/file"), "No space left on device"),
        (sqlite3.OperationalError("database or disk is full"), "database or disk is full"),
        (ValueError("/secret"), "ValueError"),
    ],
)
def test_the_root_cause_of_a_store_error_contains_no_path(cause, result):
    with pytest.raises(StoreError) as raised, boundary(StoreError, "/secret/file: cannot write"):
        raise cause
    assert root_cause(raised.value) == result

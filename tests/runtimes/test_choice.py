"""The runtime of tasks that name none."""

import pytest

from bridle.config import AUTO, RuntimeSpec
from bridle.runtimes import (
    VARIABLE,
    _warn_once,
    chosen,
    default_backend,
    make_runtime,
    runtime_class,
)
from bridle.runtimes.bubblewrap import BubblewrapRuntime
from bridle.runtimes.docker import DockerRuntime
from bridle.runtimes.local import LocalRuntime


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose `bwrap` is this script; `None` = it has none."""
    monkeypatch.delenv(VARIABLE)
    _warn_once.cache_clear()

    def make(bwrap):
        for name in ("bash", "tar", "perl", *(() if bwrap is None else ("bwrap",))):
            (tmp_path / name).write_text(f"#!/bin/sh\n{bwrap}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return make


def test_a_machine_whose_bwrap_works_contains(machine, tmp_path):
    machine('for word in "$@"; do :; done; [ "$word" = true ]')
    assert default_backend() == ("bubblewrap", "bwrap is there and works")
    assert chosen(RuntimeSpec()).backend == "bubblewrap"
    assert isinstance(make_runtime(RuntimeSpec(), "s", tmp_path), BubblewrapRuntime)
    assert runtime_class(AUTO) is BubblewrapRuntime


@pytest.mark.parametrize(
    ("bwrap", "why"),
    [
        (None, "needs bwrap: install the packages bubblewrap"),
        ("echo setting up uid map: Permission denied >&2; exit 1", "uid map: Permission denied"),
    ],
)
def test_one_whose_bwrap_does_not_falls_back_and_says_why(machine, tmp_path, bwrap, why, capsys):
    machine(bwrap)
    backend, reason = default_backend()
    assert backend == "local"
    assert reason.startswith("NOTHING IS CONTAINED: ")
    assert why in reason
    assert isinstance(make_runtime(RuntimeSpec(), "s", tmp_path), LocalRuntime)
    assert "contains nothing" in "".join(capsys.readouterr())


@pytest.mark.parametrize("asked", [{"image": "python:3.12"}, {"image": "x", "gpus": 1}])
def test_an_image_is_a_container_s(machine, tmp_path, asked):
    machine(None)
    assert chosen(RuntimeSpec(**asked)).backend == "docker"
    assert isinstance(make_runtime(RuntimeSpec(**asked), "s", tmp_path), DockerRuntime)


def test_a_root_folder_is_bubblewrap_s(machine, tmp_path):
    machine("true")
    assert chosen(RuntimeSpec(image=str(tmp_path))).backend == "bubblewrap"


def test_an_operator_names_another_one(monkeypatch):
    monkeypatch.setenv(VARIABLE, "my.place:Place")
    assert chosen(RuntimeSpec()).backend == "my.place:Place"
    assert default_backend() == ("my.place:Place", "$BRIDLE_RUNTIME names it")


def test_what_a_task_names_stays(machine):
    machine("true")
    for spec in (RuntimeSpec(backend="local"), RuntimeSpec(backend="docker", image="x")):
        assert chosen(spec) is spec

import pytest

from bridle.config import AUTO, RuntimeSpec
from bridle.errors import ConfigError, RuntimeFailure
from bridle.runtimes import (
    RUNTIMES,
    VARIABLE,
    _warn_once,
    check_machine,
    default_backend,
    make_runtime,
    resolve_auto,
    runtime_class,
)
from bridle.runtimes.apptainer import ApptainerRuntime
from bridle.runtimes.bubblewrap import BubblewrapRuntime
from bridle.runtimes.docker import DockerRuntime
from bridle.runtimes.local import LocalRuntime


def test_every_runtime_name_in_the_table_loads_its_class():
    loaded: dict[str, object] = {name: runtime_class(name) for name in RUNTIMES}
    kinds: tuple[object, ...] = (LocalRuntime, BubblewrapRuntime, DockerRuntime, ApptainerRuntime)
    names = ("local", "bubblewrap", "docker", "apptainer")
    assert [loaded[name] for name in names] == [*kinds]


def test_a_custom_runtime_is_loaded_by_its_path(tmp_path):
    spec = RuntimeSpec(backend="bridle.runtimes.local:LocalRuntime")
    assert isinstance(make_runtime(spec, "s", tmp_path), LocalRuntime)


def test_an_unknown_runtime_is_refused_with_the_known_names(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown runtime 'dokcer'; known: .*local"):
        make_runtime(RuntimeSpec(backend="dokcer"), "s", tmp_path)


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


def test_check_machine_names_the_program_that_a_runtime_needs(machine):
    machine(None)
    for backend, lacking in (
        *(("bubblewrap", "needs bwrap"), ("docker", "needs the command docker")),
        ("apptainer", "needs the command apptainer"),
    ):
        with pytest.raises(RuntimeFailure, match=lacking):
            check_machine(backend)
    check_machine("local")
    check_machine("package.module:Class")


def test_auto_backend_is_bubblewrap_where_bwrap_works(machine, tmp_path):
    machine('for word in "$@"; do :; done; [ "$word" = true ]')
    check_machine("bubblewrap")
    assert default_backend() == ("bubblewrap", "bwrap is there and works")
    assert resolve_auto(RuntimeSpec()).backend == "bubblewrap"
    assert isinstance(make_runtime(RuntimeSpec(), "s", tmp_path), BubblewrapRuntime)
    assert runtime_class(AUTO) is BubblewrapRuntime


@pytest.mark.parametrize(
    ("bwrap", "why"),
    [
        (None, "needs bwrap: install the packages bubblewrap"),
        ("echo setting up uid map: Permission denied >&2; exit 1", "uid map: Permission denied"),
    ],
)
def test_auto_backend_falls_back_to_local_with_a_warning_where_bwrap_does_not_work(
    machine, tmp_path, bwrap, why, capsys
):
    machine(bwrap)
    backend, reason = default_backend()
    assert backend == "local"
    assert reason.startswith("NOTHING IS CONTAINED: ")
    assert why in reason
    assert isinstance(make_runtime(RuntimeSpec(), "s", tmp_path), LocalRuntime)
    assert "contains nothing" in "".join(capsys.readouterr())


@pytest.mark.parametrize("asked", [{"image": "python:3.12"}, {"image": "x", "gpus": 1}])
def test_auto_backend_for_an_image_name_is_docker(machine, tmp_path, asked):
    machine(None)
    assert resolve_auto(RuntimeSpec(**asked)).backend == "docker"
    assert isinstance(make_runtime(RuntimeSpec(**asked), "s", tmp_path), DockerRuntime)


def test_auto_backend_for_a_root_folder_is_bubblewrap(machine, tmp_path):
    machine("true")
    assert resolve_auto(RuntimeSpec(image=str(tmp_path))).backend == "bubblewrap"


def test_bridle_runtime_variable_overrides_the_default_backend(monkeypatch):
    monkeypatch.setenv(VARIABLE, "my.place:Place")
    assert resolve_auto(RuntimeSpec()).backend == "my.place:Place"
    assert default_backend() == ("my.place:Place", "$BRIDLE_RUNTIME names it")


def test_an_explicit_backend_is_not_replaced_by_the_default(machine):
    machine("true")
    for spec in (RuntimeSpec(backend="local"), RuntimeSpec(backend="docker", image="x")):
        assert resolve_auto(spec) is spec

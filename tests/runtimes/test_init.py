import pytest

from bridle.config import RuntimeSpec
from bridle.errors import ConfigError
from bridle.runtimes import RUNTIMES, make_runtime, runtime_class
from bridle.runtimes.apptainer import ApptainerRuntime
from bridle.runtimes.bubblewrap import BubblewrapRuntime
from bridle.runtimes.docker import DockerRuntime
from bridle.runtimes.local import LocalRuntime


def test_every_name_in_the_table_loads():
    loaded: dict[str, object] = {name: runtime_class(name) for name in RUNTIMES}
    kinds: tuple[object, ...] = (LocalRuntime, BubblewrapRuntime, DockerRuntime, ApptainerRuntime)
    names = ("local", "bubblewrap", "docker", "apptainer")
    assert [loaded[name] for name in names] == [*kinds]


def test_a_runtime_of_ones_own_is_found_by_its_path(tmp_path):
    spec = RuntimeSpec(backend="bridle.runtimes.local:LocalRuntime")
    assert isinstance(make_runtime(spec, "s", tmp_path), LocalRuntime)


def test_an_unknown_runtime_is_named_with_those_that_are_known(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown runtime 'dokcer'; known: .*local"):
        make_runtime(RuntimeSpec(backend="dokcer"), "s", tmp_path)

"""Scripts have no suffix and no package; this is how a test gets one as a module."""

from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def load_script():
    def load(name):
        module = ModuleType(name)
        module.__file__ = str(SCRIPTS / name)
        SourceFileLoader(name, module.__file__).exec_module(module)
        return module

    return load

"""Scripts have no suffix and no package; this is how a test gets one as a module."""

import subprocess
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


@pytest.fixture
def findings_in(load_script, tmp_path):
    """Return what a script finds in a fresh checkout with these files."""
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)

    def check(script, files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return list(load_script(script).findings(tmp_path))

    return check

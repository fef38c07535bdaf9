"""Empty modules for imports of a trainer's package that its data path does not use.

A remote sandbox's SDK, an MCP server or a web page's theme would bring dozens of packages into the
suite. The modules under test are always the real ones.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from contextlib import contextmanager
from pathlib import Path


class _Module(types.ModuleType):
    """Any name asked of it is a class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, *names):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def absent(*names):
    """Inside, `import` of these packages gives a stand-in; afterwards they are not there again."""
    finder = _Finder(*names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
            del sys.modules[name]


@contextmanager
def bare(*packages):
    """Inside, these packages are there without what their `__init__` does, outermost first."""
    spec = importlib.util.find_spec(packages[0])
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.removeprefix(packages[0]).split(".")))]
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in packages:
            del sys.modules[name]

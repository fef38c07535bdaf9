"""Stands in for the packages of kernels that SGLang imports and a CPU cannot have.

On the path of a server under test only. Their decorators leave a function as it is, so that
SGLang's files load; a kernel that is called raises. A dense Qwen3 on `--attention-backend
torch_native` calls none. `torchvision` and `IPython` are for other models and for notebooks.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = ("triton", "sgl_kernel", "torchvision", "IPython")


class Kind(type):
    """A class of such a package: a name to be inherited from, or to hold constants."""

    def __call__(cls, *_given: object, **_named: object) -> object:
        """Some object."""
        return object()

    def __getattr__(cls, name: str) -> str:
        """A constant."""
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class Absent(ModuleType):
    """A module, or a function of one."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        """Whatever is asked for: classes begin with a capital."""
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        made = Kind(name, (), {"__module__": self.__name__}) if name[0].isupper() else Absent(full)
        setattr(self, name, made)
        return made

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Return the function if used as a decorator; any other call of a kernel fails."""
        alone = len(given) == 1 and not named
        if alone and (callable(given[0]) or self.__name__.endswith("constexpr")):
            return given[0]
        if given and not self.__name__.startswith("triton"):
            raise NotImplementedError(f"{self.__name__} is not on this machine")
        return lambda function: function


class Finder(MetaPathFinder, Loader):
    """Finds them before the path is searched."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        """A spec for every module below `NAMES`."""
        del path, target
        known = fullname.partition(".")[0] in NAMES
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that has everything."""
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be run."""


sys.meta_path.append(Finder())

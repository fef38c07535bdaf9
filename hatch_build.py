"""Compiles `bridle.engines._core` for a wheel or an editable install, if there is a C compiler.

Without one the wheel is pure Python: Bridle then reads all replies with the code that also reads
the unusual ones.
"""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

SOURCE = "src/bridle/engines/_core.c"
MODULE = "_core.abi3.so"
"""It uses the limited API of CPython 3.11, so one build serves all later versions."""


class CoreBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Build hook of the wheel target."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into the source tree for an editable install, else into the wheel."""
        source = Path(self.root, SOURCE)
        self._folder = tempfile.TemporaryDirectory()
        made = Path(self._folder.name, MODULE)
        in_tree = source.with_name(MODULE)
        if not self._compiled(source, made):
            if version == "editable":
                in_tree.unlink(missing_ok=True)  # of an older source
            return
        if version == "editable":
            new = in_tree.with_suffix(".new")
            new.write_bytes(made.read_bytes())
            new.replace(in_tree)  # at once: running processes have the old file open
        else:
            build_data["force_include"][str(made)] = f"bridle/engines/{MODULE}"
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{next(sys_tags()).platform}"

    def finalize(self, *_: object) -> None:
        """Remove the compiled file, which is in the wheel now."""
        self._folder.cleanup()

    def _compiled(self, source: Path, made: Path) -> bool:
        """Compile `source`; `False` = that is not possible here, which is printed."""
        linker = shlex.split(sysconfig.get_config_var("LDSHARED") or "cc -shared")
        include = f"-I{sysconfig.get_path('include')}"
        command = [*linker, "-O2", "-fPIC", include, str(source), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            self.app.display_warning(f"_core is not compiled: {error}")
            return False
        if done.returncode:
            self.app.display_warning(f"_core is not compiled:\n{done.stderr}")
        return done.returncode == 0

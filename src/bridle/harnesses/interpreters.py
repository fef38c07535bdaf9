"""Interpreters and libraries that a bundle carries, so that it starts in an image with only a
shell.

A program that was made for one C library does not start beside an older one, and an image may have
no Python, no node, no C++ library. So a bundle takes along the interpreter, its standard library,
every shared library that it and the installed packages load, and the loader of this machine's C
library, which starts them all: what is in the image does not matter.

Python always starts through that loader. node, which is made for old systems, starts by itself
where it can: what it thinks of where it lies stays true then.

The loader must know `--argv0`: glibc 2.33 or newer on this machine, whatever is in the image.
Without it a bundle carries nothing and works where it was made (`local`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from bridle.errors import HarnessError
from bridle.harnesses.bundles import Builder

CARRIED = "carried"
"""Folder of a bundle with the loader, the libraries and the interpreter that they start."""
LOADER = f"{CARRIED}/loader"
FORM = "1"
"""Of what is carried, as an input of recipes: bundles of another form are made again."""
OLDEST = (2, 33)
COMPANIONS = ("libgcc_s.so.1", "libstdc++.so.6")
"""Loaded when a thread ends, and by packages that ask for them only as they run."""
LEFT_OUT = shutil.ignore_patterns(
    *("site-packages", "dist-packages", "EXTERNALLY-MANAGED", "config-*"),
    *("test", "tests", "idlelib", "turtledemo", "tkinter", "_tkinter*"),
)
AT_ONCE = 200
"""Files that one call of `ldd` looks at."""

ASK = """
import json, os, sys
name = "python%d.%d" % sys.version_info[:2]
program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
print(json.dumps([name, program, sys.base_prefix, sorted({"lib", sys.platlibdir})]))
"""

START_PYTHON = f"""#!/bin/sh
at=${{0%/*}}/../{CARRIED}
exec "$at/loader" --argv0 "$0" --library-path "$at" "$at/python" "$@"
"""

START_NODE = f"""#!/bin/sh
at=${{0%/*}}/../..
node=$at/NODE
case $(LD_TRACE_LOADED_OBJECTS=1 "$node" 2>&1) in
*"ot found"* | *"o such file"*) ;;
*) exec "$node" "$@" ;;
esac
at=$at/{CARRIED}
exec "$at/loader" --argv0 "$0" --library-path "$at" "$node" --require "$at/place.js" "$@"
"""
PLACE = """const program = require("path").resolve(__dirname, "../{link}");
process.execPath = process.argv[0] = program;
"""
"""What tells a node that the loader started where it lies, as its children must start too."""


def c_library() -> str | None:
    """Name and version of this machine's C library, `glibc 2.36`; `None` = not told."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):
        return None


def carries(library: str | None) -> bool:
    """Return whether bundles that are built with this C library start on other machines."""
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", library or "")
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST


async def carry_python(builder: Builder, python: str) -> None:
    """Copy the interpreter `python` with its standard library; `bin/python` starts it.

    Its packages go into `<lib>/pythonX.Y/site-packages`; `carry_libraries` ends the work. Raises
    `HarnessError`.
    """
    folder = builder.folder
    name, program, prefix, places = json.loads(await builder.run((python, "-I", "-c", ASK)))
    for place in places:
        library = folder / place / name
        if (source := Path(prefix, place, name)).is_dir():
            shutil.copytree(source, library, ignore=LEFT_OUT, ignore_dangling_symlinks=True)
            (library / "site-packages").mkdir()
            # Where Debian's own Python looks.
            (library / "dist-packages").symlink_to("site-packages")
    (folder / CARRIED).mkdir()
    shutil.copy2(program, folder / CARRIED / "python")
    (folder / "bin").mkdir()
    _program(folder / "bin/python", START_PYTHON)
    for other in ("python3", name):
        (folder / "bin" / other).symlink_to("python")


async def carry_node(builder: Builder, node: Path, link: Path) -> None:
    """Make the program `link` of a bundle, `node_modules/.bin/node`, start `node` anywhere."""
    folder = builder.folder
    (folder / CARRIED).mkdir()
    await carry_libraries(builder, (node,))
    named = link.relative_to(folder)
    (folder / CARRIED / "place.js").write_text(PLACE.format(link=named))
    with suppress(FileNotFoundError):
        os.unlink(link)  # noqa: PTH108 - quick
    _program(link, START_NODE.replace("NODE", str(node.relative_to(folder))))


async def carry_libraries(builder: Builder, programs: Iterable[Path]) -> None:
    """Copy the loader and every library of this machine that these programs and libraries load."""
    carried, files = builder.folder / CARRIED, [str(path) for path in programs]
    said = ""
    for first in range(0, len(files), AT_ONCE):
        # It answers for each file, and fails for one that loads nothing.
        asked = 'PATH=$PATH:/usr/bin:/bin; ldd "$@" 2>/dev/null; true'
        line = ("/bin/sh", "-c", asked, "sh")
        said += (await builder.run((*line, *files[first : first + AT_ONCE]))).decode()
    found = dict(re.findall(r"^\s+(\S+) => (/\S+) \(0x", said, re.MULTILINE))
    loader = re.search(r"^\s+(/\S+) \(0x", said, re.MULTILINE)
    if loader is None or "libc.so.6" not in found:
        raise HarnessError(f"{builder.label}: ldd names neither a loader nor a C library: {said}")
    shutil.copy2(loader[1], builder.folder / LOADER)
    beside = Path(found["libc.so.6"]).parent
    found = {**{name: str(beside / name) for name in COMPANIONS}, **found}
    for name, path in found.items():
        if not Path(path).is_relative_to(builder.folder):
            with suppress(FileNotFoundError):
                shutil.copy2(path, carried / name)


def libraries_of(folder: Path) -> list[Path]:
    """The shared libraries among a bundle's own files."""
    return [path for path in sorted(folder.rglob("*.so*")) if is_binary(path)]


def is_binary(path: Path) -> bool:
    """Return whether `path` is a program or shared library of machine code, and not a link."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)

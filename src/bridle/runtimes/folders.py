"""A session's folders on this machine: where they lie, and removing them, whatever is in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from bridle.errors import RuntimeFailure


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove folders, also where the harness took its own permissions away.

    Raises `RuntimeFailure` naming one that stays.
    """
    for folder in folders:
        if folder.is_symlink() or not folder.is_dir():  # a harness put it there, if it is there
            folder.unlink(missing_ok=True)
            continue
        with suppress(OSError):
            folder.chmod(0o700)
        for parent, names, _ in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                if not path.is_symlink():
                    with suppress(OSError):
                        path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            message = f"cannot remove {folder}"
            raise RuntimeFailure(message)


def beside(path: PurePosixPath, folders: Mapping[str, Path]) -> Path | None:
    """The path on this machine of one inside a runtime, by the folders that it shares; `None` = it
    lies in none of them.
    """
    for top, folder in folders.items():
        if path.is_relative_to(top) and ".." not in path.parts:
            return folder / path.relative_to(top)
    return None

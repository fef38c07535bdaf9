"""Removing the folders of a session, whatever the harness did to them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

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

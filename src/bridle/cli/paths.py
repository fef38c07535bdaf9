"""Checks paths that a user names for output before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

from bridle.errors import ConfigError


def check_folder(path: Path, flag: str) -> Path:
    """Give back the folder that `flag` names; `ConfigError` if it can be neither used nor made."""
    existing = next((one for one in (path, *path.parents) if one.exists()), Path("/"))
    if not existing.is_dir():
        raise ConfigError(f"{flag} {path}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path}: {existing} cannot be written; name another folder")
    return path


def check_storage(url: str, flag: str) -> None:
    """Refuse a URL whose storage has no driver here: `ConfigError`. Opens no connection."""
    import fsspec

    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{flag} {url}: {error}") from error


def check_file(path: Path, flag: str) -> Path:
    """Give back the file that `flag` names; `ConfigError` if it cannot be written."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a folder; name a file")
    check_folder(path.parent, flag)
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written; name another file")
    return path

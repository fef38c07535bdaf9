"""Short name or dotted path -> class: the one way in which Bridle finds what it can be given.

Each room with implementations (`engines`, `runtimes`, `harnesses`, `evaluators`, builders) keeps a
visible table from short name to `module:Class`; any other `package.module:Class` works too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from bridle.errors import ConfigError


def load(name: str, table: Mapping[str, str], *, what: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    """The object that `name` stands for.

    `name` is a key of `table` or `package.module:Attribute`. Raises `ConfigError` naming what was
    given, what is known, and why an import failed.
    """
    path = table.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon:
        known = ", ".join(sorted(table))
        message = f"unknown {what} {name!r}; known: {known}; or 'package.module:Class'"
        raise ConfigError(message)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        message = f"{what} {name!r} cannot be loaded: {error}"
        raise ConfigError(message) from error

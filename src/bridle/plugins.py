"""Short name or dotted path -> class: the one way in which Bridle finds what it can be given.

Each room with implementations (`engines`, `runtimes`, `harnesses`, `evaluators`, builders) keeps a
visible table from short name to `module:Class`. Installed packages add names by entry points of
the groups that `installed` names, and never replace a name of the table; any
`package.module:Class` works too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from bridle.errors import ConfigError


def installed(what: str) -> dict[str, str]:
    """Return the names that installed packages add for an `engine`, `harness`...: name ->
    `module:Class`.
    """
    group = f"bridle.{what}es" if what.endswith("s") else f"bridle.{what}s"
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load(name: str, table: Mapping[str, str], *, what: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    """Return the object that `name` stands for.

    `name` is a key of `table`, the name of an installed entry point or `package.module:Attribute`.
    Raises `ConfigError` naming what was given, what is known, and why an import failed.
    """
    path = table.get(name, name)
    more = {} if ":" in path else installed(what)
    module_name, colon, attribute = more.get(name, path).partition(":")
    if not colon:
        known = ", ".join(sorted({*table, *more}))
        raise ConfigError(f"unknown {what} {name!r}; known: {known}; or 'package.module:Class'")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{what} {name!r} cannot be loaded: {error}") from error

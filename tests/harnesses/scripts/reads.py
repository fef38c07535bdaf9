"""Finder of the configuration that a script in a sandbox reads, by its source.

The scripts' SDKs are in the harnesses' bundles, so the default tests cannot import them; the suite
of real clients runs them.
"""

import ast

from bridle.harnesses.base import SCRIPTS


def keys_read(script, variable="config"):
    """Every literal `variable["..."]` in the script."""
    tree = ast.parse((SCRIPTS / script).read_text(encoding="utf-8"))
    return {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == variable
        and isinstance(node.slice, ast.Constant)
    }


def exit_codes(script):
    """Every number that a `return` of the script gives."""
    tree = ast.parse((SCRIPTS / script).read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None:
            inner = ast.walk(node.value)
            found |= {
                n.value for n in inner if isinstance(n, ast.Constant) and type(n.value) is int
            }
    return found


SERVER = {"name", "transport", "command", "args", "env", "url", "headers"}
"""Members of an MCP server as plain JSON; scripts call that `config` too."""

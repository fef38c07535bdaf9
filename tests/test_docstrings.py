"""Files, modules and names in docstrings exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "bridle"
ROOMS = sorted(path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


def module_parts(name: str) -> tuple[str, list[str]]:
    """The source of the longest part of a dotted name that is a module, and what is left of it."""
    parts = name.split(".")
    base = {"bridle": ROOT / "src"}.get(parts[0], ROOT)
    for size in range(len(parts), 0, -1):
        path = base.joinpath(*parts[:size])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text(), parts[size:]
        if path.is_dir():
            return "", parts[size:]
    return "", parts


def defines(text: str, name: str) -> bool:
    """Return whether a module of this text has a function, a class or a value of this name."""
    return re.search(rf"(?m)^(?:(?:async def|def|class) )?{name}\b[^.]", text) is not None


@pytest.mark.parametrize("init", ROOMS, ids=lambda init: init.parent.name)
def test_the_names_in_a_package_docstring_exist_in_the_package(init):
    said = ast.get_docstring(ast.parse(init.read_text())) or ""
    sources = "".join(path.read_text() for path in init.parent.rglob("*.py"))
    named = re.findall(r"`([A-Za-z]\w*(?:\.\w+)*)`", said)

    def exists(name: str) -> bool:
        first, *rest = name.split(".")
        file = init.parent / f"{first}.py"
        if file.is_file():
            return all(defines(file.read_text(), one) for one in rest)
        if first == "bridle":
            text, left = module_parts(name)
            return all(defines(text, one) for one in left)
        return (init.parent / first).is_dir() or defines(sources, first)

    assert [name for name in named if not exists(name)] == []


def test_every_module_named_in_a_docstring_exists():
    cited = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                said = ast.get_docstring(node) or ""
                for name in re.findall(r"\b((?:bridle|benchmarks)(?:\.[a-z]\w*)+)", said):
                    cited.setdefault(name, path)

    assert {"benchmarks.sessions", "bridle.prompting.renderer"} & cited.keys()
    missing = {}
    for name, path in cited.items():
        text, left = module_parts(name)
        if left and not (text and defines(text, left[0])):
            missing[name] = path
    assert missing == {}

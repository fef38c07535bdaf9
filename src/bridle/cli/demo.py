"""`bridle demo`: the main job on this machine, with nothing but what comes along.

The demo is an example (`examples/demo`) and no part of the library; a wheel brings it as data.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

PACKAGE = "bridle_demo"
"""Name that the example is imported under, wherever its files are."""


def demo(
    out: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("runs/demo"),
    tasks: Annotated[int, typer.Option(min=1, max=44, help="Jobs for each real harness.")] = 6,
    fresh: Annotated[int, typer.Option(min=1, help="Fresh tasks for the small model.")] = 64,
    steps: Annotated[
        int, typer.Option(min=0, help="Updates of the small model; 0 leaves the training out.")
    ] = 32,
    rebuild_model: Annotated[
        bool, typer.Option("--rebuild-model", help="Make the small model again.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run real agents and a small model on this machine: trajectories, and a model that learns."""
    run = load().run
    raise typer.Exit(run(out, tasks, fresh, steps, rebuild_model=rebuild_model, json=json))


def load() -> ModuleType:
    """The demo's main module: from the installed package, else from the checkout."""
    from bridle.config import assets_dir

    folder = assets_dir() / "demo"
    if not folder.is_dir():
        folder = Path(__file__).parents[3] / "examples" / "demo"
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{PACKAGE}.main")

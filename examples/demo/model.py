"""The demo model: made on this machine at first use, from demonstrations through the gateway."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import TaskID

from bridle.cli.terminal import console, progress
from bridle.config import cache_dir

from .demonstrations import collect

if TYPE_CHECKING:
    from bridle.training.sft import SftProgress

DEMONSTRATIONS = 1600
SEED = 1


def demo_model() -> Path:
    """Folder of the demo model; made if it is not there yet.

    Kept in the cache under the digest of everything that shapes it.
    """
    from .recipe import make_demo_model, recipe_digest

    folder = cache_dir() / "demo-model" / recipe_digest()
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    console.print("the small model is made once: demonstrations through the gateway, then training")
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="bridle-demo-model-"))
    try:
        with progress() as bars:
            shown = bars.add_task("demonstrations", total=DEMONSTRATIONS, note="")
            asyncio.run(
                collect(
                    scratch,
                    DEMONSTRATIONS,
                    seed=SEED,
                    report=lambda done: bars.update(shown, completed=done),
                )
            )
            rows: dict[str, TaskID] = {}

            def trained(name: str, done: SftProgress) -> None:
                if name not in rows:
                    rows[name] = bars.add_task(f"training {name}", total=done.steps, note="")
                bars.update(rows[name], completed=done.step, note=f"loss {done.loss:.3f}")

            make_demo_model(scratch / "demonstrations.jsonl", folder, trained)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    console.print(f"made in {time.monotonic() - began:.0f} s: {folder}")
    return folder

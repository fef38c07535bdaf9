from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.embedded.models import CONFIGS, Oracle, save_model

from bridle.embedded import EmbeddedEngine


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny operations on several threads wait for each other more than they work."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder of each architecture."""
    return {name: save_model(tmp_path_factory.mktemp(name), name) for name in CONFIGS}


@pytest.fixture(scope="session")
def oracles(folders: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(folder) for name, folder in folders.items()}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["qwen3"]


@pytest.fixture
def oracle(oracles: dict[str, Oracle]) -> Oracle:
    return oracles["qwen3"]


@pytest.fixture
def opened() -> Callable[..., AbstractAsyncContextManager[EmbeddedEngine]]:
    """`async with opened(folder, ...) as engine`: started, and closed at the end."""

    @asynccontextmanager
    async def open_engine(folder: Path, **options: Any) -> AsyncIterator[EmbeddedEngine]:
        engine = EmbeddedEngine(folder, **{"device": "cpu", **options})
        try:
            await engine.start()
            yield engine
        finally:
            await engine.aclose()

    return open_engine

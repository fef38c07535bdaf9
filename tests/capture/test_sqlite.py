"""Capture in SQLite: the store suite, and what only a file can show."""

from contextlib import asynccontextmanager

import pytest
from tests.conformance.stores import StoreConformance

from bridle.capture.sqlite import SqliteStore


class TestSqliteStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "capture.sqlite"

    @asynccontextmanager
    async def open_store(self):
        async with await SqliteStore.open(self.path) as store:
            yield store


class TestSqliteStoreWithFsync(TestSqliteStore):
    @asynccontextmanager
    async def open_store(self):
        async with await SqliteStore.open(self.path, fsync="group") as store:
            yield store

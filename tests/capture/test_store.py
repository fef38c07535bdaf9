"""The store in memory passes the suite that every store passes."""

from contextlib import asynccontextmanager

from tests.conformance.memory import MemoryStore
from tests.conformance.stores import StoreConformance


class TestMemoryStore(StoreConformance):
    @asynccontextmanager
    async def open_store(self):
        store = MemoryStore()
        yield store
        await store.aclose()

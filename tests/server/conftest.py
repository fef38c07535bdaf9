"""Fixtures of the server's tests.

If `BRIDLE_TEST_POSTGRES` is set (`scripts/test-postgres`), every test here is one of that suite
and has a fresh database of a real PostgreSQL; else the database is a SQLite file.
"""

import os
from pathlib import Path

import pytest
from tests.server.cluster import Cluster

ON_POSTGRES = "BRIDLE_TEST_POSTGRES" in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if ON_POSTGRES:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.postgres)


@pytest.fixture(scope="session", autouse=True)
def cluster():
    """The PostgreSQL of the suite; `None` where the suite is not that one."""
    if not ON_POSTGRES:
        yield None
        return
    with Cluster() as running:
        yield running


@pytest.fixture(autouse=True)
def fresh_database(cluster, monkeypatch):
    """Return what `house.database_of` names is new for each test."""
    if cluster is None:
        yield
        return
    url = cluster.fresh()
    monkeypatch.setenv("BRIDLE_TEST_DATABASE", url)
    yield
    cluster.drop(url)

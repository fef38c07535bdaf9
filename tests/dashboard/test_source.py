"""Every source answers the questions that pages ask."""

import inspect

import pytest

from bridle.dashboard.folder import Folder
from bridle.dashboard.source import Source

ASKED = [name for name, _ in inspect.getmembers(Source, inspect.isfunction) if name[0] != "_"]


@pytest.mark.parametrize("name", ASKED)
def test_a_source_takes_what_pages_give(name):
    given, taken = (inspect.signature(getattr(one, name)) for one in (Source, Folder))

    assert given.parameters == taken.parameters

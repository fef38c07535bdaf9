"""Names to classes."""

import pytest

from bridle.errors import ConfigError
from bridle.plugins import load

TABLE = {"path": "pathlib:Path"}


def test_a_short_name_and_a_dotted_path_both_work():
    from pathlib import Path, PurePath

    assert load("path", TABLE, what="thing") is Path
    assert load("pathlib:PurePath", TABLE, what="thing") is PurePath


@pytest.mark.parametrize("name", ["nope", "no.such.module:X", "pathlib:NoSuchClass"])
def test_what_cannot_be_found_is_named(name):
    with pytest.raises(ConfigError, match=name.split(":")[0]) as caught:
        load(name, TABLE, what="thing")

    assert "thing" in str(caught.value)

"""Scripts as modules, for pages that a script writes."""

from tests.scripts.conftest import load_script

__all__ = ["load_script"]

"""Runs pytest as `python -m pytest` does, but imports it before the current folder is searched.

So no `pytest.py` there, nor in a folder of it that `PYTHONPATH` names, stands in its place. Runs
with Python 3.6 or later; it knows nothing of Bridle.
"""

import os
import sys

here = os.getcwd()  # noqa: PTH109 - loads nothing
path = sys.path[:]
sys.path[:] = [one for one in path if not f"{os.path.abspath(one)}/".startswith(f"{here}/")]  # noqa: PTH100
try:
    import pytest
except ImportError:  # it lies there itself
    sys.path[:] = path
    import pytest
sys.path[:] = path
if not getattr(sys.flags, "safe_path", False):
    sys.path[0] = here
sys.exit(pytest.main())

"""Runs pytest as `python -m pytest` does, but imports it before the work is searched.

So no `pytest.py` or `pluggy.py` of the work stands in its place: neither in the current folder nor
in one below or above it that `PYTHONPATH` names. Runs with any Python that has pytest; it knows
nothing of Bridle. Processes that a test spawns by `multiprocessing` import this file, and run none.
"""

import os
import sys


def main():  # type: () -> None # noqa: ANN201 - Python 2 reads this file too
    """Run pytest with the arguments of this program, and exit with its status."""
    here = _place(".")
    own = _place(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    searched = [one for one in sys.path if _place(one) != own]
    if not (getattr(sys.flags, "safe_path", False) or getattr(sys.flags, "isolated", False)):
        searched.insert(0, here.rstrip("/") or "/")
    places = [(one, _place(one)) for one in searched]
    sys.path[:] = [one for one, at in places if not (at.startswith(here) or here.startswith(at))]
    try:
        import pytest
    except ImportError:  # it is installed there itself
        sys.path[:] = searched
        import pytest
    sys.path[:] = searched
    sys.exit(pytest.main())


def _place(folder):  # type: (str) -> str # noqa: ANN001, ANN202
    """Return a folder's real path with a slash behind it."""
    return os.path.realpath(folder or ".").rstrip("/") + "/"


if __name__ == "__main__":
    main()

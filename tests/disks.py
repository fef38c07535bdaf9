"""Disks that are full for a while."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(size=1024):
    """No file of this process is written past `size`: each write there fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

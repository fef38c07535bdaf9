"""Disks that are full for a while."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk():
    """No file of this process grows past 1 KiB: each write beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

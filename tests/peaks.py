"""The most memory that this process has held, since a moment of the test's own."""

import re
from pathlib import Path


def peak_kib(*, reset: bool = False) -> int:
    """Return the peak in KiB; with `reset`, it begins anew with what is held now.

    `ru_maxrss` cannot be reset, and begins with that of the parent process.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])

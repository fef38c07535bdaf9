"""A node that can be killed at any moment: a process of its own, which dies with its server.

It takes run ids on stdin, writes down in the journal when a run began and when it had ended, and
answers `RUN ok` or `RUN failed` on stdout. Imports little, so that it starts in no time.

python killed_node.py JOURNAL SERVER_PID
"""

import ctypes
import os
import random
import signal
import sys
import threading
import time
import zlib
from pathlib import Path

RUN_S = 0.1
"""The most that a run takes."""

PR_SET_PDEATHSIG = 1


def fails(run_id):
    """Return whether this run fails by infrastructure: one in seven, first attempts only."""
    return ".r" not in run_id and zlib.crc32(run_id.encode()) % 7 == 0


class Journal:
    """Lines `began RUN` and `ended RUN`; an appended line survives `kill -9`."""

    def __init__(self, path):
        self.path = path

    def write(self, what, run_id):
        with self.path.open("a") as file:
            file.write(f"{what} {run_id}\n")

    def lines(self):
        if not self.path.exists():
            return []
        return [tuple(line.split(" ")) for line in self.path.read_text().splitlines()]


def one(journal, run_id):
    journal.write("began", run_id)
    time.sleep(random.uniform(0, RUN_S))
    how = "failed" if fails(run_id) else "ok"
    if how == "ok":
        journal.write("ended", run_id)
    sys.stdout.write(f"{run_id} {how}\n")
    sys.stdout.flush()


def main(journal, server):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it died before we asked to die with it
        return
    for line in sys.stdin:
        threading.Thread(target=one, args=(journal, line.strip()), daemon=True).start()


if __name__ == "__main__":
    main(Journal(Path(sys.argv[1])), int(sys.argv[2]))

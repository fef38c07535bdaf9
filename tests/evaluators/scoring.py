"""Scoring functions as operators have them, for the evaluator `function`."""

import json
import subprocess
import sys
import time
from pathlib import Path


def of_file(session):
    """The number in the file that was copied out."""
    print("looking at", session["task_id"])  # noqa: T201 - as such functions do
    return float(Path(session["folder"], "answer.txt").read_text())


async def of_everything(session):
    """Each field that it is given, as metadata."""
    return {"reward": 0.5, "trace_rewards": [1, 0], "given": sorted(session)}


def of_harness(session):
    return session["exit_code"] + len(session["stdout"]) + (session["folder"] is not None)


def runs_it(session):
    """Run the agent's program with this process's own output, as a careless scorer does."""
    done = subprocess.run([sys.executable, "answer.py"], cwd=session["folder"], check=False)
    return float(done.returncode == 7)


def broken(session):
    raise ValueError(session["instruction"])


def slow(session):
    time.sleep(60)


def no_number(session):
    return json.loads(session["metadata"]["returns"])


def ends(session):
    sys.exit(3)


def ends_well(session):
    sys.exit(0)

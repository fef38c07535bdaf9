"""Test results of the summary that `pytest -rA` prints.

A file by itself, which Harbor folders bring along (`datasets.harbor`): `python summary.py WANTED
CODE <OUTPUT` ends with code 0 if all tests of the JSON list in file WANTED passed, in a run that
ended with CODE.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HEADING = re.compile(r"(?m)^=+ short test summary info =+$")
ENDED = re.compile(r"(?m)^=* ?\d+ .*\bin \d+\.\d+s\b.*$")
"""The last line of pytest's report."""
COUNTS = re.compile(r"\b(\d+) (passed|failed|skipped|deselected|xfailed|xpassed|error)")
"""Counts in that line."""
SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*?)(?: - .*)?$")


def from_summary(said: str) -> dict[str, str]:
    """Return the status of each test in the last summary that `pytest -rA` prints, if it is
    complete.

    A test that another summary calls anything but passed has that status: code under test can print
    a summary of its own, before or after the runner's. None counts if more are said to have passed
    than the summary's end counts: the reason of a skipped test may have lines of its own.
    """
    *earlier, last = re.split(HEADING, said)
    ends = re.findall(ENDED, last)
    if not earlier or not ends:
        return {}
    begun = [part for part in earlier[1:] if not re.search(ENDED, part)]
    lines = "\n".join((*begun, last)).splitlines()
    listed = sum(line.startswith("PASSED ") for line in lines)
    counts = [dict(map(reversed, re.findall(COUNTS, end))) for end in ends]
    if any(count and listed > int(count.get("passed", 0)) for count in counts):
        return {}
    statuses = lines_of_summary(last)
    for summary in earlier[1:]:
        for name, status in lines_of_summary(summary).items():
            if status != "passed" and name in statuses:
                statuses[name] = status
    return statuses


def lines_of_summary(text: str) -> dict[str, str]:
    """Return the status of each test that a line of the text states, wherever the line stands."""
    found = (SUMMARY.match(line) for line in text.splitlines())
    statuses: dict[str, str] = {}
    for match in found:
        if match is not None and statuses.get(match[2], "passed") == "passed":
            statuses[match[2]] = match[1].lower()
    return statuses


def all_passed(said: str, wanted: list[str], exit_code: int) -> bool:
    """Return whether the `wanted` tests passed, by pytest's output `said`.

    False if the run ended with an error code although its summary names no failure.
    """
    statuses = from_summary(said)
    ends = exit_code == 0 or {"failed", "error"} & set(statuses.values())
    return bool(ends) and all(statuses.get(name) == "passed" for name in wanted)


if __name__ == "__main__":
    output = sys.stdin.buffer.read().decode(errors="replace")
    wanted_tests = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.exit(not all_passed(output, wanted_tests, int(sys.argv[2])))

"""A drawn part of a long suite: CI runs one part of it per commit, and all parts in a few commits.

`-p tests.draw --draw=PARTS` divides a suite. Without `BRIDLE_TEST_DRAW` the whole suite runs; with
`BRIDLE_TEST_DRAW=NUMBER`, the number of a commit, one part of it and every test marked `core`.
The same number always draws the same part, so a red run repeats.

Tests of one group share an expensive set-up and are drawn together. A group is the argument of the
mark `drawn_with`, else the harness among a test's parameters, else its file. The part of a group
depends on its name only, so no other test moves it. In each block of PARTS numbers every part is
drawn once, in an order of the block's own. Any 2 * PARTS - 1 consecutive numbers hold a whole
block, hence the upper limit of PARTS. `tests/test_draw.py` holds the proofs.

`--draw=PARTS/SALT` divides otherwise: a salt is chosen for parts that take about the same time.
"""

import hashlib
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

WITHIN = 20
"""Every test is drawn at least once in so many consecutive commits."""


@dataclass(frozen=True)
class Draw:
    """Division of a suite, and the number of the commit that draws."""

    parts: int
    number: int
    salt: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= WITHIN // 2:
            raise ValueError(f"--draw={self.parts}: parts must be 1 to {WITHIN // 2}")

    @classmethod
    def parse(cls, spec: str, number: str) -> "Draw":
        """Read `PARTS` or `PARTS/SALT`, and the number of a commit."""
        parts, _, salt = spec.partition("/")
        return cls(int(parts), int(number), salt)

    @property
    def part(self) -> int:
        """The part that this number draws."""
        block, place = divmod(self.number, self.parts)
        order = list(range(self.parts))
        random.Random(block).shuffle(order)
        return order[place]

    def part_of(self, group: str) -> int:
        """The part that a group belongs to."""
        digest = hashlib.sha256(f"{self.salt}{group}".encode()).digest()
        return int.from_bytes(digest) % self.parts

    def takes(self, group: str) -> bool:
        """Return whether the drawn part has this group."""
        return self.part_of(group) == self.part


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--draw", metavar="PARTS[/SALT]", help="run the part that BRIDLE_TEST_DRAW=NUMBER draws"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, spec = os.environ.get("BRIDLE_TEST_DRAW"), config.getoption("draw")
    if not number or not spec:
        return
    draw = Draw.parse(spec, number)
    left_out = [
        item for item in items if not (item.get_closest_marker("core") or draw.takes(group(item)))
    ]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)


def pytest_report_header(config: pytest.Config) -> str | None:
    number, spec = os.environ.get("BRIDLE_TEST_DRAW"), config.getoption("draw")
    if not number or not spec:
        return None
    draw = Draw.parse(spec, number)
    return f"drawn: part {draw.part} of 0 to {draw.parts - 1} (BRIDLE_TEST_DRAW={number})"


def group(item: pytest.Item) -> str:
    """The name of the group that a test belongs to."""
    if mark := item.get_closest_marker("drawn_with"):
        return str(mark.args[0])
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec else ():
        first = value[0] if isinstance(value, tuple) and value else value
        name = getattr(first, "harness", first)
        if isinstance(name, str) and name in _harnesses():
            return name
    return item.nodeid.partition("::")[0]


def _harnesses() -> Sequence[str]:
    from bridle.harnesses import HARNESSES

    return tuple(HARNESSES)


def main() -> None:
    """Print the drawn ones of the groups that are named after the spec, with commas between."""
    spec, *groups = sys.argv[1:]
    draw = Draw.parse(spec, os.environ["BRIDLE_TEST_DRAW"])
    sys.stdout.write(",".join(filter(draw.takes, groups or _harnesses())) + "\n")


if __name__ == "__main__":
    main()

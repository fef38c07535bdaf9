"""Engine data other than the tokens of one call, over all its chunks and attempts.

This module does not interpret it. A list with an entry for each token stands at its tokens,
whichever piece brought it: one engine reports each piece's own part, another the whole try at its
end. Anything else belongs to its try as a whole; the last try's prompt holds the tokens of those
before, so its data is the reply's, and theirs is kept beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bridle.types import JSON


@dataclass(slots=True)
class Extras:
    """Collects them; sizes and places are in sampled tokens."""

    _lists: dict[str, list[Any]] = field(default_factory=dict)
    """Name -> one entry per token from the first on; `None` where the engine reported none."""
    _whole: JSON = field(default_factory=dict)
    """Of the try under way."""
    _tries: list[JSON] = field(default_factory=list)
    """Of the tries that ended and reported something, with the `tokens` that the call had then."""

    def add(self, extra: JSON, *, begun: int, at: int, size: int) -> None:
        """Take what the engine reported with a piece of `size` tokens.

        `begun` is the number of tokens before its try, `at` those before the piece itself.
        """
        for name, value in extra.items():
            if isinstance(value, list) and len(value) in {size, at + size - begun}:
                start = at if len(value) == size else begun
                entries = self._lists.setdefault(name, [])
                entries += [None] * (start - len(entries))
                entries[start:] = value
            else:
                self._whole[name] = value

    def end_try(self, tokens: int) -> None:
        """A try ended when the call had so many tokens."""
        if self._whole:
            self._tries.append({"tokens": tokens, **self._whole})
            self._whole = {}

    def clear(self) -> None:
        """The call begins again: what was reported belongs to tokens that are not its own."""
        self._lists.clear()
        self._tries.clear()

    def whole(self, tokens: int) -> JSON:
        """Return everything that was reported for a call of `tokens` tokens.

        Lists have that length, with `None` where the engine reported no entry.
        """
        reported = {
            name: [*entries, *[None] * (tokens - len(entries))]
            for name, entries in self._lists.items()
            if entries
        }
        last = self._tries[-1] if self._tries and self._tries[-1]["tokens"] == tokens else {}
        return reported | {name: value for name, value in last.items() if name != "tokens"}

    def before(self, tokens: int) -> list[JSON]:
        """Return the data of earlier attempts, each with the `tokens` that the call had then."""
        return [one for one in self._tries if one["tokens"] != tokens]


def first_of(extra: JSON, size: int, kept: int) -> JSON:
    """The extras of `size` tokens, of which the first `kept` stand."""
    return {
        name: value[:kept] if isinstance(value, list) and len(value) == size else value
        for name, value in extra.items()
    }

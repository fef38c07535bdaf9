"""The match of a request's tool results with its calls. Pure.

A result whose call stands nowhere before it is an orphan: the model would read an answer to a
question that it never asked, usually because context was lost on the way. Neither adjacency nor
the number of results matters, and a call may stay without a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from bridle.prompting.canonical import Atom, Hint

Call: TypeAlias = tuple[str | None, bytes]
"""A call's name, and its link of the chain: the same call under the same history has the same."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A tool result without a call."""

    call_id: str | None
    name: str | None


@dataclass(slots=True)
class Pairing:
    """The calls and results of a request, in their order."""

    orphans: list[Orphan] = field(default_factory=list)
    """Results whose call stands nowhere before them."""
    _ids: dict[str, int] = field(default_factory=dict)
    """Id -> number of the call; -1 = an id of an assistant message, which is as good."""
    _calls: list[Call] = field(default_factory=list)
    _bare: set[int] = field(default_factory=set)
    """Numbers of the calls without an id."""
    _open: dict[int, None] = field(default_factory=dict)
    """Numbers of the calls without a result yet, in order."""
    _read: tuple[int, int] = (0, 0)
    """Numbers of atoms and hints of the request that were read."""

    def after(
        self, atoms: Sequence[Atom], hints: Sequence[Hint], chain: Sequence[bytes]
    ) -> Pairing:
        """The pairing of a request that continues this one's; `chain` is that of all its atoms."""
        whole = Pairing(
            self.orphans.copy(),
            self._ids.copy(),
            self._calls.copy(),
            self._bare.copy(),
            self._open.copy(),
            (len(atoms), len(hints)),
        )
        read, hinted = self._read
        for position in range(read, len(atoms) + 1):
            while hinted < len(hints) and hints[hinted].position <= position:
                whole._issued(hints[hinted].ids)
                hinted += 1
            if position < len(atoms):
                whole._add(atoms[position], chain[position + 1])
        return whole

    @property
    def unpaired(self) -> Iterator[bytes]:
        """The links of the calls without a result."""
        return (self._calls[number][1] for number in self._open)

    def _issued(self, ids: Sequence[str]) -> None:
        for value in ids:
            self._ids.setdefault(value, -1)

    def _add(self, atom: Atom, link: bytes) -> None:
        call_id = atom.ids[0] if atom.ids else None
        if atom.kind == "C":
            self._call(call_id, atom.text, link)
        elif atom.kind == "T":
            self._result(call_id, atom.text)

    def _call(self, call_id: str | None, name: str | None, link: bytes) -> None:
        number = len(self._calls)
        self._calls.append((name, link))
        self._open[number] = None
        if call_id:
            self._ids[call_id] = number
        else:
            self._bare.add(number)

    def _result(self, call_id: str | None, name: str | None) -> None:
        """Match a result: by its id, else by its name, else by order.

        A result without an id whose name no call has answers the first call that has no result.
        One whose id is not known may still mean a call of its name that has no id.
        """
        if call_id and call_id in self._ids:
            self._open.pop(self._ids[call_id], None)
            return
        known = sorted(self._bare) if call_id else range(len(self._calls))
        fitting = [number for number in known if name is None or self._calls[number][0] == name]
        if not fitting and not call_id:
            fitting = [*self._open]
        if not fitting:
            self.orphans.append(Orphan(call_id or None, name))
            return
        first = next((number for number in fitting if number in self._open), None)
        if first is not None:
            del self._open[first]

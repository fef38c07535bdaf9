"""The match of a request's tool results with its calls. Pure.

A result whose call stands nowhere before it is an orphan: the model would read an answer to a
question that it never asked, usually because context was lost on the way. Neither adjacency nor
the number of results matters, and a call may stay without a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from bridle.prompting.canonical import Atom, Hint

Call: TypeAlias = tuple[str | None, bool, bytes]
"""A call's name, whether it has no id, and its link of the chain: the same call under the same
history has the same."""

_Group: TypeAlias = tuple[str | None, bool]
"""The calls of a name, with an id or without (`True`); `None` = of any name."""

_ANY: Final = ((None, True), (None, False))


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
    calls: list[Call] = field(default_factory=list)
    _open: dict[_Group, dict[int, None]] = field(default_factory=dict)
    """Numbers of the calls without a result yet, in order; a group stays when it is empty."""

    def after(
        self,
        atoms: Sequence[Atom],
        hints: Sequence[Hint],
        chain: Sequence[bytes],
        *,
        read: tuple[int, int],
    ) -> Pairing:
        """Return the pairing of a request that continues this one's; `chain` is that of all its
        atoms, `read` the numbers of atoms and hints of this one's.
        """
        whole = Pairing(
            self.orphans.copy(),
            self._ids.copy(),
            self.calls.copy(),
            {group: numbers.copy() for group, numbers in self._open.items()},
        )
        start, hinted = read
        issued = list(hints[hinted:])[::-1]
        for position, atom in enumerate(atoms[start:], start):
            while issued and issued[-1].position <= position:
                whole._issued(issued.pop().ids)
            if atom.kind in ("C", "T"):
                whole._add(atom, chain[position + 1])
        while issued:
            whole._issued(issued.pop().ids)
        return whole

    @property
    def unpaired(self) -> Iterator[bytes]:
        """The links of the calls without a result."""
        groups = (self._open.get(group, ()) for group in _ANY)
        return (self.calls[number][2] for numbers in groups for number in numbers)

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
        number, bare = len(self.calls), not call_id
        self.calls.append((name, bare, link))
        for group in ((name, bare), (None, bare)):
            self._open.setdefault(group, {})[number] = None
        if call_id:
            self._ids[call_id] = number

    def _result(self, call_id: str | None, name: str | None) -> None:
        """Match a result: by its id, else by its name, else by order.

        A result without an id whose name no call has answers the first call that has no result.
        One whose id is not known may still mean a call of its name that has no id.
        """
        if call_id and call_id in self._ids:
            self._close(self._ids[call_id])
            return
        groups = [(name, True)] if call_id else [(name, True), (name, False)]
        named = any(group in self._open for group in groups)
        first = self._first(groups if named or call_id else _ANY)
        if first is not None:
            self._close(first)
        elif not named:
            self.orphans.append(Orphan(call_id or None, name))

    def _first(self, groups: Sequence[_Group]) -> int | None:
        """Return the number of the first call of these groups without a result."""
        found = [next(iter(self._open[group])) for group in groups if self._open.get(group)]
        return min(found, default=None)

    def _close(self, number: int) -> None:
        if number >= 0:
            name, bare, _ = self.calls[number]
            self._open[name, bare].pop(number, None)
            self._open[None, bare].pop(number, None)

"""Cache of a session's canonical requests: the known beginning of a growing one costs nothing.

Reading a request anew costs a look-up per message of its history; here the atoms and the chain of
the request that it continues are taken over whole. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridle.types import Dialect, Message, ModelRequest

if TYPE_CHECKING:
    from bridle.prompting.canonical import Canonical

KEPT = 4
"""Requests that are remembered: one per conversation that goes on (agent, sub-agents)."""


@dataclass(frozen=True, slots=True)
class Known:
    """A request that was read."""

    head: tuple[Message, ...]
    """The messages that no span brought."""
    spans: tuple[bytes, ...]
    """Digests of its spans."""
    messages: int
    """How many messages it has."""
    canonical: Canonical


class Walks:
    """The last requests of one session, by dialect and tools."""

    def __init__(self) -> None:
        self._known: dict[tuple[Dialect, bytes], list[Known]] = {}
        """Newest first."""

    def find(self, request: ModelRequest, tools: bytes) -> Known | None:
        """The longest request that this one continues; `tools` is its tools' digest."""
        head = request.messages[: request.head_messages]
        best, most = None, -1
        for known in self._known.get((request.dialect, tools), ()):
            count = len(known.spans)
            if count <= most or known.head != head:
                continue
            if known.spans == request.span_digests[:count]:
                best, most = known, count
        return best

    def remember(
        self, request: ModelRequest, canonical: Canonical, *, instead_of: Known | None
    ) -> None:
        """Keep a request, in place of the one that it continues. One without spans is not kept."""
        if not request.span_digests:
            return
        head = request.messages[: request.head_messages]
        newest = Known(head, request.span_digests, len(request.messages), canonical)
        key = request.dialect, canonical.tools_digest
        kept = [known for known in self._known.get(key, ()) if known is not instead_of]
        self._known[key] = [newest, *kept][:KEPT]

"""Origin of a conversation without a delivered turn, by the texts that it quotes. Pure.

Some harnesses put no mark on their sub-agents or on what follows a compaction. But what a sub-agent
is told is an argument of a call that the policy sampled, and a compacted conversation begins with
the summary that it sampled. Only whole texts count, so quoting by chance is no lineage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256

from bridle.prompting.arguments import argument_texts, text_bytes
from bridle.types import Message, Role, TextPart

_INSIDE = re.compile(r"<(summary|state_snapshot)>\s*(.+?)\s*</\1>", re.DOTALL)
"""What harnesses take out of a summary, where it has it."""


class Lineage:
    """Instructions and summaries in one session's replies."""

    def __init__(self) -> None:
        self._asked: set[bytes] = set()
        """Digests of the texts among the arguments of calls."""
        self._summaries: list[tuple[str, tuple[str, ...]]] = []
        """Exchange -> the texts by which its summary is known; oldest first."""

    def note(self, exchange_id: str, messages: Sequence[Message], *, summary: bool) -> None:
        """Remember a reply, given as its assistant messages; `summary` = it is one."""
        for message in messages:
            for call in message.tool_calls:
                self._asked.update(map(_key, argument_texts(call.arguments)))
        if summary and (told := "".join(message.text for message in messages).strip()):
            parts = tuple(found[1] for found in _INSIDE.findall(told))
            self._summaries.append((exchange_id, (told, *parts)))

    def is_spawned(self, messages: Sequence[Message]) -> bool:
        """Return whether a user's text is a sampled call's argument: a sub-agent's instruction."""
        if not self._asked:
            return False
        texts = (text for text in _user_texts(messages) if text.strip())
        return any(_key(text) in self._asked for text in texts)

    def summarised_by(self, messages: Sequence[Message]) -> str | None:
        """The newest exchange whose summary some text holds; `None` = there is none.

        Harnesses let the user tell it, or the model.
        """
        texts = [message.text for message in messages] if self._summaries else []
        for exchange_id, parts in reversed(self._summaries):
            if any(part in text for part in parts for text in texts):
                return exchange_id
        return None


def _user_texts(messages: Sequence[Message]) -> Iterator[str]:
    """Each text part of the user's messages."""
    for message in messages:
        if message.role is Role.USER:
            yield from (part.text for part in message.content if isinstance(part, TextPart))


def _key(text: str) -> bytes:
    return sha256(text_bytes(text.strip())).digest()[:16]

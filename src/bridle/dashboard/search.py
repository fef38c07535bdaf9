"""Search for a text in the messages of a capture file.

Texts are unpacked and looked through in the order of capture, a little per request: a large file is
searched over several refreshes of the page, which says how much is left. What was found is kept, so
a refresh costs only the calls that are new. ASCII letters match in either case.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator

from bridle.capture.reader import SqliteReader
from bridle.capture.texts import unpack

ROWS = 50
"""Calls that are read at once."""


class TextSearch:
    """A text, and the sessions whose messages or sampled replies have it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: set[str] = set()
        """Ids of the sessions found so far."""
        self._forms = tuple({form.lower() for form in _forms(text)})
        self._after = 0

    def go_on(self, reader: SqliteReader, until: float) -> int:
        """Search until a time of `time.monotonic`; return how many calls are left."""
        while time.monotonic() < until:
            rows = reader.texts(self._after, ROWS)
            for number, session_id, texts in rows:
                self._after = number
                if session_id not in self.found and self._has(texts):
                    self.found.add(session_id)
            if len(rows) < ROWS:
                return 0
        return reader.exchanges_after(self._after)

    def _has(self, texts: bytes) -> bool:
        try:
            found = (entry.text.lower() for entry in unpack(texts))
            return any(form in text for text in found for form in self._forms)
        except (ValueError, zlib.error, struct.error):
            return False  # damaged: its session says so


def _forms(text: str) -> Iterator[bytes]:
    """Yield a text as it stands in JSON and in JSON within JSON, with ASCII escapes and without."""
    for ascii_only in (False, True):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        for form in (once, json.dumps(once, ensure_ascii=ascii_only)[1:-1]):
            yield form.encode(errors="surrogatepass")

"""A parser of server-sent events, by which tests read streams as a client would.

It reads events from chunks cut at any byte, as the WHATWG event stream specification (HTML, section
9.2.6) says: LF, CR and CRLF end a line, an empty line dispatches, comments and unknown fields are
skipped, an event without data is none. Lines after the last empty line are never dispatched, so a
cut stream gives no half event.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One dispatched event."""

    data: str
    """The data lines, joined with a newline."""
    event: str = "message"
    id: str | None = None
    """The last id seen on the stream, `None` before the first."""


class SseParser:
    """Reads events from bytes as they arrive. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._rest = b""
        self._at_start = True
        self._skip_lf = False
        self._data: list[str] = []
        self._event = ""
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that `chunk` completes, in order."""
        events: list[SseEvent] = []
        for line in self._lines(chunk):
            if line:
                self._field(line)
            elif (event := self._dispatch()) is not None:
                events.append(event)
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that are complete now, without their ends."""
        if self._skip_lf and chunk:
            self._skip_lf = False
            chunk = chunk.removeprefix(b"\n")
        text = self._rest + chunk
        if self._at_start:
            if b"\xef\xbb\xbf".startswith(text[:3]) and len(text) < 3:
                self._rest = text
                return []
            self._at_start = False
            text = text.removeprefix(b"\xef\xbb\xbf")
        if text.endswith(b"\r"):
            self._skip_lf = True
        *lines, self._rest = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        return lines

    def _field(self, line: bytes) -> None:
        name, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self._id = value
            case _:
                pass

    def _dispatch(self) -> SseEvent | None:
        data, event = self._data, self._event or "message"
        self._data, self._event = [], ""
        return SseEvent("\n".join(data), event, self._id) if data else None

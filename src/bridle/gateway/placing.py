"""Which worker a session lives on, as far as a connection's first request says.

The process that listens learns of a session when it is opened, and after a restart from the
workers' stores. Keys are known by their hash only.
"""

from __future__ import annotations

from bridle.capture.sqlite import SqliteReader
from bridle.gateway.keys import PREFIX, key_digest, presented_keys
from bridle.gateway.registry import STORED_AS
from bridle.gateway.routing import Target, split_target


class Places:
    """The sessions of `count` workers."""

    def __init__(self, count: int) -> None:
        self._by_id: dict[str, int] = {}
        self._by_key: dict[bytes, int] = {}
        self._living: list[set[str]] = [set() for _ in range(count)]

    def reserve(self, session_id: str, worker: int) -> None:
        """A session of that id is being opened there."""
        self._by_id[session_id] = worker

    def forget(self, session_id: str) -> None:
        """It could not be opened."""
        del self._by_id[session_id]

    def add(self, session_id: str, digest: bytes, worker: int, *, living: bool = True) -> None:
        """A session is there; `digest` is its key's."""
        self._by_id[session_id] = self._by_key[digest] = worker
        if living:
            self._living[worker].add(session_id)

    def ended(self, session_id: str) -> None:
        """A session lives no more; its id and key are still its worker's to refuse."""
        for living in self._living:
            living.discard(session_id)

    def load(self, worker: int) -> int:
        """Living sessions of a worker."""
        return len(self._living[worker])

    def of(self, session_id: str) -> int | None:
        """The worker of a session; `None` = it is not known."""
        return self._by_id.get(session_id)

    def read(self, worker: int, store: SqliteReader) -> None:
        """Learn of the sessions that a worker's store has. `StoreError`."""
        for record in store.sessions():
            if (kept := record.metadata.get(STORED_AS)) is not None:
                living = store.outcome(record.session_id) is None
                digest = bytes.fromhex(kept["key_sha256"])
                self.add(record.session_id, digest, worker, living=living)

    def owner(self, head: bytes) -> int | None:
        """The worker that a request is for; `None` = nobody's own: it is a control request.

        One that names no session that is known is the first worker's, which refuses it.
        """
        raw, headers = read_head(head)
        target = target_of(raw)
        if target is None:
            return 0
        if target.is_control:
            return None
        if target.token is not None and (found := self._by_id.get(target.token)) is not None:
            return found
        keys = presented_keys(headers, target.query)
        if target.token is not None and target.token.startswith(PREFIX):
            keys.append(target.token)
        known = (self._by_key.get(key_digest(key)) for key in keys)
        return next((worker for worker in known if worker is not None), 0)


def read_head(head: bytes) -> tuple[str, dict[str, str]]:
    """The target and the headers (lower-case names, the last of a name) of a request's head."""
    text = head.partition(b"\r\n\r\n")[0].decode("latin-1")
    first, *lines = text.split("\r\n")
    words = first.split(" ")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return words[1] if len(words) > 1 else "/", headers


def target_of(raw: str) -> Target | None:
    """The target, taken apart; `None` = it is none."""
    try:
        return split_target(raw)
    except ValueError:
        return None

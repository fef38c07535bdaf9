"""One session as a capture file of its own, to be looked at or built again somewhere else."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from bridle.capture import formats
from bridle.errors import StoreError, boundary

_ROWS = {
    "sessions": "SELECT * FROM sessions WHERE n = ?",
    "exchanges": "SELECT * FROM exchanges WHERE session = ? ORDER BY n",
    "deliveries": "SELECT * FROM deliveries WHERE session = ? ORDER BY n",
    "outcomes": "SELECT * FROM outcomes WHERE session = ?",
}
"""Table -> what of it belongs to the session of a number."""


def excerpt(source: Path, session_id: str) -> bytes | None:
    """A capture file that holds one session of the file `source`, as it is at this moment.

    `None` = it has no session of that id. Others may write to `source` meanwhile. Raises
    `StoreError`.
    """
    with closing(formats.open_for_reading(source)) as rows:
        rows.execute("BEGIN")  # all of it at one moment
        query = "SELECT n FROM sessions WHERE session_id = ?"
        number = rows.execute(query, (session_id,)).fetchone()
        if number is None:
            return None
        with (
            boundary(StoreError, f"{source}: cannot copy session {session_id!r}"),
            tempfile.TemporaryDirectory(prefix="bridle-") as folder,
        ):
            target = Path(folder, "capture.sqlite")
            with closing(formats.open_for_writing(target, fsync=False)) as made:
                made.execute("BEGIN")
                for table, select in _ROWS.items():
                    found = rows.execute(select, number)
                    values = ", ".join("?" for _ in found.description)
                    made.executemany(f"INSERT INTO {table} VALUES ({values})", found)  # noqa: S608 - a name of ours
                made.execute("COMMIT")
            return target.read_bytes()

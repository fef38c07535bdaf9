"""Capture: append-only records of model calls, written before a reply leaves, never changed.

- `records`: sessions, exchanges, deliveries, outcomes and rewards, and the contract of a store.
- `sqlite`: the store in one SQLite file per node, with its writer thread.
- `reader`: reads such a file, also that of another process, and copies single sessions.
- `formats`: the file's tables, its versions, and its rows.
- `texts`: the packed texts of its rows.

A trajectory is a pure function of these records, so any session can be rebuilt later.
"""

"""The wire formats of model providers: bytes in, values out; values in, bytes out; no I/O.

`DIALECTS` holds one `WireFormat` per provider API; `recognise` finds the one of a path.
A request becomes a `bridle.types.ModelRequest`; a `bridle.types.Reply` becomes the provider's JSON
or, through a `StreamEncoder`, its event stream. Adding a dialect is one file, one line here and a
row in the docs.
"""

from __future__ import annotations

from bridle.dialects.base import Route, WireFormat
from bridle.dialects.openai_chat import OpenAIChat
from bridle.types import Dialect

DIALECTS: dict[Dialect, WireFormat] = {wire.dialect: wire for wire in (OpenAIChat(),)}
"""Every dialect that the gateway speaks."""


def recognise(method: str, path: str, query: str, headers: dict[str, str]) -> Route | None:
    """What a request asks for, and in which dialect; `None` = nothing that we know.

    `path` has its session prefix removed; any other prefix is accepted. `query` is the part after
    the question mark, `headers` have lower-case names.
    """
    for wire in DIALECTS.values():
        route = wire.route(method, path, query, headers)
        if route is not None:
            return route
    return None

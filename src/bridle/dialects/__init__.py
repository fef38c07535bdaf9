"""The wire formats of model providers: bytes in, values out; values in, bytes out; no I/O.

`DIALECTS` holds one `WireFormat` per provider API; `recognise` finds the one of a path. A request
becomes a `bridle.types.ModelRequest`; a `bridle.types.Reply` becomes the provider's JSON or,
through a `StreamEncoder`, its event stream.

`base` is the contract. `anthropic`, `google`, `openai_chat` and `openai_responses` read requests
and know the fields and the tools that the provider defines; replies are written there, or in the
`..._write` file beside it. They share `json_reader` (with `history`, its memory of earlier
requests), `fields` (the treatment of each field, and the removal of what means nothing to the
model), `tools`, `media` and `ids`. Each member of `bridle.types.Dialect` has a file of its name,
which ends with its `FORMAT`: to add a dialect, write that file, its member and its row in the docs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from bridle.dialects.base import Route, WireFormat, caller
from bridle.types import Dialect

DIALECTS: dict[Dialect, WireFormat] = {
    dialect: import_module(f"{__name__}.{dialect}").FORMAT
    for dialect in sorted(Dialect, key=lambda dialect: dialect is Dialect.OPENAI_CHAT)
}
"""Every dialect that the gateway speaks, in the order in which `recognise` asks them: OpenAI's list
of what it does not serve is last."""

POSTS_KEPT: Final = 256
"""Paths whose route is remembered: harnesses post to few, again and again."""

_POSTS: dict[tuple[str, Dialect], Route] = {}
"""By path, and by whose client asks: of the headers a route depends on that, and on an upgrade."""


def recognise(method: str, path: str, query: str, headers: dict[str, str]) -> Route | None:
    """Return the dialect and the action of an HTTP request; `None` = no known route.

    `path` has its session prefix removed; any other prefix is accepted. `query` is the part after
    the question mark, `headers` have lower-case names.
    """
    # A query may hold a key, which no memo shall; a GET may name any id.
    plain = method == "POST" and not query and "upgrade" not in headers
    asked = (path, caller(path, headers))
    if plain and (known := _POSTS.get(asked)) is not None:
        return known
    wires = DIALECTS.values()
    route = next((r for w in wires if (r := w.route(method, path, query, headers))), None)
    if plain and route is not None and len(_POSTS) < POSTS_KEPT:
        _POSTS[asked] = route
    return route

"""Session and dialect of a request, by its path and headers, before its body is read.

`/s/<session_id>/...` and `/s/<key>/...` are prefixes of ours; what follows is the provider's own
path. A key in a path or a query is never logged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final
from urllib.parse import unquote, urlsplit

from bridle.dialects.fields import unknown_betas
from bridle.gateway.call import Asked
from bridle.harness_rules import KindRule, kind_of
from bridle.types import ModelRequest

CONTROL_ROUTES: Final = frozenset(
    {"sessions", "policy", "replicas", "engines", "metrics", "health"}
)
"""First words of the paths that belong to those who run sessions."""


@dataclass(frozen=True, slots=True)
class Target:
    """A request's target, taken apart."""

    token: str | None
    """The path segment after `/s/`: a session id or a key; `None` = no such prefix."""
    path: str
    """The provider's path, decoded, beginning with `/`."""
    query: str
    """The query as it came, without `?`; may be empty."""

    @property
    def is_control(self) -> bool:
        """Return whether the path is one of `CONTROL_ROUTES`."""
        return self.token is None and self.path.split("/", 2)[1] in CONTROL_ROUTES


def split_target(raw: str) -> Target:
    """Return the parts of a raw request target; an absolute one (as proxies send) loses its
    host.
    """
    if not raw.startswith("/"):
        parts = urlsplit(raw)
        raw = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        raw = raw if raw.startswith("/") else f"/{raw}"
    path, _, query = raw.partition("?")
    if "%" in path:
        path = unquote(path)
    if not path.startswith("/s/"):
        return Target(None, path, query)
    token, _, rest = path[3:].partition("/")
    return Target(token, f"/{rest}", query)


def asked(
    headers: Mapping[str, str],
    request: ModelRequest,
    harness: str | None = None,
    declared: Sequence[KindRule] = (),
) -> Asked:
    """Return what a request's headers (names in lower case) and fields say about the call: its
    kind, idempotency key and retry count.

    `harness` is the name of the session's, `None` = not known; `declared` are its own kind rules.
    """
    count = headers.get("x-stainless-retry-count", "0")
    kind, rule = kind_of(headers, request, harness, declared)
    key = headers.get("idempotency-key", "").encode("utf-8", "surrogateescape")
    return Asked(
        retry_count=0 if count == "0" or not re.fullmatch(r"[0-9]{1,9}", count) else int(count),
        idempotency_key=blake2b(key, digest_size=16).hexdigest() if key else None,
        user_agent=headers.get("user-agent"),
        kind=kind,
        kind_rule=rule,
        unknown_betas=unknown_betas(headers),
    )

"""Session keys: 256 random bits behind `bk-`, made for one session, kept only as a hash.

A key reaches us in any of the places where a provider's client puts it. It is looked up by its
sha256, so what is compared, stored and written to disk never shows the key itself.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from urllib.parse import unquote_plus

PREFIX = "bk-"
_KEY = re.compile(r"bk-[A-Za-z0-9_-]{8,}")


def mint_key() -> str:
    """A new key: `bk-` and 43 URL-safe characters that hold 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def key_digest(key: str) -> bytes:
    """sha256 of a key; the only form in which it is kept."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def redact(text: str) -> str:
    """The same text with every session key replaced by `bk-***`, for logs and messages."""
    return _KEY.sub(PREFIX + "***", text)


def presented_keys(headers: Mapping[str, str], query: str) -> list[str]:
    """All credentials of a request, in no particular order of trust; may be empty.

    `headers` have lower-case names. Read are `Authorization: Bearer`, `x-api-key`,
    `x-goog-api-key` and `?key=`: clients of one provider use several of them, sometimes at once.
    """
    found = []
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and (bearer := bearer.strip()):
        found.append(bearer)
    named = (headers.get("x-api-key", ""), headers.get("x-goog-api-key", ""))
    found.extend(value.strip() for value in named if value)
    if "key=" in query:
        for pair in query.split("&"):
            name, _, value = pair.partition("=")
            if name == "key" and value:
                found.append(unquote_plus(value))
    return found

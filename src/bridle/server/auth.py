"""Who may do what: bearer tokens with roles, from a file or the environment.

A token is compared by its digest with every token there is, so the time tells nothing. Without any
token the server serves loopback only, and whoever reaches it may do all.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from pydantic import Field, ValidationError, model_validator

from bridle.config import Settings, explain, load_toml
from bridle.errors import ConfigError

TOKEN_ENV: Final = "BRIDLE_SERVER_TOKEN"  # noqa: S105 - the variable's name
"""A token with the role `admin`; clients and command line send what it holds."""

HEADER: Final = b"x-polar-control-token"
"""Where Polar's clients send their token; `Authorization: Bearer` is the other way."""


class Role(StrEnum):
    """What a token may do."""

    SUBMIT = "submit"
    """Submit and cancel tasks."""
    READ = "read"
    """Read tasks, results and events, and acknowledge groups."""
    ADMIN = "admin"
    """All, and steer the policy, the pace and callbacks."""
    NODE = "node"
    """Tell what a node of the server's does; none is served over HTTP."""


class Token(Settings):
    """One entry of the token file: `token`, or the SHA-256 of it."""

    name: str = Field(min_length=1, max_length=200)
    """Whose it is: what tasks and logs say."""
    token: str | None = Field(default=None, min_length=16, repr=False)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    roles: tuple[Role, ...] = (Role.SUBMIT, Role.READ)

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.token is None) == (self.sha256 is None):
            message = "give one of `token` and `sha256`"
            raise ValueError(message)
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the token."""
        if self.sha256 is not None:
            return bytes.fromhex(self.sha256)
        return _digest((self.token or "").encode())


class TokenFile(Settings):
    """The token file: `[[tokens]]` with `name`, `token` or `sha256`, and `roles`."""

    tokens: tuple[Token, ...] = ()


class Caller(Settings):
    """Who asks."""

    name: str
    roles: frozenset[Role]

    def may(self, role: Role) -> bool:
        """Whether this role is among the caller's; `admin` holds all."""
        return role in self.roles or Role.ADMIN in self.roles


ANYONE: Final = Caller(name="anyone", roles=frozenset({Role.ADMIN}))
"""Who asks where there are no tokens."""


class Auth:
    """Knows the tokens."""

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self._tokens = [
            (one.digest, Caller(name=one.name, roles=frozenset(one.roles))) for one in tokens
        ]

    @property
    def is_off(self) -> bool:
        """Whether there is no token, so that anyone may do all."""
        return not self._tokens

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        """Who sends a request with these headers (names in lower case); `None` = nobody known."""
        if self.is_off:
            return ANYONE
        digest = _digest(_sent(headers))
        found = None
        for known, caller in self._tokens:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def load_tokens(path: Path | None, environment: Mapping[str, str] | None = None) -> list[Token]:
    """The tokens of a file and of the environment. `ConfigError` names a mistake."""
    environment = os.environ if environment is None else environment
    tokens: list[Token] = []
    try:
        if path is not None:
            tokens += TokenFile.model_validate(load_toml(path)).tokens
        if given := environment.get(TOKEN_ENV):
            tokens.append(Token(name="environment", token=given, roles=(Role.ADMIN,)))
    except ValidationError as error:
        raise explain(error, TOKEN_ENV if path is None else str(path)) from None
    names = [one.name for one in tokens]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: two tokens have one name: {sorted(names)}")
    return tokens


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _sent(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == HEADER:
            return value.strip()
    return b""

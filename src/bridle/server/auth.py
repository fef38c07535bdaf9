"""Bearer tokens with roles: from a file, from the environment, and the operator's own.

A server always has a token: `server.token` in its data folder, made at the first start. A sent
token's digest is compared with every known one in constant time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator

from bridle.config import Settings, load_toml, validated
from bridle.credentials import load_or_make_token
from bridle.errors import ConfigError

TOKEN_ENV: Final = "BRIDLE_SERVER_TOKEN"  # noqa: S105 - the variable's name
"""A token with the role `admin`; clients and the command line send its value."""

HEADER: Final = b"x-polar-control-token"
"""Header of Polar's clients. Others use `Authorization`: `Bearer`, or `Basic` with the token as
password, which HTTP clients make of `http://x:TOKEN@host`."""

TOKEN_FILE: Final = "server.token"  # noqa: S105 - the name of a file
"""File in the data folder with the operator's token, an admin's."""


class TokenRole(StrEnum):
    """A permission of a token."""

    SUBMIT = "submit"
    """Submit and cancel tasks."""
    READ = "read"
    """Read the owner's tasks, results and events, and acknowledge groups."""
    ADMIN = "admin"
    """Do everything for every owner, also change the policy, pause and replay callbacks."""
    METRICS = "metrics"
    """Read the metrics of the whole server (`GET /metrics`)."""


class ApiToken(Settings):
    """One entry of the token file: `token`, or the SHA-256 of it."""

    name: str = Field(min_length=1, max_length=200)
    """Owner whose tasks it submits and reads; several tokens may have one owner."""
    token: str | None = Field(default=None, min_length=16, repr=False)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    roles: tuple[TokenRole, ...] = (TokenRole.SUBMIT, TokenRole.READ)
    callback_secret: str | None = Field(default=None, min_length=16, repr=False)
    """Secret that signs the owner's callbacks; `None` = the server's, which all such owners
    share."""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.token is None) == (self.sha256 is None):
            raise ValueError("give either `token` or `sha256`")
        return self

    @property
    def digest(self) -> bytes:
        if self.sha256 is not None:
            return bytes.fromhex(self.sha256)
        return _digest((self.token or "").encode())


class TokenFile(Settings):
    """The token file: `[[tokens]]` with `name`, `token` or `sha256`, and `roles`."""

    tokens: tuple[ApiToken, ...] = ()


class Caller(Settings):
    """The holder of a token."""

    name: str
    roles: frozenset[TokenRole]

    def may(self, role: TokenRole) -> bool:
        """Return whether the caller has this role; `admin` has all."""
        return role in self.roles or TokenRole.ADMIN in self.roles

    @property
    def tenant(self) -> str | None:
        """The owner whose tasks alone the caller may access; `None` = an admin, who may access
        all.
        """
        return None if TokenRole.ADMIN in self.roles else self.name


class Auth:
    """The known tokens."""

    def __init__(self, tokens: Iterable[ApiToken]) -> None:
        self._tokens = [
            (one.digest, Caller(name=one.name, roles=frozenset(one.roles))) for one in tokens
        ]

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
        """Return the caller who sent these headers (names in lower case); `None` = unknown."""
        sent = [_digest(token) for token in sent_tokens(headers)]
        found = None
        for known, caller in self._tokens:
            for digest in sent:
                if hmac.compare_digest(known, digest):
                    found = caller
        return found


def load_tokens(
    path: Path | None, environment: Mapping[str, str] | None = None, *, own: ApiToken
) -> list[ApiToken]:
    """Return the server's `own` token, those of a file and that of the environment.
    `ConfigError`.
    """
    environment = os.environ if environment is None else environment
    tokens = [own]
    if path is not None:
        tokens += validated(TokenFile, load_toml(path), str(path)).tokens
    if given := environment.get(TOKEN_ENV):
        tokens.append(_admin("environment", given, TOKEN_ENV))
    return tokens


def callback_secrets(tokens: Iterable[ApiToken]) -> dict[str, bytes]:
    """Return the callback secret of each owner that has one.

    Raises `ConfigError` if an owner has two secrets, or two owners have the same one.
    """
    secrets: dict[str, bytes] = {}
    owners: dict[bytes, str] = {}
    for token in tokens:
        if token.callback_secret is None:
            continue
        secret = token.callback_secret.encode()
        if secrets.setdefault(token.name, secret) != secret:
            raise ConfigError(f"tokens of owner {token.name!r} have different callback_secrets")
        if (other := owners.setdefault(secret, token.name)) != token.name:
            message = f"owners {other!r} and {token.name!r} have the same callback_secret"
            raise ConfigError(f"{message}; each needs its own")
    return secrets


def own_token(folder: Path) -> ApiToken:
    """Return the operator's token, made at the first start. `ConfigError` if its file is
    unusable.
    """
    path = folder / TOKEN_FILE
    return _admin("operator", load_or_make_token(path), str(path))


def _admin(name: str, token: str, where: str) -> ApiToken:
    given = {"name": name, "token": token, "roles": (TokenRole.ADMIN,)}
    return validated(ApiToken, given, where)


def _password(given: bytes) -> bytes:
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def sent_tokens(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Yield the tokens in headers, whose names are in lower case."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, given = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield given.strip()
            elif scheme.lower() == b"basic":
                yield _password(given)
        if name == HEADER:
            yield value.strip()

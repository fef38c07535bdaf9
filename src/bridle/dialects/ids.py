"""Ids in each dialect's customary form, all made from two random values that the gateway gives.

A reply's id and the ids of its calls are random (96 bits); item ids and signatures of one reply are
its id and a position, so the same reply is always dressed in the same ids. They carry nothing else.
"""

from __future__ import annotations

import base64
import re

import msgspec

_CALL = "call_"


class _Named(msgspec.Struct):
    """A reply, as far as its id goes; Google's has another name."""

    id: str = ""
    responseId: str = ""  # noqa: N815 - the wire's name


_NAME = msgspec.json.Decoder(_Named)


def reply_id(reply_json: bytes) -> str:
    """Return the id of a reply that this gateway sent, in any dialect."""
    named = _NAME.decode(reply_json)
    return named.id or named.responseId


def bare_id(identity: str) -> str:
    """Return an id that the gateway issued without its dialect's prefix (`chatcmpl-`,
    `msg_`...).
    """
    return identity.replace("-", "_").rpartition("_")[2]


def item_id(prefix: str, reply_id: str, index: int) -> str:
    """Return the id of item `index` of a reply, with the dialect's prefix."""
    return f"{prefix}_{reply_id}{index:03d}"


def call_id(prefix: str, ours: str | None, reply_id: str, index: int) -> str:
    """Return a tool call's id with the dialect's prefix.

    Without an id of its own (`ours`), it is made from the reply's id and the call's index.
    """
    if not ours:
        return item_id(prefix, reply_id, index)
    return f"{prefix}_{ours.removeprefix(_CALL)}" if ours.startswith(_CALL) else ours


def signature(reply_id: str, index: int) -> str:
    """Return the opaque signature of block `index` of a reply, by which later requests are
    recognised.

    It is the base64 of ASCII letters and digits, which never holds the two characters in which the
    standard and the URL-safe alphabet differ.
    """
    text = f"{reply_id}{index:03d}"
    return base64.b64encode((text + "0" * (-len(text) % 3)).encode()).decode()


_SIGNATURE = re.compile(rb"[0-9a-f]{24}[0-9]{3}")


def is_signature(text: str) -> bool:
    """Return whether `text` has the form of a signature that this gateway makes."""
    try:
        return _SIGNATURE.fullmatch(base64.b64decode(text, validate=True)) is not None
    except ValueError:
        return False


def standard_base64(text: str) -> str:
    """Return base64 in the standard alphabet, padded; Google's Python clients send the URL-safe
    one.
    """
    plain = text.translate({ord("-"): "+", ord("_"): "/"}).rstrip("=")
    return plain + "=" * (-len(plain) % 4)

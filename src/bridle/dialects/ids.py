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
    """Return the id of a reply of ours, of any dialect."""
    named = _NAME.decode(reply_json)
    return named.id or named.responseId


def bare_id(identity: str) -> str:
    """Return the random part of an id, without its dialect's prefix."""
    return identity.replace("-", "_").rpartition("_")[2]


def item_id(prefix: str, reply_id: str, index: int) -> str:
    return f"{prefix}_{reply_id}{index:03d}"


def call_id(prefix: str, ours: str | None, reply_id: str, index: int) -> str:
    """Return a call's id with the dialect's prefix; it is made from the reply's id if need be."""
    if not ours:
        return item_id(prefix, reply_id, index)
    return f"{prefix}_{ours.removeprefix(_CALL)}" if ours.startswith(_CALL) else ours


def signature(reply_id: str, index: int) -> str:
    """Return an opaque value for block `index`: base64 that is the same in the URL-safe alphabet.

    The base64 of ASCII letters and digits never holds the two characters in which the alphabets
    differ.
    """
    text = f"{reply_id}{index:03d}"
    return base64.b64encode((text + "0" * (-len(text) % 3)).encode()).decode()


_SIGNATURE = re.compile(rb"[0-9a-f]{24}[0-9]{3}")


def is_signature(text: str) -> bool:
    """Return whether `text` has the form of a signature of ours."""
    try:
        return _SIGNATURE.fullmatch(base64.b64decode(text, validate=True)) is not None
    except ValueError:
        return False


def standard_base64(text: str) -> str:
    """Return base64 in the standard alphabet, padded; Google's Python clients echo the other."""
    plain = text.translate({ord("-"): "+", ord("_"): "/"}).rstrip("=")
    return plain + "=" * (-len(plain) % 4)

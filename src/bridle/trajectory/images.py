"""Images on a trace: their bytes for trainers that take them, a refusal for those that do not."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator

from bridle.errors import TrainingError
from bridle.trajectory.sample import Trace, Trajectory


def refuse_images(trainer: str, session: Trajectory) -> None:
    """Raise `TrainingError` for images, whose pixels `trainer` would not see."""
    if any(trace.media for trace in session.traces):
        raise TrainingError(
            f"session {session.session_id} has images, whose pixels {trainer} would not get: use "
            "tasks without images, or a trainer that takes them from Bridle, such as verl"
        )


def images_of(trace: Trace) -> list[bytes]:
    """Return the files of a trace's images, in the order of their placeholders.

    They stand in the messages as data URLs; `media` has their digests. `TrainingError` for one that
    is not there.
    """
    if not trace.media:
        return []
    files = {hashlib.sha256(file).hexdigest(): file for file in _files(trace)}
    missing = [one for one in trace.media if one["digest"] not in files]
    if missing:
        raise TrainingError(
            f"trace {trace.trace_id}: {len(missing)} of {len(trace.media)} images are not in its "
            f"messages (the first is {missing[0]})"
        )
    return [files[one["digest"]] for one in trace.media]


def _files(trace: Trace) -> Iterator[bytes]:
    for message in (*trace.prompt_messages, *trace.response_messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            url = (part.get("image_url") or {}).get("url") or ""
            head, _, data = url.partition(",")
            if head.startswith("data:") and head.endswith(";base64"):
                try:
                    yield base64.b64decode(data, validate=True)
                except binascii.Error:
                    continue  # it stays missing

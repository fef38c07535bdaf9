"""What adapters of serving engines share beside HTTP: the model's files, and asking for ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from bridle.engines.http import Call, EngineClient
from bridle.errors import EngineError
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.types import Ids


def tokenizer_dir(root: object) -> Path | None:
    """The model's folder, where the server names one that is on this machine."""
    folder = Path(root) if isinstance(root, str) else None
    return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


def end_ids(folder: Path | None) -> tuple[int, ...]:
    """End tokens by the model's own files; empty where they are not to be had."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name if folder is not None else None
        if path is None or not path.is_file():
            continue
        try:
            found = json.loads(path.read_text()).get("eos_token_id")
        except (ValueError, AttributeError):
            continue
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list):
            return tuple(one for one in found if isinstance(one, int))
    return ()


async def tokenized(client: EngineClient, body: JSON) -> Ids | None:
    """What `POST /tokenize` answers, in vLLM's form and SGLang's; `None` = it does not."""
    try:
        text = await client.post("/tokenize", msgspec.json.encode(body), Call(), prompt_tokens=0)
        answer = msgspec.json.decode(text, type=JSON)
    except (EngineError, msgspec.MsgspecError):
        return None
    ids = answer.get("tokens")
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        return None
    return np.array(ids, dtype=np.int32)

"""New weights for a running vLLM, by its own stock routes: a folder that its workers read.

`POST /collective_rpc` with `reload_weights` and a folder, then `/reset_prefix_cache` and
`/update_weight_version`; all of them are there with `VLLM_SERVER_DEV_MODE=1` and nothing else. (Its
weight-transfer engine needs NCCL, CUDA IPC or RDMA, and a process group with the trainer.)

vLLM puts its own weights away before it opens the folder: one that it cannot read, or whose
tensors have other shapes, leaves it without any, and its next call ends it. So what can be seen
from here is looked at first. With tied embeddings a CPU's head goes on with the old weights, and
nothing says so. Seen on vLLM 0.32.0; source: `model_executor/model_loader/reload`,
`model_executor/layers/utils.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from bridle.engines.base import WeightsLostError
from bridle.engines.http import EngineClient
from bridle.engines.probe import Finding
from bridle.errors import EngineError
from bridle.types import JSON

SHAPE = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip
"""Of a model's configuration: what the shapes of its weights follow from."""

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"


async def load(
    client: EngineClient, source: str | Path, version: int, *, served: Path | None = None
) -> None:
    """Have the server load `source`, a folder as it sees it, as `version`; see `Updatable`.

    `served` is the folder of its first weights, if that is on this machine. `EngineError` names a
    folder that cannot be meant, before anything is changed; `WeightsLostError` if the server failed
    in the middle.
    """
    check_folder(Path(source), served)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(source)}}
    try:
        known = await client.tell("/collective_rpc", body)
    except EngineError as error:
        if error.status is None:
            raise
        raise WeightsLostError(
            f"{error}. Its weights are gone: start it anew, and look whether {source} is there on "
            "its machine with weights of its model's shapes",
            status=error.status,
        ) from error
    if not known:
        raise EngineError(f"{client.base_url} takes no weights: start it with {DEV_MODE}")
    await client.tell("/reset_prefix_cache")
    await client.tell("/update_weight_version", {"new_version": str(version)})


def check_folder(source: Path, served: Path | None) -> None:
    """Refuse a folder without weights, or of another model; what is not here cannot be looked at.

    A path that is not here may be there on the server's machine, unless the server's own model is
    here as well.
    """
    if not source.is_dir():
        if served is not None:
            raise EngineError(f"{source} is no folder")
        return
    if not any(source.glob("*.safetensors")) and not any(source.glob("*.bin")):
        raise EngineError(f"{source} has no weights (*.safetensors)")
    if served is None:
        return
    new, old = read_config(source), read_config(served)
    other = [name for name in SHAPE if name in new and name in old and new[name] != old[name]]
    if other:
        told = ", ".join(f"{name} {new[name]} instead of {old[name]}" for name in other)
        raise EngineError(f"{source} is another model than the server's: {told}")


def finding(*, served: Path | None, routes: bool) -> Finding:
    """Build the probe's finding about weight updates while the server runs."""
    if not routes:
        return Finding(
            "weights",
            ok=False,
            needed=False,
            found="taken at the start only",
            means="A trainer cannot put new ones in.",
            fix=f"Start vLLM with {DEV_MODE} in its environment, for trainers only: its routes "
            "are open to whoever reaches it.",
        )
    tied = served is not None and read_config(served).get("tie_word_embeddings") is True
    return Finding(
        "weights",
        ok=not tied,
        needed=False,
        found="taken from a folder while it runs" + (", embeddings are tied" if tied else ""),
        means="On a CPU vLLM's head would go on with the old ones." if tied else "",
        fix="On a CPU serve an untied copy of the model." if tied else "",
    )


def read_config(folder: Path) -> JSON:
    """A model's configuration; empty where it cannot be read."""
    try:
        read = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}

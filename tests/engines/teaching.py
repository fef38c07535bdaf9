"""vLLM's and SGLang's forms of a prompt's logprobs, over a plain forward pass of a model folder.

Source: vLLM 0.32.0, `entrypoints/openai/completion/protocol.py`; SGLang 0.5.23,
`srt/managers/tokenizer_manager.py`; both compared with running servers in their suites.
"""

import asyncio
import json
import threading
from contextlib import contextmanager

import numpy as np
from tests.engines.stub import Stub

from bridle.embedded.model import PlainModel
from bridle.scripted.tokenizer import load_tokenizer


def vllm_scores(ids, scores):
    """The answer of vLLM's completions route."""
    listed: list[dict[str, dict[str, object]] | None] = [None]
    for at in range(1, len(ids)):
        known = {int(ids[at]): float(scores.logprobs[at])}
        known |= zip(scores.top_ids[at].tolist(), scores.top_logprobs[at].tolist(), strict=True)
        listed.append(
            {str(id_): {"logprob": value, "decoded_token": "?"} for id_, value in known.items()}
        )
    return {"choices": [{"prompt_logprobs": listed, "prompt_token_ids": list(ids), "text": "x"}]}


def sglang_scores(ids, scores):
    """The answer of SGLang's `/generate`."""
    own = [None, *scores.logprobs[1:].tolist()]
    best = [
        [[value, id_, None] for id_, value in zip(*pair, strict=True)]
        for pair in zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
    ]
    meta = {
        "input_token_logprobs": [[value, id_, None] for value, id_ in zip(own, ids, strict=True)],
        "input_top_logprobs": [None, *best[1:]],
    }
    return {"text": "", "output_ids": [], "meta_info": meta}


def teaching(folder, *, tells_folder=False, tokenizer=None):
    """A server of both forms that scores by the model in `folder`."""
    model, words = PlainModel(folder), load_tokenizer(tokenizer or str(folder))
    root = str(folder) if tells_folder else "elsewhere"

    def complete(body):
        asked = json.loads(body)
        assert asked["max_tokens"] == 1
        scores = model.scores(np.array(asked["prompt"]), asked["prompt_logprobs"])
        return vllm_scores(asked["prompt"], scores)

    def generate(body):
        asked = json.loads(body)
        assert asked["return_logprob"]
        assert (asked["logprob_start_len"], asked["sampling_params"]["max_new_tokens"]) == (0, 0)
        scores = model.scores(np.array(asked["input_ids"]), asked["top_logprobs_num"])
        return sglang_scores(asked["input_ids"], scores)

    def tokenize(body):
        return {"tokens": words.encode(json.loads(body)["prompt"]).tolist()}

    replies = {
        "v1/models": {"data": [{"id": "teacher", "root": root}]},
        "model_info": {"model_path": root},
        "v1/completions": complete,
        "generate": generate,
        "tokenize": tokenize,
    }
    return Stub(**replies)


@contextmanager
def in_thread(stub):
    """Serve a stub beside a caller that blocks; gives its URL."""
    up, down = threading.Event(), threading.Event()

    async def serve():
        async with stub:
            up.set()
            await asyncio.to_thread(down.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert up.wait(60)
        yield stub.url
    finally:
        down.set()
        thread.join()

"""The embedded engine: any transformers causal language model of a folder, sampled in this process.

It is for one machine: demonstrations, tests and small models. It batches continuously, keeps what
it has computed for the next turn of the same conversation, gives exact logprobs, and takes new
weights between two steps. It does not page its cache, shard a model or use fused kernels: for
anything large, serve the model with vLLM or SGLang and point Bridle at it.

Who does what, from the outside in:

- `engine`: the asyncio face, `EmbeddedEngine`, which checks calls and awaits their chunks.
- `batch`: the thread that decides which calls are in the next step and samples their tokens.
- `call`: one call with its tokens, its stop rules and its own randomness.
- `slots`: the step of models with plain attention, and the caches of finished calls, found by
  longest common prefix.
- `model`: loads a folder, proves that the model computes right, and steps models that `slots`
  does not fit.

Importing this package does not import torch; `EmbeddedEngine.start` does.
"""

from bridle.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]

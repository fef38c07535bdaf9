"""The embedded engine: any transformers causal language model of a folder, sampled in this process.

It is for one machine: demonstrations, tests and small models. It batches continuously, reuses the
KV cache of a conversation's earlier turns, gives exact logprobs, and takes new weights between two
steps. It does not page its cache, shard a model or use fused kernels: for anything large, serve the
model with vLLM or SGLang and point Bridle at it.

Its files, from the outside in:

- `engine`: the asyncio face, `EmbeddedEngine`, which checks calls and awaits their chunks.
- `batch`: the thread that schedules calls, step by step, and samples their tokens.
- `call`: one call with its tokens, its stop rules and its own randomness.
- `model`: loads and checks a model folder.
- `decoders`: the forward pass of a step over all calls or call by call, and the prefix cache.
- `routing`: the experts of a mixture, recorded or replayed.

Importing this package does not import torch; `EmbeddedEngine.start` does.
"""

from bridle.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]

"""The embedded engine: any transformers causal language model of a folder, sampled in this process.

It is for one machine: demonstrations, tests and small models. It batches continuously, keeps what
it has computed for the next turn of the same conversation, gives exact logprobs, and takes new
weights between two steps. It does not page its cache, shard a model or use fused kernels: for
anything large, serve the model with vLLM or SGLang and point Bridle at it.

Who does what, from the outside in:

- `engine`: the asyncio face, `EmbeddedEngine`; checks a call, hands it over, awaits chunks.
- `batch`: the thread; who joins, who leaves, what is computed in the next step.
- `call`: one call on its way, with its tokens, its stop rules and its own randomness.
- `slots`, `single`: how a step is computed, for models with plain attention and for all others.
- `prefixes`: what is remembered of finished calls, found by longest common beginning.
- `sampling`: logits to tokens and logprobs.
- `model`: a folder to a model that is known to work, or an error that says what is wrong.

Importing this package does not import torch; `EmbeddedEngine.start` does.
"""

from bridle.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]

from typing import TypeAlias

# The sampled ids (int32), their logprobs (float32), and the least and largest id and logprob.
Tokens: TypeAlias = tuple[bytes, bytes, tuple[int, int, float, float]]

# Reads a whole reply that repeats the prompt's ids, whose JSON text is `sent`: its tokens, finish
# reason, version spans (version, start, end) and number of cached prompt tokens. `None` = the reply
# is unusual or garbled.
def read_reply(
    body: bytes | memoryview, sent: bytes | memoryview
) -> tuple[Tokens, str, tuple[tuple[int, int, int], ...], int] | None: ...

# Reads an event of a stream that has tokens and nothing else; `None` = it is another one.
def read_event(body: bytes) -> Tokens | None: ...

# Reads a whole reply that repeats the prompt's ids, whose JSON text is `sent`: the sampled ids
# (int32), their logprobs (float32), the finish reason, the version spans (version, start, end), the
# number of cached prompt tokens, and the least and largest id and logprob. `None` = the reply is
# unusual or garbled.
def read_reply(
    body: bytes | memoryview, sent: bytes | memoryview
) -> (
    tuple[
        bytes,
        bytes,
        str,
        tuple[tuple[int, int, int], ...],
        int,
        tuple[int, int, float, float],
    ]
    | None
): ...

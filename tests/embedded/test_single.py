"""Call by call, on a small recurrent model whose cache takes one token at a time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bridle.embedded.call import BatchedCall
from bridle.embedded.model import Feeding, SingleDecoder
from bridle.types import Sampling

VOCAB = 64


class Layer:
    """A cache layer as seen from outside: an object with tensors in it."""

    def __init__(self, total: int) -> None:
        self.states = [torch.full((4,), float(total))]
        self.seen = total


class Summing:
    """Logits point at the sum of all ids so far; right only for what its cache can take."""

    device = torch.device("cpu")

    def __init__(self, *, pieces: bool) -> None:
        self.pieces = pieces
        self.fed: list[int] = []

    def forward(self, input_ids, use_cache=True, cache_params=None):
        """Only its signature is looked at."""

    def __call__(self, input_ids, *, use_cache, cache_params=None):
        row = input_ids[0].tolist()
        self.fed.append(len(row))
        assert self.pieces or cache_params is None or len(row) == 1
        total = sum(row) + (cache_params.layers[0].seen if cache_params else 0)
        cache = SimpleNamespace(layers=[Layer(total)]) if use_cache else None
        logits = torch.eye(VOCAB)[total % VOCAB][None, None]
        return SimpleNamespace(logits=logits, cache_params=cache)


def call(prompt) -> BatchedCall:
    ids = np.array(prompt, dtype=np.int32)
    options: Any = {"limit": 99, "stop_ids": frozenset(), "decode": lambda _: "", "mailbox": None}
    return BatchedCall("r", ids, Sampling(), **options)


@pytest.mark.parametrize(
    ("feeding", "fed"),
    [
        (Feeding.PIECES, [20, 1, 20, 3]),
        (Feeding.TOKENS, [20, 1, 20, 1, 1, 1]),
        (Feeding.ANEW, [20, 21, 20, 24]),
    ],
)
def test_each_way_of_feeding_gives_the_same_logits(feeding, fed):
    model = Summing(pieces=feeding is Feeding.PIECES)
    decoder = SingleDecoder(model, feeding, prefix_bytes=100)
    first, second = call(range(20)), call(range(1, 21))
    decoder.admit(first, 0)
    logits = decoder.forward([(first, 20)])
    assert int(logits[0].argmax()) == sum(range(20)) % VOCAB
    first.append(5, 0.0, 0)
    decoder.admit(second, 0)
    logits = decoder.forward([(first, 1), (second, 20)])
    assert logits.argmax(-1).tolist() == [(190 + 5) % VOCAB, 210 % VOCAB]
    decoder.release(second, keep=True)
    later = call([*range(1, 21), 7, 8, 9])
    decoder.admit(later, 0)
    assert later.computed == (0 if feeding is Feeding.ANEW else 20)
    if feeding is Feeding.ANEW:
        later = call([*range(1, 21), 7, 8, 9, 0])
        decoder.admit(later, 0)
    logits = decoder.forward([(later, later.pending)])
    assert int(logits[0].argmax()) == (210 + 24) % VOCAB
    assert model.fed == fed


def test_a_remembered_cache_serves_one_call_and_counts_its_bytes():
    decoder = SingleDecoder(Summing(pieces=True), Feeding.PIECES, prefix_bytes=100)
    first = call(range(20))
    decoder.admit(first, 0)
    assert decoder.forward([(first, 4)]).shape == (0,)
    decoder.forward([(first, 16)])
    decoder.release(first, keep=True)
    assert decoder.prefixes.size_bytes == 16
    heirs = [call(range(22)), call(range(22))]
    for heir in heirs:
        decoder.admit(heir, 0)
    assert [heir.computed for heir in heirs] == [20, 0]
    assert decoder.limit(0) is None
    assert decoder.reserve([(heirs[0], 2)])

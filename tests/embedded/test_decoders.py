"""Both decoders against the model's plain forward pass, and the store of their caches."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.embedded.models import prompt_of

from bridle.embedded.call import BatchedCall
from bridle.embedded.decoders import (
    SHORTEST,
    Feeding,
    PrefixStore,
    SingleDecoder,
    SlotDecoder,
    proved_decoder,
)
from bridle.embedded.model import load_model
from bridle.types import Sampling

# ---- slots


def call(prompt) -> BatchedCall:
    ids = np.array(prompt, dtype=np.int32)
    options: Any = {"limit": 99, "stop_ids": frozenset(), "decode": lambda _: "", "mailbox": None}
    return BatchedCall("r", ids, Sampling(), **options)


@pytest.fixture(scope="module", params=["qwen3", "mistral", "gemma2"])
def model(request, folders):
    """Plain attention, a window of 7 in all layers, and one in every other layer."""
    made = load_model(folders[request.param], dtype="auto", device=torch.device("cpu"))
    return request.param, made


moves = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from(["step", "leave", "forget"])),
    min_size=4,
    max_size=14,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves)
def test_batched_logits_equal_a_plain_forward_pass_as_calls_join_and_leave(model, oracles, moves):
    name, made = model
    oracle = oracles[name]
    decoder = SlotDecoder(made, max_batch=4, prefix_bytes=40_000)
    texts = {i: prompt_of(30, seed=i // 2)[: 18 + i] + prompt_of(90, seed=i) for i in range(4)}
    joined: dict[int, BatchedCall] = {}
    with torch.inference_mode():
        for who, count, what in moves:
            if who not in joined:
                joined[who] = call(texts[who][: 18 + who + count])
                assert decoder.admit(joined[who], 0)
            elif what != "step":
                decoder.release(joined.pop(who), keep=what == "leave")
                continue
            work = [(c, min(count, c.pending)) for c in joined.values()]
            assert decoder.reserve(work)
            logits = decoder.forward(work)
            ready = [i for i, c in joined.items() if c.pending == 0]
            for row, i in zip(logits, ready, strict=True):
                c = joined[i]
                expected = oracle.logits(c.ids[: c.length].tolist())[-1]
                assert (row - expected).abs().max() < 1e-3
                c.append(texts[i][c.length], 0.0, 0)


def test_a_kv_cache_of_another_weight_version_is_not_shared(model):
    _, made = model
    decoder = SlotDecoder(made, max_batch=4, prefix_bytes=0)
    old, new, beside = call(prompt_of(20)), call(prompt_of(20)), call(prompt_of(20))
    with torch.inference_mode():
        decoder.admit(old, 0)
        decoder.reserve([(old, 20)])
        decoder.forward([(old, 20)])
        decoder.admit(new, 1)
        decoder.admit(beside, 0)
    assert (new.computed, beside.computed) == (0, 19)


def test_kv_cache_slots_grow_in_number_and_length_within_their_budget(model):
    _, made = model
    decoder = SlotDecoder(made, max_batch=8, prefix_bytes=0)
    with torch.inference_mode():
        first = call(prompt_of(20))
        decoder.admit(first, 0)
        decoder.reserve([(first, 20)])
        decoder.forward([(first, 20)])
        decoder.release(first, keep=False)
        assert decoder.limit(256 * 1024) == 1024
        calls = [call(prompt_of(20, seed=i)) for i in range(9)]
        assert [decoder.admit(c, 0) for c in calls] == [True] * 8 + [False]
        assert decoder.reserve([(calls[0], 100)])
        assert not decoder.reserve([(calls[0], 130)])
        for c in calls[4:8]:
            decoder.release(c, keep=False)
        assert decoder.reserve([(calls[0], 130)])
        assert not decoder.reserve([(calls[0], 257)])


def test_a_model_that_ignores_the_attention_mask_is_not_batched(folders):
    made = load_model(folders["llama"], dtype="auto", device=torch.device("cpu"))
    forward = made.forward

    def without_mask(*args, attention_mask=None, **more):
        return forward(*args, **more)

    made.forward = without_mask
    with torch.inference_mode():
        decoder = proved_decoder(made, 2048, 24, max_batch=4, prefix_bytes=0)
    assert decoder.name == "single, pieces"


# ---- call by call, on a small recurrent model

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

    def named_modules(self):
        return ()

    def __call__(self, input_ids, *, use_cache, cache_params=None):
        row = input_ids[0].tolist()
        self.fed.append(len(row))
        assert self.pieces or cache_params is None or len(row) == 1
        total = sum(row) + (cache_params.layers[0].seen if cache_params else 0)
        cache = SimpleNamespace(layers=[Layer(total)]) if use_cache else None
        logits = torch.eye(VOCAB)[total % VOCAB][None, None]
        return SimpleNamespace(logits=logits, cache_params=cache)


@pytest.mark.parametrize(
    ("feeding", "fed"),
    [
        (Feeding.PIECES, [20, 1, 20, 3]),
        (Feeding.TOKENS, [20, 1, 20, 1, 1, 1]),
        (Feeding.ANEW, [20, 21, 20, 24]),
    ],
)
def test_the_single_decoder_gives_the_same_logits_in_each_feeding_mode(feeding, fed):
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


def test_a_stored_kv_cache_is_reused_by_one_call_and_its_bytes_are_counted():
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


# ---- the store of prefixes

parts = st.lists(st.sampled_from([0, 1]), min_size=0, max_size=4)


def ids_of(parts: list[int], tail: int = 0) -> np.ndarray:
    """Ids for each part, and a few more."""
    blocks = [np.full(SHORTEST, part + 1) for part in parts]
    return np.concatenate([*blocks, np.arange(tail) + 7]).astype(np.int32)


@given(st.lists(st.tuples(parts, st.integers(0, 3)), max_size=8), parts, st.integers(0, 3))
def test_the_prefix_store_finds_the_longest_common_prefix(kept, wanted, tail):
    store = PrefixStore(10**9)
    for given_parts, more in kept:
        store.add(ids_of(given_parts, more), None, 1)
    sought = ids_of(wanted, tail)
    entry, matched = store.find(sought)
    longest = 0
    for given_parts, _ in kept:
        n = 0
        while n < min(len(given_parts), len(wanted)) and given_parts[n] == wanted[n]:
            n += 1
        longest = max(longest, n)
    assert matched // SHORTEST == longest
    if entry is not None:
        assert entry.ids[:matched].tolist() == sought[:matched].tolist()


@given(st.lists(parts, max_size=12), st.permutations(range(12)), st.integers(1, 1 << 12))
def test_the_prefix_store_never_exceeds_its_byte_budget(adds, powers, budget):
    store = PrefixStore(budget)
    for given_parts, power in zip(adds, powers, strict=False):
        store.add(ids_of(given_parts), None, 1 << power)
        assert store.size_bytes <= budget
        # Each has its own power of two, so the sum tells how many there are.
        assert store.size_bytes.bit_count() == len(store)
    store.clear()
    assert (len(store), store.size_bytes) == (0, 0)


def test_the_prefix_store_evicts_the_least_recently_used_entry():
    store = PrefixStore(2)
    a, b, c = ids_of([0]), ids_of([1]), ids_of([0, 1])[SHORTEST // 2 :]
    store.add(a, "a", 1)
    store.add(b, "b", 1)
    store.find(a)
    store.add(c, "c", 1)
    entry, _ = store.find(a)
    assert entry is not None
    assert entry.cache == "a"
    assert store.find(b)[0] is None


def test_a_longer_prefix_replaces_its_own_beginning_in_the_prefix_store():
    store = PrefixStore(10)
    store.add(ids_of([0]), "turn 1", 1)
    store.add(ids_of([0, 1], 3), "turn 2", 2)
    assert (len(store), store.size_bytes) == (1, 2)
    assert store.covers(ids_of([0]))
    assert not store.covers(ids_of([0, 0]))
    assert not store.covers(ids_of([]))


def test_removing_a_prefix_twice_counts_its_bytes_once():
    store = PrefixStore(10)
    store.add(ids_of([0]), None, 1)
    entry, _ = store.find(ids_of([0]))
    assert entry is not None
    store.remove(entry)
    store.remove(entry)
    assert store.size_bytes == 0

"""The experts of each token are recorded as the model chose them, and can be given again."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.embedded.models import SMALL, answer, request, save_model

from bridle.embedded import EmbeddedEngine
from bridle.embedded.decoders import Feeding, SingleDecoder
from bridle.embedded.routing import routing_of
from bridle.errors import TrainingError
from bridle.experts import KEY
from bridle.types import FinishReason

TEXT = [*range(5, 45)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("mixture"), "mixture")


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
async def engine(folder):
    made = EmbeddedEngine(folder, device="cpu", step_tokens=16)
    await made.start()
    yield made
    await made.aclose()


def hooks(model) -> Any:
    """The routing of a model that has experts."""
    return routing_of(model)


def plain_rows(model, ids):
    """Experts of a plain forward pass."""
    with torch.no_grad(), hooks(model).recording() as recorded:
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return hooks(model).rows(recorded)


def check(model, prompt, result, *, start=0):
    experts = result.last.extra[KEY]
    assert experts.start == start
    wanted = plain_rows(model, [*prompt, *result.ids])[start:-1]
    assert np.array_equal(experts.rows, wanted)
    assert not any(chunk.extra for chunk in result.chunks[:-1])


async def test_a_reply_has_the_routed_experts_of_its_prompt_and_output_tokens(engine, model):
    result = await answer(engine, request(TEXT, temperature=1.0))
    check(model, TEXT, result)


async def test_calls_that_share_a_batch_or_prefix_have_their_own_routed_experts(engine, model):
    prompts = [TEXT, [*TEXT, 7], [*TEXT[:30], 9, 9], [3, 4, 5]]
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(answer(engine, request(one, temperature=1.0, seed=1)))
            for one in prompts
        ]
    together = [call.result() for call in calls]
    for prompt, result in zip(prompts, together, strict=True):
        check(model, prompt, result)
    longer = [*prompts[0], *together[0].ids, 11, 12]
    cached = await answer(engine, request(longer, temperature=1.0))
    assert cached.cached > len(TEXT)
    check(model, longer, cached)


async def test_only_the_experts_after_the_known_prefix_are_sent(engine, model):
    asked = request(TEXT, temperature=1.0)
    prompt: Any = asked.prompt
    prompt.kept = 21
    check(model, TEXT, await answer(engine, asked), start=20)


async def test_an_aborted_call_has_the_routed_experts_of_its_sampled_tokens(engine, model):
    asked = request(TEXT, temperature=1.0, max_tokens=150, min_tokens=150)
    ids: list[int] = []
    last: Any = None
    async for chunk in engine.generate(asked):
        ids += chunk.output_ids.tolist()
        last = chunk
        if len(ids) == len(chunk.output_ids):
            await engine.abort(asked.request_id)
    assert last.finish_reason is FinishReason.ABORT
    rows = last.extra[KEY].rows
    assert np.array_equal(rows, plain_rows(model, [*TEXT, *ids])[: len(rows)])
    assert len(rows) == len(TEXT) + len(ids) - 1


@pytest.mark.parametrize("feeding", Feeding)
async def test_routed_experts_are_recorded_without_batching_too(feeding, folder, model):
    engine: Any = EmbeddedEngine(folder, device="cpu")
    await engine.start()
    engine._batch._decoder = SingleDecoder(engine._loaded.model, feeding, prefix_bytes=1 << 20)
    first = await answer(engine, request(TEXT, temperature=1.0))
    check(model, TEXT, first)
    longer = [*TEXT, *first.ids, 11, 12]
    check(model, longer, await answer(engine, request(longer, temperature=1.0)))
    await engine.aclose()


def test_replayed_experts_replace_the_router_s_choice(model):
    rows = plain_rows(model, TEXT)
    ids, routing = torch.tensor([TEXT]), hooks(model)
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with routing.replaying(rows):
            assert torch.equal(model(input_ids=ids).logits, plain)
        with routing.replaying(np.full_like(rows, -1)):
            assert torch.equal(model(input_ids=ids).logits, plain)
        others = (rows + 1) % 8
        with routing.replaying(others), routing.recording() as recorded:
            assert not torch.allclose(model(input_ids=ids).logits, plain, atol=0.1)
        assert np.array_equal(routing.rows(recorded), others)
        assert torch.equal(model(input_ids=ids).logits, plain)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda rows: rows[:3], "experts of 3 tokens were recorded, and the forward pass has 40"),
        (lambda rows: rows[:, :1], "experts of 1 layers .* the model has 2"),
        (lambda rows: rows[:, :, :2], "2 experts per token were recorded"),
        (lambda rows: rows + 8, "expert 15 was recorded, and the model has only 8"),
    ],
)
def test_replayed_experts_of_another_shape_are_refused(model, change, fault):
    rows = change(plain_rows(model, TEXT))
    with pytest.raises(TrainingError, match=fault), hooks(model).replaying(rows):
        model(input_ids=torch.tensor([TEXT]))
    model(input_ids=torch.tensor([TEXT]))


def test_replayed_experts_may_have_rows_for_dense_layers_too():
    """SGLang tells a row for each layer, with experts or without."""
    shape = {**SMALL, "num_hidden_layers": 3}
    config = transformers.Qwen3MoeConfig(
        **shape, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[1],
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    rows = plain_rows(model, TEXT)
    assert rows.shape == (40, 2, 2)
    wide = np.zeros((40, 3, 2), np.int16)
    wide[:, [0, 2]] = (rows + 1) % 8
    with torch.no_grad(), hooks(model).replaying(wide), hooks(model).recording() as result:
        model(input_ids=torch.tensor([TEXT]))
    assert np.array_equal(hooks(model).rows(result), (rows + 1) % 8)


def test_the_backward_pass_replays_experts_with_gradient_checkpointing(model):
    rows = (plain_rows(model, TEXT) + 1) % 8
    routing, ids = hooks(model), torch.tensor([TEXT])
    model.train()

    def gradients():
        model.zero_grad()
        with routing.replaying(rows):
            loss = model(input_ids=ids, use_cache=False).logits.square().mean()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    plain = gradients()
    model.activation_checkpointing_enable()
    again = gradients()
    model.activation_checkpointing_disable()
    with routing.replaying(None):
        pass
    model.eval()
    assert torch.allclose(plain, again, atol=1e-6)


def test_a_dense_model_has_no_routing_hooks():
    config = transformers.Qwen3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2)
    assert routing_of(transformers.Qwen3ForCausalLM(config)) is None


async def test_replies_of_a_dense_model_have_no_routed_experts(tmp_path):
    engine = EmbeddedEngine(save_model(tmp_path), device="cpu")
    await engine.start()
    result = await answer(engine, request(TEXT))
    assert result.last.extra == {}
    await engine.aclose()

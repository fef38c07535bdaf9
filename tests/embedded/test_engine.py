"""The engine as its callers see it, against the model's own plain forward pass."""

import asyncio
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from tests.embedded.models import (
    CONFIGS,
    VOCAB,
    Ids,
    Oracle,
    Stop,
    adapt,
    answer,
    prompt_of,
    request,
    save_model,
)

from bridle.embedded import EmbeddedEngine
from bridle.engines.base import GenerateRequest, Versioned
from bridle.errors import ContextOverflowError, EngineError
from bridle.types import FinishReason, LogprobMode, Sampling, VersionSpan


async def together(engine, requests):
    """All answers, asked for at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(engine, r)) for r in requests]
    return [task.result() for task in tasks]


# ---- what is sampled


@pytest.mark.parametrize("name", CONFIGS)
async def test_greedy_tokens_of_a_batch_equal_those_of_each_prompt_alone(
    name, folders, oracles, opened
):
    """Prompts of many lengths, more than fit at once, cut into pieces, joining as others leave."""
    lengths = [1, 2, 5, 17, 18, 33, 40]
    async with opened(folders[name], max_batch=4, step_tokens=16) as engine:
        prompts = [prompt_of(n) for n in lengths]
        wanted = [3 + 2 * i for i in range(len(lengths))]
        asked = [request(p, max_tokens=n) for p, n in zip(prompts, wanted, strict=True)]
        answers = await together(engine, asked)
    for prompt, n, got in zip(prompts, wanted, answers, strict=True):
        expected = oracles[name].greedy(prompt, n)
        assert got.ids == expected[: len(got.ids)]
        assert len(got.ids) == n or got.finish is FinishReason.STOP


@pytest.mark.parametrize("name", CONFIGS)
async def test_logprobs_are_those_of_the_sampled_distribution_in_each_architecture(
    name, folders, oracles, opened
):
    async with opened(folders[name]) as engine:
        prompts = [prompt_of(n) for n in (3, 20, 31)]
        answers = await together(
            engine,
            [request(p, temperature=0.8, seed=i, min_tokens=16) for i, p in enumerate(prompts)],
        )
    for prompt, got in zip(prompts, answers, strict=True):
        oracle = oracles[name]
        logits = oracle.logits(prompt + got.ids)[len(prompt) - 1 : -1] / 0.8
        if oracle.model.generation_config.eos_token_id is not None:
            logits[:, oracle.model.generation_config.eos_token_id] = -torch.inf
        rows = torch.log_softmax(logits, dim=-1)
        expected = rows[torch.arange(len(got.ids)), got.ids]
        assert np.abs(np.array(got.logprobs) - expected.numpy()).max() < 1e-4
        assert len(set(got.ids)) > 1


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(folder, opened):
    asked = [request(prompt_of(9 + i), temperature=1.0, seed=i) for i in range(12)]
    async with opened(folder) as engine:
        crowd = await together(engine, asked)
    async with opened(folder) as engine:
        alone = [await answer(engine, r) for r in reversed(asked)][::-1]
    assert [a.ids for a in crowd] == [a.ids for a in alone]
    assert np.allclose(
        np.concatenate([a.logprobs for a in crowd]),
        np.concatenate([a.logprobs for a in alone]),
        atol=1e-5,
    )


async def test_without_a_seed_two_calls_differ(folder, opened):
    async with opened(folder) as engine:
        prompt = prompt_of(9)
        one, two = [await answer(engine, request(prompt, temperature=1.0)) for _ in range(2)]
    assert one.ids != two.ids


async def test_at_temperature_zero_logprobs_are_zero(folder, opened):
    async with opened(folder) as engine:
        got = await answer(engine, request(prompt_of(5)))
    assert set(got.logprobs) == {0.0}


async def test_top_k_one_is_greedy(folder, oracle, opened):
    async with opened(folder) as engine:
        got = await answer(engine, request(prompt_of(5), temperature=1.0, top_k=1))
    assert got.ids == oracle.greedy(prompt_of(5), len(got.ids))


# ---- when it ends


async def test_the_end_token_ends_a_call_and_is_kept(folder, oracle, opened):
    prompt = prompt_of(12)
    third = oracle.greedy(prompt, 3)[2]
    async with opened(folder) as engine:
        got = await answer(engine, request(prompt, stop_token_ids=(third,)))
        assert got.ids == oracle.greedy(prompt, 3)
        assert (got.finish, got.last.stop_text) == (FinishReason.STOP, None)
        more = await answer(engine, request(prompt, stop_token_ids=(third,), min_tokens=5))
        assert third not in more.ids[:5]


async def test_end_tokens_are_read_from_the_generation_config(tmp_path, oracle, opened):
    prompt = prompt_of(12)
    save_model(tmp_path)
    end = oracle.greedy(prompt, 2)[1]
    transformers.GenerationConfig(eos_token_id=[end, 7]).save_pretrained(tmp_path)
    async with opened(tmp_path) as engine:
        assert engine.info.eos_token_ids == (end, 7)
        got = await answer(engine, request(prompt))
    assert got.ids == oracle.greedy(prompt, 2)


async def test_a_stop_string_ends_a_call_and_its_token_ids_are_kept(folder, oracle, opened):
    prompt = prompt_of(12)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.decode([i]) for i in oracle.greedy(prompt, 10)]
    at = next(i for i in range(2, 9) if texts[i].isascii() and texts[i + 1].isascii())
    stop = texts[at][-1] + texts[at + 1][0]
    async with opened(folder) as engine:
        got = await answer(engine, request(prompt, stop=(stop, "never this")))
    assert got.finish is FinishReason.STOP
    assert got.last.stop_text == stop
    assert got.ids == oracle.greedy(prompt, len(got.ids))
    assert stop in tokenizer.decode(got.ids)
    assert stop not in tokenizer.decode(got.ids[:-1])


async def test_max_tokens_and_the_context_length_end_a_call(folder, opened):
    async with opened(folder, max_context=40) as engine:
        assert engine.info.context_length == 40
        got = await answer(engine, request(prompt_of(30), max_tokens=4))
        assert (len(got.ids), got.finish) == (4, FinishReason.LENGTH)
        got = await answer(engine, request(prompt_of(30), max_tokens=None, min_tokens=10))
        assert (len(got.ids), got.finish) == (10, FinishReason.LENGTH)
        with pytest.raises(ContextOverflowError) as overflow:
            await answer(engine, request(prompt_of(40), max_tokens=4))
        assert (overflow.value.prompt_tokens, overflow.value.context_length) == (40, 40)


async def test_a_stream_has_several_chunks_and_the_first_has_at_most_3_tokens(folder, opened):
    async with opened(folder) as engine:
        got = await answer(engine, request(prompt_of(9), max_tokens=200, min_tokens=200))
    assert len(got.chunks) > 2
    assert 1 <= len(got.chunks[0].output_ids) <= 3
    assert all(chunk.finish_reason is None for chunk in got.chunks[:-1])
    assert got.last.versions == (VersionSpan(0, 0, 200),)


async def test_an_aborted_call_keeps_its_tokens_and_the_others_continue(folder, oracle, opened):
    async with opened(folder) as engine:
        doomed = request(prompt_of(9), "doomed", max_tokens=200, min_tokens=200)
        stop = Stop(engine)
        stream = engine.generate(doomed)
        first = await stop.first_of(stream)
        async with asyncio.TaskGroup() as group:
            other = group.create_task(answer(engine, request(prompt_of(7), max_tokens=20)))
            await asyncio.sleep(0)
            await engine.abort("doomed")
            await engine.abort("unknown")
            stop.go_on.set()
            chunks = [first, *[chunk async for chunk in stream]]
        assert chunks[-1].finish_reason is FinishReason.ABORT
        ids = np.concatenate([chunk.output_ids for chunk in chunks]).tolist()
        assert 0 < len(ids) < 200
        assert chunks[-1].versions == (VersionSpan(0, 0, len(ids)),)
        assert other.result().ids == oracle.greedy(prompt_of(7), len(other.result().ids))


async def test_closing_the_stream_ends_the_call_and_frees_its_request_id(folder, opened):
    async with opened(folder) as engine:
        stream = engine.generate(request(prompt_of(9), "left", max_tokens=200, min_tokens=200))
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(15):
            while engine.stats()["running"]:
                await asyncio.sleep(0.005)
                await answer(engine, request(prompt_of(3), max_tokens=1))
        again = await answer(engine, request(prompt_of(9), "left", max_tokens=2))
        assert len(again.ids) == 2


# ---- what is remembered


async def test_the_next_turn_of_a_conversation_computes_only_its_new_tokens(folder, oracle, opened):
    async with opened(folder) as engine:
        prompt = prompt_of(50)
        first = await answer(engine, request(prompt, max_tokens=8))
        assert first.cached == 0
        computed = engine.stats()["computed_tokens"]
        second_prompt = prompt + first.ids + prompt_of(6, seed=1)
        second = await answer(engine, request(second_prompt, temperature=1.0, seed=3, max_tokens=8))
        assert second.cached == len(prompt + first.ids) - 1
        assert engine.stats()["computed_tokens"] - computed == 7 + len(second.ids) - 1
        assert engine.stats()["remembered"] == 1
    expected = oracle.logprobs(second_prompt, second.ids)
    assert np.abs(np.array(second.logprobs) - expected).max() < 1e-4


async def test_a_prompt_that_shares_a_prefix_reuses_its_kv_cache(folder, oracle, opened):
    async with opened(folder) as engine:
        base = prompt_of(48)
        await answer(engine, request(base + prompt_of(9, seed=1)))
        branch = base + prompt_of(9, seed=2)
        got = await answer(engine, request(branch))
    assert got.cached == 48
    assert got.ids == oracle.greedy(branch, len(got.ids))


async def test_a_fully_cached_prompt_still_samples_its_first_token(folder, oracle, opened):
    async with opened(folder) as engine:
        prompt = prompt_of(40)
        await answer(engine, request(prompt))
        again = await answer(engine, request(prompt))
    assert again.cached == 39
    assert again.ids == oracle.greedy(prompt, len(again.ids))


async def test_a_group_of_equal_prompts_is_computed_once(folder, oracle, opened):
    prompt = prompt_of(200)
    async with opened(folder, step_tokens=64) as engine:
        group = [request(prompt, temperature=1.0, seed=i, max_tokens=4) for i in range(6)]
        answers = await together(engine, group)
        assert engine.stats()["computed_tokens"] < 200 + 6 * 12
    assert sorted(a.cached for a in answers)[:2] in ([0, 192], [0, 199])
    for got in answers:
        expected = oracle.logprobs(prompt, got.ids)
        assert np.abs(np.array(got.logprobs) - expected).max() < 1e-4


async def test_a_model_that_is_not_batched_reuses_the_cache_of_the_last_turn(
    folders, oracles, opened
):
    async with opened(folders["mamba"]) as engine:
        prompt = prompt_of(20)
        first = await answer(engine, request(prompt, max_tokens=8))
        second_prompt = prompt + first.ids + prompt_of(6, seed=1)
        second = await answer(engine, request(second_prompt))
        assert second.cached == len(prompt + first.ids) - 1
    assert second.ids == oracles["mamba"].greedy(second_prompt, len(second.ids))


async def test_a_small_kv_cache_preempts_calls_and_changes_no_token(folder, oracle, opened):
    """2 layers, 2 heads of 8 numbers: 256 bytes a token; room for 384 tokens in all slots."""
    async with opened(folder, cache_bytes=128 << 10, max_context=250) as engine:
        assert engine.info.context_length == 250
        prompts = [prompt_of(20 + 7 * i) for i in range(5)]
        asked = [request(p, max_tokens=120, min_tokens=120) for p in prompts]
        answers = await together(engine, asked)
        assert engine.stats()["put_back"] > 0
        assert engine.stats()["remembered_bytes"] <= 32 << 10
    for prompt, got in zip(prompts, answers, strict=True):
        assert len(got.ids) == 120
        assert got.last.versions == (VersionSpan(0, 0, 120),)
        logits = oracle.logits(prompt + got.ids)[len(prompt) - 1 : -1].clone()
        logits[:, 2] = -torch.inf
        assert got.ids == logits.argmax(-1).tolist()


# ---- weights


async def test_a_weight_update_in_mid_reply_splits_the_reply_s_version_spans(
    folder, opened, tmp_path
):
    new = Oracle(save_model(tmp_path, seed=1))
    async with opened(folder) as engine:
        flying = request(prompt_of(20), "flying", temperature=1.0, max_tokens=150, min_tokens=150)
        stop = Stop(engine)
        stream = engine.generate(flying)
        chunks = [await stop.first_of(stream)]
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.update_weights(new.model.state_dict(), 7))
            await stop.go_on_with_news()
        assert engine.info.version == 7
        after = await answer(engine, request(prompt_of(30), temperature=1.0))
        chunks += [chunk async for chunk in stream]
    spans = chunks[-1].versions
    assert [span.version for span in spans] == [0, 7]
    assert (spans[0].start, spans[1].end) == (0, 150)
    assert spans[0].end == spans[1].start > 0
    assert after.last.versions == (VersionSpan(7, 0, len(after.ids)),)
    expected = new.logprobs(prompt_of(30), after.ids)
    assert np.abs(np.array(after.logprobs) - expected).max() < 1e-4


async def test_kv_caches_of_old_weights_are_not_reused_after_an_update(folder, opened, tmp_path):
    """Neither what was remembered, nor a call in flight, nor one that ends after the update."""
    new = Oracle(save_model(tmp_path, seed=1))
    prompt = prompt_of(40)
    async with opened(folder) as engine:
        await answer(engine, request(prompt, max_tokens=2))
        stream = engine.generate(request(prompt, "flying", max_tokens=60, min_tokens=60))
        await anext(stream)
        await engine.update_weights(str(tmp_path), 1)
        beside = await answer(engine, request(prompt))
        async for _ in stream:
            pass
        later = await answer(engine, request(prompt))
    assert beside.cached == 0
    assert beside.ids == later.ids == new.greedy(prompt, len(later.ids))


@pytest.mark.timeout(120)  # peft is slow where it is imported for the first time
async def test_a_lora_adapter_folder_is_loaded_as_merged_weights(folder, opened, tmp_path):
    adapt(folder, tmp_path, rank=4)
    new = Oracle(tmp_path)
    async with opened(folder) as engine:
        before = await answer(engine, request(prompt_of(30), temperature=1.0, seed=1))
        await engine.update_weights(tmp_path, 1)
        after = await answer(engine, request(prompt_of(30), temperature=1.0, seed=1))
    async with opened(tmp_path) as engine:
        opened_with = await answer(engine, request(prompt_of(30), temperature=1.0, seed=1))
    expected = new.logprobs(prompt_of(30), after.ids)
    assert before.ids != after.ids == opened_with.ids
    assert after.last.versions == (VersionSpan(1, 0, len(after.ids)),)
    assert np.abs(np.array(after.logprobs) - expected).max() < 1e-4


async def test_weights_of_another_model_are_refused_and_the_old_ones_stay(folder, oracle, opened):
    weights = oracle.model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    async with opened(folder) as engine:
        for wrong, text in (
            ({**weights, name: torch.zeros(3, 3)}, r"up_proj.weight' has shape \(3, 3\)"),
            ({k: v for k, v in weights.items() if k != name}, "1 of its weights are missing"),
            ({**weights, "more": torch.zeros(1)}, "1 are unknown"),
        ):
            with pytest.raises(EngineError, match=text):
                await engine.update_weights(wrong, 3)
        with pytest.raises(EngineError, match=r"does not exist|no config\.json"):
            await engine.update_weights(folder / "nowhere", 3)
        got = await answer(engine, request(prompt_of(5)))
        assert engine.info.version == 0
    assert got.ids == oracle.greedy(prompt_of(5), len(got.ids))


async def test_calls_fail_under_nan_weights_and_succeed_after_the_next_update(
    folder, oracle, opened
):
    weights = oracle.model.state_dict()
    broken = {k: v * torch.nan if "layers.0" in k else v for k, v in weights.items()}
    async with opened(folder) as engine:
        await engine.update_weights(broken, 1)
        with pytest.raises(EngineError, match="not numbers after 5 tokens under policy version 1"):
            await answer(engine, request(prompt_of(5)))
        await engine.update_weights(weights, 2)
        got = await answer(engine, request(prompt_of(5)))
    assert got.ids == oracle.greedy(prompt_of(5), len(got.ids))


async def test_the_weight_version_is_set_without_new_weights(folder, oracle, opened):
    async with opened(folder) as engine:
        versioned: Versioned = engine
        await versioned.set_version(9)
        got = await answer(engine, request(prompt_of(5)))
    assert got.last.versions[0].version == 9
    assert got.ids == oracle.greedy(prompt_of(5), len(got.ids))


async def test_tied_weights_are_updated_as_one(tmp_path, opened):
    save_model(tmp_path / "a", "gpt2")
    new = Oracle(save_model(tmp_path / "b", "gpt2", seed=1))
    async with opened(tmp_path / "a") as engine:
        weights = dict(new.model.state_dict())
        weights.pop("lm_head.weight", None)
        await engine.update_weights(weights, 1)
        got = await answer(engine, request(prompt_of(5)))
    assert got.ids == new.greedy(prompt_of(5), len(got.ids))


# ---- what is refused


@pytest.mark.parametrize(
    ("prompt", "sampling", "text"),
    [
        ([], {}, "empty"),
        (
            [1, VOCAB, 2],
            {},
            rf"prompt\[1\]: {VOCAB} is not in the engine's vocabulary of {VOCAB} ids",
        ),
        ([1, -1], {}, r"prompt\[1\]: -1 is not in"),
        ([1], {"temperature": -0.5}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"top_k": -2}, "top_k"),
        ([1], {"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_a_call_with_invalid_prompt_ids_or_sampling_parameters_gets_400(
    folder, opened, prompt, sampling, text
):
    async with opened(folder) as engine:
        with pytest.raises(EngineError, match=text) as refusal:
            await answer(engine, request(prompt, **sampling))
    assert refusal.value.status == 400


async def test_a_grammar_and_a_request_id_in_flight_are_refused(folder, opened):
    async with opened(folder) as engine:
        constrained = GenerateRequest("g", Ids([1]), Sampling(), grammar={"json_schema": {}})
        with pytest.raises(EngineError, match="grammar"):
            await answer(engine, constrained)
        stream = engine.generate(request([1], "twice", max_tokens=100, min_tokens=100))
        await anext(stream)
        with pytest.raises(EngineError, match="'twice' is already in flight"):
            await answer(engine, request([1], "twice"))
        await stream.aclose()


# ---- life and death


async def test_start_returns_the_engine_s_info_and_is_idempotent(folder):
    engine = EmbeddedEngine(folder, version=4)
    with pytest.raises(EngineError, match="not started"):
        await engine.health()
    async with asyncio.TaskGroup() as group:
        starts = [group.create_task(engine.start()) for _ in range(3)]
    info = starts[0].result()
    assert all(start.result() == info for start in starts)
    assert (info.model, info.version, info.token_in) == (folder.name, 4, True)
    assert (info.logprob_mode, info.context_length) == (LogprobMode.PROCESSED, 256)
    assert info.eos_token_ids == (2,)
    assert info.tokenizer_dir == str(folder)
    await engine.health()
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(EngineError, match="closed"):
        await engine.health()


async def test_a_failed_start_raises_its_cause_on_every_later_call(tmp_path):
    engine = EmbeddedEngine(tmp_path / "nowhere")
    for ask in (engine.start, engine.start, engine.health):
        with pytest.raises(EngineError, match="nowhere does not exist"):
            await ask()
    await engine.aclose()


async def test_closing_the_engine_fails_the_calls_in_flight(folder):
    engine = EmbeddedEngine(folder)
    await engine.start()
    stop = Stop(engine)
    stream = engine.generate(request(prompt_of(5), max_tokens=250, min_tokens=250))
    await stop.first_of(stream)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.aclose())
        await stop.go_on_with_news()
        with pytest.raises(EngineError, match="closed"):
            async for _ in stream:
                pass


async def test_an_engine_never_started_can_be_closed(folder):
    engine = EmbeddedEngine(folder)
    await engine.aclose()
    await engine.abort("nothing")


async def test_an_error_in_the_engine_thread_fails_all_calls_and_the_health_check(folder):
    engine = EmbeddedEngine(folder)
    await engine.start()
    stop = Stop(engine)
    stop.fault = ZeroDivisionError("of our own")
    stream = engine.generate(request(prompt_of(5), max_tokens=250, min_tokens=250))
    await stop.first_of(stream)
    stop.go_on.set()
    with pytest.raises(EngineError, match="has failed: ZeroDivisionError: of our own"):
        async for _ in stream:
            pass
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        await engine.health()
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        await answer(engine, request([1]))
    await engine.aclose()


def test_one_engine_serves_several_event_loops(folder, oracle):
    engine = EmbeddedEngine(folder)
    asyncio.run(_started(engine))
    for length in (4, 9):
        got = asyncio.run(answer(engine, request(prompt_of(length))))
        assert got.ids == oracle.greedy(prompt_of(length), len(got.ids))
    asyncio.run(engine.aclose())


async def _started(engine: EmbeddedEngine) -> None:
    await engine.start()


def test_importing_bridle_embedded_does_not_import_torch():
    code = "import sys, bridle.embedded; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

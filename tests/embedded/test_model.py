import json
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch
import transformers
from tests.embedded.models import CONFIGS, SMALL, save_model

from bridle.embedded import model
from bridle.embedded.model import PlainModel, load
from bridle.engines.base import GenerateRequest
from bridle.engines.ids import ArrayIds
from bridle.engines.probe import recompute_logprobs
from bridle.errors import EngineError
from bridle.types import LogprobMode, Sampling


def loaded(folder, **options):
    defaults = {
        "device": "cpu",
        "dtype": "auto",
        "max_batch": 4,
        "max_context": None,
        "cache_bytes": None,
    }
    return load(folder, **{**defaults, **options})


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("qwen3", "slots"),
        ("llama", "slots"),
        ("mixture", "slots"),
        ("gpt2", "slots"),
        ("mistral", "slots"),
        ("gemma2", "slots"),
        ("mamba", "single, pieces"),
    ],
)
def test_each_architecture_gets_the_fastest_decoder_with_correct_logits(name, way, folders):
    assert set(CONFIGS) == {"qwen3", "llama", "mixture", "gpt2", "mistral", "gemma2", "mamba"}
    assert loaded(folders[name]).decoder.name == way


def test_a_model_without_a_kv_cache_recomputes_the_whole_prompt(tmp_path):
    config = transformers.OpenAIGPTConfig(vocab_size=2048, n_embd=32, n_layer=1, n_head=2)
    folder = save_model(tmp_path)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(folder)
    assert loaded(folder).decoder.name == "single, anew"


def test_setting_dtype_bfloat16_loads_the_model_in_bfloat16(folders):
    assert loaded(folders["qwen3"], dtype="bfloat16").model.dtype == torch.bfloat16
    assert loaded(folders["qwen3"]).model.dtype == torch.float32


def test_a_small_kv_cache_limits_the_context_length(folders):
    # 256 bytes a token, a quarter of the memory kept for what is remembered
    assert loaded(folders["qwen3"], cache_bytes=44 << 10).context_length == 128
    with pytest.raises(EngineError, match="too small for one call"):
        loaded(folders["qwen3"], cache_bytes=42 << 10)


def test_a_small_model_runs_on_one_thread(folders):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        loaded(folders["qwen3"])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_missing_model_folder_is_refused_by_name(tmp_path):
    with pytest.raises(EngineError, match="nowhere does not exist"):
        loaded(tmp_path / "nowhere")


def test_a_model_folder_without_a_tokenizer_is_refused_with_the_expected_files(tmp_path):
    transformers.Qwen3Config(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"has no tokenizer \(none of tokenizer.json"):
        loaded(tmp_path)


def test_a_broken_tokenizer_is_refused_with_its_folder(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    with pytest.raises(EngineError, match=r"tokenizer of .* cannot be loaded"):
        loaded(tmp_path / "m")


def test_a_folder_without_config_or_weights_is_refused(tmp_path, folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    with pytest.raises(EngineError, match=r"no config\.json"):
        loaded(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(EngineError, match="cannot be loaded"):
        loaded(tmp_path)


def test_a_model_that_is_no_causal_language_model_is_refused(tmp_path, folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    transformers.T5Config(d_model=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="holds a t5, not a causal language model"):
        loaded(tmp_path)
    config = transformers.BertConfig(**SMALL, num_attention_heads=2, intermediate_size=32)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="cannot sample this model as a causal language model"):
        loaded(tmp_path)


def test_missing_model_weights_are_refused_by_name(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"lacks 11 of the model's weights, 'model\.layers\.2"):
        loaded(tmp_path / "m")


def test_an_unknown_device_is_refused_by_name(folder):
    with pytest.raises(EngineError, match="unknown device 'abacus'"):
        loaded(folder, device="abacus")


# ---- the plain model

PROMPT = np.arange(5, 25, dtype=np.int32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampled_logprobs_equal_those_of_a_plain_forward_pass(opened, folder, temperature):
    plain = PlainModel(folder)
    async with opened(folder) as engine:
        asked = Sampling(temperature=temperature, top_p=1.0, top_k=-1, max_tokens=12, seed=1)
        chunks = [c async for c in engine.generate(GenerateRequest("r", ArrayIds(PROMPT), asked))]
        ids = np.concatenate([chunk.output_ids for chunk in chunks])
        reported = np.concatenate([chunk.logprobs for chunk in chunks])
        assert np.abs(plain.logprobs(PROMPT, ids, temperature) - reported).max() < 1e-3
        finding = await recompute_logprobs(engine, LogprobMode.PROCESSED, plain.logprobs, PROMPT)
    assert finding.ok, finding


def test_a_plain_model_of_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(EngineError):
        PlainModel(tmp_path)


def test_the_first_model_on_a_gpu_turns_off_cudnn_s_attention_and_a_later_one_leaves_it(folders):
    """Loading fails after that where there is no GPU."""
    model._leave_cudnn_attention.cache_clear()
    for expected in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(True)
        with suppress(AssertionError, RuntimeError):
            model.load_model(folders["qwen3"], dtype="auto", device=torch.device("cuda"))
        assert torch.backends.cuda.cudnn_sdp_enabled() == expected

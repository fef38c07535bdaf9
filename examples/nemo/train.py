"""Train a model on tasks with NeMo RL's policy and loss, through the tasks' own harnesses.

python train.py MODEL TASKS OUT --config CONFIG [SETTING...]

CONFIG and SETTINGs are NeMo RL's. Needs its SGLang: its other servers take no prompts as token ids.
Started again with the same OUT, it goes on from the last checkpoint.
"""

import argparse
import json
from pathlib import Path

from nemo_rl.algorithms.grpo import MasterConfig, refit_policy_generation, setup
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
from omegaconf import OmegaConf

from bridle.bridges.base import play
from bridle.bridges.nemo import train_batch
from bridle.bridges.remote import open_server


def config_of(given: argparse.Namespace, settings: list[str]) -> MasterConfig:
    register_omegaconf_resolvers()
    engine = "policy.generation.sglang_cfg"
    here = [
        f"policy.model_name={given.model}",
        f"policy.tokenizer.name={given.model}",
        "policy.max_total_sequence_length=32768",
        f"{engine}.context_length=32768",
        # Engines and trainer share all GPUs: NeMo RL has SGLang no other way.
        engine
        + ".sglang_server_config.num_gpus=${mul:${cluster.gpus_per_node},${cluster.num_nodes}}",
        f"checkpointing.checkpoint_dir={given.out / 'checkpoints'}",
        "checkpointing.metric_name=null",
        f"logger.log_dir={given.out / 'logs'}",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    ]
    config = parse_hydra_overrides(load_config(str(given.config)), [*here, *settings])
    return MasterConfig(**OmegaConf.to_container(config, resolve=True))


def train_step(policy, loss_fn, groups, pad_id, config) -> dict:
    """One step of NeMo RL's policy on all traces of these sessions."""
    batch, rows = train_batch(
        groups,
        pad_id=pad_id,
        token_level_loss=config.loss_fn.token_level_loss,
        normalise=config.grpo.normalize_rewards,
        rows_multiple=policy.data_parallel_size * config.policy["train_micro_batch_size"],
        length_multiple=config.policy["make_sequence_length_divisible_by"],
    )
    data = BatchedDataDict(batch)
    policy.prepare_for_lp_inference()
    data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
    if config.loss_fn.reference_policy_kl_penalty:
        reference = policy.get_reference_policy_logprobs(data)
        data["reference_policy_logprobs"] = reference["reference_logprobs"]
    policy.prepare_for_training()
    results = policy.train(data, loss_fn, gbs=len(batch["input_ids"]))
    return {"loss": float(results["loss"].mean()), "traces": len(rows)}


def save(policy, checkpointer, state, config) -> None:
    """Write a checkpoint, which replaces the one before when it is whole."""
    folder = checkpointer.init_tmp_checkpoint(state.current_step, vars(state), config)
    policy.save_checkpoint(
        weights_path=f"{folder}/policy/weights",
        optimizer_path=f"{folder}/policy/optimizer" if checkpointer.save_optimizer else None,
        tokenizer_path=f"{folder}/policy/tokenizer",
        checkpointing_cfg=config.checkpointing,
    )
    checkpointer.begin_finalization(folder, wait_fn=policy.finalize_async_save)
    checkpointer.finalize_pending()


def name_engines(generation, path: Path) -> None:
    """Name NeMo RL's engines to `bridle serve --engines-from sglang:FILE`, while they serve."""
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(generation.get_rollout_engine_urls()))
    draft.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--server", default="http://127.0.0.1:8080")
    given, settings = parser.parse_known_args()
    config = config_of(given, settings)
    init_ray()
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(
        config.policy["generation"], tokenizer
    )
    sessions, tasks = open_server(given.server, str(given.tasks))
    names = list(tasks)
    # NeMo RL's loader of prompts is not read: a step's tasks follow from its number.
    policy, generation, _, _, _, _, loss_fn, logger, checkpointer, state, config, *_ = setup(
        config, tokenizer, [task.task_id for task in names], None
    )
    size = config.grpo.num_prompts_per_step
    with checkpointer:
        while state.current_step < config.grpo.max_num_steps:
            step = state.current_step
            refit_policy_generation(policy, generation, colocated_inference=True)
            name_engines(generation, given.out / "engines.json")
            sessions.take_back()
            sessions.set_version(step)
            wanted = [names[at % len(names)] for at in range(step * size, (step + 1) * size)]
            groups = play(sessions, wanted, config.grpo.num_generations_per_prompt)
            sessions.give_up()  # nothing is sent to the engines while they sleep
            generation.finish_generation()
            done = train_step(policy, loss_fn, groups, tokenizer.pad_token_id, config)
            state.current_step = state.total_steps = step + 1
            state.consumed_samples += len(wanted)
            logger.log_metrics(done, step + 1, prefix="train")
            print(f"step {step + 1}: {done}", flush=True)
            if (step + 1) % config.checkpointing["save_period"] == 0:
                save(policy, checkpointer, state, config)
    generation.shutdown()


if __name__ == "__main__":
    main()

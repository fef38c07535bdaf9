"""Stands in for NeMo RL's classes while `examples/nemo/train.py` runs, without a GPU.

Names, signatures and the order of calls are those of commit 7ea279a; an engine has SGLang's shape,
and crashes when it is touched while its memory is released.
"""

import asyncio
import json
import os
import runpy
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from omegaconf import OmegaConf
from tests.engines.sleepers import Marked, SglangSleeper

from bridle.scripted.script import make_script

SAID: dict = {"calls": [], "trained": []}


class MasterConfig:
    def __init__(self, *, policy, loss_fn, grpo, cluster, checkpointing, logger):
        self.policy, self.cluster, self.checkpointing, self.logger = (
            policy, cluster, checkpointing, logger
        )  # fmt: skip
        self.loss_fn, self.grpo = SimpleNamespace(**loss_fn), SimpleNamespace(**grpo)


class Generation:
    """SGLang engines that share the trainer's GPUs; asleep from the start."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        script = make_script({"conversations": [{"turns": [{"content": "Done."}]}]}, "test")
        self.engine = SglangSleeper(Marked(script))
        self.run(self.engine.__aenter__())
        self.run(self.engine.sleep())

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def get_rollout_engine_urls(self):
        assert not self.engine.asleep
        return [self.engine.url]

    def finish_generation(self, *args, **kwargs):
        self.run(self.engine.sleep())
        return True

    def shutdown(self):
        SAID["touches"] = self.engine.touches
        return True


class Policy:
    data_parallel_size = 2

    def call(self, name):
        SAID["calls"].append(name)

    def prepare_for_lp_inference(self, keep_train_buffers=False):
        self.call("prepare_for_lp_inference")

    def prepare_for_training(self, *args, **kwargs):
        self.call("prepare_for_training")

    def get_logprobs(self, data, micro_batch_size=None, timer=None):
        return {"logprobs": torch.zeros(data["input_ids"].shape)}

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None):
        assert gbs == len(data["input_ids"])
        assert gbs % self.data_parallel_size == 0
        assert {"prev_logprobs", "generation_logprobs", "advantages", "sample_mask"} <= set(data)
        SAID["trained"].append(int(data["token_mask"].sum()))
        return {"loss": torch.zeros(1)}

    def save_checkpoint(
        self, weights_path, optimizer_path=None, tokenizer_path=None, checkpointing_cfg=None
    ):
        Path(weights_path).mkdir(parents=True)

    def finalize_async_save(self):
        pass


class Checkpoints:
    """`CheckpointManager`: a folder per step, renamed when it is whole."""

    save_optimizer = True

    def __init__(self, folder):
        self.folder = Path(folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def latest(self):
        found = sorted(self.folder.glob("step_*"), key=lambda one: int(one.name[5:]))
        return json.loads((found[-1] / "training_info.json").read_text()) if found else {}

    def init_tmp_checkpoint(self, step, training_info, run_config=None):
        folder = self.folder / f"tmp_step_{step}"
        folder.mkdir(parents=True)
        (folder / "training_info.json").write_text(json.dumps(training_info))
        return folder

    def begin_finalization(self, checkpoint_path, wait_fn=None):
        wait_fn()
        checkpoint_path.rename(checkpoint_path.with_name(checkpoint_path.name[4:]))

    def finalize_pending(self):
        pass


class Logger:
    def log_metrics(self, metrics, step, prefix="", step_metric=None, step_finished=False):
        SAID["calls"].append(f"log {step}")


def setup(master_config, tokenizer, dataset, val_dataset, processor=None, policy_factory=None):
    checkpoints = Checkpoints(master_config.checkpointing["checkpoint_dir"])
    start = {"consumed_samples": 0, "current_step": 0, "total_steps": 0}
    state = SimpleNamespace(**(start | checkpoints.latest()))
    return (
        Policy(), Generation(), None, None, None, None, "loss", Logger(), checkpoints, state,
        master_config, {}, {},
    )  # fmt: skip


def refit_policy_generation(
    policy, policy_generation, colocated_inference, _refit_buffer_size_gb=None, timer=None
):
    policy_generation.run(policy_generation.engine.wake(0))
    return {}


def override(config, given):
    return OmegaConf.merge(config, OmegaConf.from_dotlist(given))


MODULES: dict[str, dict[str, object]] = {
    "nemo_rl.algorithms.grpo": {
        "MasterConfig": MasterConfig,
        "refit_policy_generation": refit_policy_generation,
        "setup": setup,
    },
    "nemo_rl.algorithms.utils": {"get_tokenizer": lambda _: SimpleNamespace(pad_token_id=0)},
    "nemo_rl.distributed.batched_data_dict": {"BatchedDataDict": dict},
    "nemo_rl.distributed.virtual_cluster": {"init_ray": lambda: None},
    "nemo_rl.models.generation": {
        "configure_generation_config": lambda config, tokenizer, is_eval=False: config
    },
    "nemo_rl.utils.config": {
        "load_config": OmegaConf.load,
        "parse_hydra_overrides": override,
        "register_omegaconf_resolvers": lambda: OmegaConf.register_new_resolver(
            "mul", lambda a, b: a * b
        ),
    },
}

if __name__ == "__main__":
    for name, content in MODULES.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    runpy.run_path(os.environ["EXAMPLE"], run_name="__main__")
    Path(os.environ["SAID"]).write_text(json.dumps(SAID))

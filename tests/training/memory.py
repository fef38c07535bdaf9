"""Prints the MiB that an update adds to what a process holds; its argument is JSON of settings.

Freed memory must go back at once for that: `MALLOC_MMAP_THRESHOLD_=65536` in the environment. A
batch of 8 traces of 1024 tokens for a model of 16 layers of width 64, whose weights are small
beside what a backward pass needs.
"""

import json
import sys

import torch
import transformers
from tests.peaks import peak_kib
from tests.training.made import group, session, trace

from bridle.training.grpo import Learner
from bridle.training.samples import make_batch
from bridle.training.settings import GrpoSettings

torch.set_num_threads(1)
torch.manual_seed(0)
SETTINGS = GrpoSettings.model_validate(json.loads(sys.argv[1]))
CONFIG = transformers.Qwen3Config(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=16, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=1,
)  # fmt: skip
TRACES = [
    trace(
        torch.randint(2, 512, (1000,)).tolist(), torch.randint(2, 512, (24,)).tolist(), name=f"{n}"
    )
    for n in range(8)
]
SESSIONS = [session(float(n % 2), one, name=one.trace_id) for n, one in enumerate(TRACES)]
LEARNER = Learner(transformers.Qwen3ForCausalLM(CONFIG), SETTINGS)
BATCH = make_batch([group(*SESSIONS)], SETTINGS, version=0)


before = peak_kib()
report = LEARNER.update(BATCH)
added = (peak_kib() - before) / 1024
print(json.dumps({"mib": added, "norm": report.norm, "seconds": report.seconds}))  # noqa: T201

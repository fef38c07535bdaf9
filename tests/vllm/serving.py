"""A real vLLM server for tests and benchmarks: its model, its start, its end.

The model is made here: Qwen3's architecture, random weights, the tokenizer that ships in Bridle.
Its embeddings are not tied, because vLLM's `reload_weights` is wrong for tied ones without saying
so. vLLM lives in an environment of its own, made by `scripts/test-vllm`, which says in
`BRIDLE_TEST_VLLM` which one it is: the newest, or the oldest that is supported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tests.ports import free_port

from bridle.config import builtin_tokenizer_dir
from bridle.engines.vllm_routes import VllmRoute
from bridle.scripted.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
OLDEST = os.environ.get("BRIDLE_TEST_VLLM") == "vllm-oldest"
"""True in `scripts/test-vllm oldest`."""
LACKING = frozenset({"weight versions", "images"} if OLDEST else ())
"""Abilities that the oldest lacks; tests that need one have the mark `needs`. It reports no version
of its weights, and does not start the model with eyes that tests make. See `test_oldest.py`."""
ROUTES = (VllmRoute.COMPLETIONS,) if OLDEST else tuple(VllmRoute)
"""The routes that take prompts as ids and report them."""
PYTHON = ROOT / ".cache" / f"vllm{'-oldest' * OLDEST}-venv" / "bin" / "python"
CONTEXT_LENGTH = 65_536
START_S = 240.0
"""How long a start may take: 19 s on two quiet cores, 55 s on two busy ones."""

FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *(() if OLDEST else ("--enable-scale-out",)),
    *("--enable-prompt-tokens-details", "--max-model-len", str(CONTEXT_LENGTH)),
    *("--logits-processors", "scripted_logits:ScriptedLogits"),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "TORCHDYNAMO_DISABLE": "1",  # else the first call compiles one function, for 20 s
    "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{HERE}",
}


def printed_flags(title: str) -> tuple[str, ...]:
    """Flags of the server's command in the block of this title in the guide to engines.

    `AssertionError` if the environment of the tests lacks a variable of that command.
    """
    page = (ROOT / "docs" / "guides" / "engines.md").read_text()
    [line] = re.findall(rf'^```console title="{title}"\n\$ (.+)$', page, re.MULTILINE)
    variable, _, flags = line.partition(" vllm serve MODEL ")
    name, _, value = variable.partition("=")
    assert ENVIRONMENT[name] == value
    return tuple(one for one in flags.split() if not (OLDEST and one == "--enable-scale-out"))


def make_model(folder: Path, *, seed: int = 0, layers: int = 1, heads: int = 2) -> Path:
    """Write a model of random weights with its tokenizer; returns `folder`.

    Two heads for each of keys and values. Its output weights are scaled so that its choices are not
    all alike. By default it is as small as it can be: a CPU reads a real harness's 30,000 tokens in
    2 s, and those of 3 layers with 4 heads (1M weights) in 10.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=CONTEXT_LENGTH,
        eos_token_id=load_tokenizer(None).end_id,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    model.save_pretrained(folder)
    shutil.copytree(builtin_tokenizer_dir(), folder, dirs_exist_ok=True)
    return folder


VISION_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""What Idefics 3 has beside the words; the first stands for a piece of an image."""
REFUSAL = '{{- raise_exception("this model reads text only, not a part of type " ~ part.type) -}}'
"""What the shipped template says to an image."""


def make_vision_model(folder: Path) -> Path:
    """Write a small model of random weights that takes images; returns `folder`.

    Idefics 3's architecture, because vLLM runs it without torchvision. An image is 4 placeholders
    between 3 other tokens.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = load_tokenizer(None)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    text = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size + 64,
        hidden_size=128,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=CONTEXT_LENGTH,
        eos_token_id=tokenizer.end_id,
        bos_token_id=None,
        pad_token_id=0,
        **sizes,
    )
    config = transformers.Idefics3Config(
        vision_config={"hidden_size": 64, "image_size": 56, "patch_size": 14, **sizes},
        text_config=text,
        image_token_id=tokenizer.vocab_size,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    model = transformers.Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    model.save_pretrained(folder)
    shutil.copytree(builtin_tokenizer_dir(), folder, dirs_exist_ok=True)
    _add_eyes(folder, tokenizer.vocab_size)
    return folder


def _add_eyes(folder: Path, first: int) -> None:
    """The tokens, the template and the processor of a model that takes images."""
    path = folder / "tokenizer.json"
    read = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    read["added_tokens"] += [
        {"id": first + place, "content": token, "special": True, **flags}
        for place, token in enumerate(VISION_TOKENS)
    ]
    path.write_text(json.dumps(read))
    path = folder / "chat_template.jinja"
    template = path.read_text()
    assert REFUSAL in template
    path.write_text(template.replace(REFUSAL, '{{- "<image>" -}}'))
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": 56},
        "max_image_size": {"longest_edge": 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Idefics3Processor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    whole = {"image_seq_len": 4, "processor_class": "Idefics3Processor"}
    (folder / "processor_config.json").write_text(json.dumps(whole))


class VllmServer:
    """One vLLM at a time, on one port. Use as a context manager; leaving it ends the server."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.script = folder / "script.json"
        """What it says; see `say`."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "vllm.log"
        self.flags: tuple[str, ...] | None = None
        """Flags that the running server was started with; `None` = it does not run."""
        self.start_s = 0.0
        """How long the last start took."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Nothing runs yet."""
        self._keeper = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(HERE / "keeper.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for us; the keeper sees its input close
            )
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End the server and its keeper."""
        try:
            self.stop()
        finally:
            self._stack.close()

    def tell(self, **command: Any) -> int | None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(json.dumps(command) + "\n")
        self._keeper.stdin.flush()
        pid: int | None = json.loads(self._keeper.stdout.readline())
        return pid

    def start(self, *flags: str) -> None:
        """Start, and wait until it answers. `RuntimeError` with the end of its log if it fails."""
        if not PYTHON.exists():
            raise RuntimeError(f"{PYTHON} is missing; make test-vllm makes it")
        began = time.monotonic()
        module = "vllm.entrypoints.openai.api_server"
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        named = ("--model", str(self.model), "--served-model-name", "tiny")
        self.tell(
            start=[str(PYTHON), "-m", module, *named, *where, *FLAGS, *flags],
            env={**os.environ, **ENVIRONMENT, "BRIDLE_TEST_SCRIPT": str(self.script)},
            log=str(self.log),
        )
        self.flags = flags
        while not self._answers():
            late = time.monotonic() - began > START_S
            if self.tell() is None or late:
                self.stop()
                log = self.log.read_text(errors="replace")
                # What starts its engine fails later, and longer, than the engine.
                errors = "\n".join(
                    re.findall(r"^.*EngineCore.*(?:Error|ERROR).*$", log, re.MULTILINE)[:20]
                )
                raise RuntimeError(f"vLLM did not start: {errors}\nIts log ends:\n{log[-4000:]}")
            time.sleep(0.2)
        self.start_s = time.monotonic() - began

    def _answers(self) -> bool:
        try:
            return self.call("GET", "/health", timeout_s=5) == {}
        except OSError:
            return False

    def running(self, *flags: str) -> Self:
        """This server, started with exactly these extra flags if it is not already."""
        if self.flags != flags:
            self.stop()
            self.start(*flags)
        return self

    def kill(self) -> None:
        """`kill -9` of every process of it."""
        self.tell(signal=signal.SIGKILL)
        self.tell(wait=10)
        self.flags = None

    def stop(self) -> None:
        """End it in its own way, and by force what is left."""
        if self.flags is not None:
            self.tell(signal=signal.SIGTERM)
            self.tell(wait=20)
            self.kill()

    def say(self, script: dict[str, Any] | None) -> None:
        """Let it say a script (see `bridle.scripted.script`); `None` = let the model speak."""
        if script is None:
            self.script.unlink(missing_ok=True)
            return
        draft = self.script.with_suffix(".draft")
        draft.write_text(json.dumps(script))
        draft.rename(self.script)

    def slow_down(self, step_s: float) -> None:
        """Let each step take this long at least; call it before the first call."""
        self.script.with_suffix(".pace").write_text(str(step_s))

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = 60) -> Any:
        """JSON of one call; `{}` for an empty answer. Raises `OSError`, for an error status too."""
        request = urllib.request.Request(  # noqa: S310 - loopback
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            return json.loads(answer.read() or b"{}")

    def metric(self, name: str) -> float:
        """Sum of a Prometheus metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:  # noqa: S310
            lines = answer.read().decode().splitlines()
        found = [line.rpartition(" ")[2] for line in lines if line.partition("{")[0] == name]
        return sum(map(float, found))

    def load(self, folder: Path, version: int) -> None:
        """Put other weights of the same shape in; tokens from here on carry `version`."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.call("POST", "/collective_rpc", body)
        self.call("POST", "/reset_prefix_cache")
        self.call("POST", "/update_weight_version", {"new_version": str(version)})

"""A real SGLang server on this machine's CPU: its start, its end. Its model is vLLM's, see there.

It lives in an environment of its own, made by `scripts/test-sglang`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.vllm.serving import CONTEXT_LENGTH, ROOT, VllmServer

HERE = Path(__file__).parent
PYTHON = ROOT / ".cache" / "sglang-venv" / "bin" / "python"
START_S = 240.0
"""How long a start may take: 25 s on two quiet cores, 70 s on two busy ones."""

FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-overlap-schedule", "--skip-server-warmup"),
    *("--tool-call-parser", "qwen", "--mem-fraction-static", "0.2"),
    *("--max-total-tokens", "200000", "--context-length", str(CONTEXT_LENGTH)),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(HERE / "absent"),
}


class RealSglang(VllmServer):
    """One SGLang at a time, on one port; as `VllmServer`, but for its start and its weights."""

    def start(self, *flags: str) -> None:
        """Start, and wait until it answers. `RuntimeError` with the end of its log if it fails."""
        if not PYTHON.exists():
            raise RuntimeError(f"{PYTHON} is missing; make test-sglang makes it")
        began = time.monotonic()
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        named = ("--model-path", str(self.model), "--served-model-name", "tiny")
        self.tell(
            start=[str(PYTHON), "-m", "sglang.launch_server", *named, *where, *FLAGS, *flags],
            env={**os.environ, **ENVIRONMENT},
            log=str(self.log),
        )
        self.flags = flags
        while not self._answers():
            if self.tell() is None or time.monotonic() - began > START_S:
                self.stop()
                tail = self.log.read_text(errors="replace")[-4000:]
                raise RuntimeError(f"SGLang did not start; its log ends:\n{tail}")
            time.sleep(0.2)
        self.start_s = time.monotonic() - began

    def _answers(self) -> bool:
        try:
            return self.call("GET", "/health", timeout_s=30) == {}
        except OSError:
            return False

    def load(self, folder: Path, version: int) -> None:
        """Put other weights of the same shape in; tokens from here on carry `version`."""
        body = {"model_path": str(folder), "weight_version": str(version)}
        assert self.call("POST", "/update_weights_from_disk", body)["success"]

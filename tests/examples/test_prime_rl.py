"""prime-rl's example: what its script starts, up to steps on the traces of real sessions."""

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from bridle.config import builtin_tokenizer_dir

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "prime-rl"
STAND_IN = Path(__file__).with_name("prime_trainer.py")


@pytest.mark.train
@pytest.mark.timeout(300)  # 20 s of a core of one's own
def test_the_prime_rl_example_trains_on_real_sessions_and_resumes_from_its_checkpoint(tmp_path):
    from examples.demo.lookups import lookups
    from examples.demo.policy import lookup_task

    tasks = [lookup_task(one, tmp_path / "files") for one in lookups(3, seed=5)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(one.model_dump_json() for one in tasks))
    shutil.copy(FOLDER / "run.sh", tmp_path / "run.sh")
    # The script starts the orchestrate.py beside it: here the stand-in, which runs the example's.
    (tmp_path / "orchestrate.py").symlink_to(STAND_IN)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("inference", "torchrun"):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {STAND_IN} {name} "$@"\n')
        (programs / name).chmod(0o755)
    with ExitStack() as free:
        sockets = [
            free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)
        ]  # fmt: skip
        ports = [one.getsockname()[1] for one in sockets]
    said = tmp_path / "said.jsonl"
    # The environment of the trainers sees our own, but has no `bridle`.
    path = (programs, Path(sys.executable).parent, ROOT / ".venv" / "bin", os.environ["PATH"])
    environment = {
        "PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": str(ROOT),
        "ENGINE_PORT": str(ports[0]), "PORT": str(ports[1]), "TRAINER_GPUS": "1,2",
        "EXAMPLE": str(FOLDER / "orchestrate.py"), "SAID": str(said),
    }  # fmt: skip
    out = tmp_path / "out"
    for steps in (2, 3):
        subprocess.run(
            [tmp_path / "run.sh", builtin_tokenizer_dir(), "tasks.jsonl", "out", str(steps)],
            env={**os.environ, **environment}, cwd=tmp_path, check=True,
        )  # fmt: skip
    trained = [json.loads(line) for line in said.read_text().splitlines()]
    assert [one["step"] for one in trained] == [1, 2, 3]
    for one in trained:
        assert one["samples"] == 8 * 8
        # Sampled under the weights of the step before, of which the logprobs tell the version.
        assert {*one["trained"]} == {-(one["step"] - 1) - 0.5}
    assert max(path.name for path in (out / "checkpoints").iterdir()) == "step_3"

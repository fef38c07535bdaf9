"""Runs every piece of the training on this machine, on release tasks and with a small model.

    python examples/swe-grpo/run.py --smoke --out out/smoke

1. Tasks are made of packages' releases, verified into a manifest, and divided by package into those
   of the demonstrations, those that train, and the held-out ones.
2. A small model is made by supervised training on scripted sessions of the first kind.
3. vLLM serves it on the CPU, and `bridle train` improves it asynchronously through a script harness
   (`agent.py`), or another (`--harness`). The held-out tasks are played before, during and after.
4. The last checkpoint is exported as a model folder, and plays a held-out task.

A million parameters write no patch. So each task has two, `candidates/one.patch` and
`candidates/two.patch`, and the statement has the strongest hint: the one that holds the release's
change. The demonstrator applies that one in half of its sessions, the other in a quarter, and gives
up in the rest. With `--model FOLDER` that model trains in place of the small one, on the tasks as
they are.

What is there already is not done again; the training goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BRIDLE = [sys.executable, "-m", "bridle.cli"]
PACKAGES = (
    *("boltons==25.0.0..26.1.0", "cachetools==8.0.0..8.0.1", "humanize==4.14.0..4.15.0"),
    *("inflection==0.3.1..0.4.0", "itsdangerous==2.1.2..2.2.0", "markdown==3.11.1..3.11.2"),
    "tomlkit==0.15.1..0.15.2",
)
"""Releases that give a task each, so that none is tried in vain."""
AGENT = {"harness": "command", "command": "python /tmp/agent.py"}
CANDIDATES = ("one", "two")
HINT = "candidates/{}.patch has the change of the next release, candidates/{}.patch has not."
DEMONSTRATED = {"right": 2, "wrong": 1, "give-up": 1}
"""The demonstrator's behaviour -> its share of the sessions."""
CONTEXT = 4096
VLLM = ROOT / ".cache" / "vllm-venv" / "bin" / "python"
VLLM_START_S = 900.0
VLLM_FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out"),
    *("--logprobs-mode", "processed_logprobs", "--max-model-len", str(CONTEXT)),
)
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def say(*words: object, accepted: Sequence[int] = (0,)) -> None:
    """Run one `bridle` command as a user does; an error ends the smoke run."""
    code = subprocess.run([*BRIDLE, *map(str, words)], check=False).returncode
    if code not in accepted:
        raise SystemExit(f"bridle {' '.join(map(str, words))}: exit code {code}")


def read(task: Path) -> dict[str, Any]:
    """The fields of a task folder."""
    fields: dict[str, Any] = json.loads((task / "task.json").read_text())
    return fields


def make_tasks(given: argparse.Namespace) -> list[Path]:
    """The folders of the release tasks, by name; those of `--tasks`, else made here."""
    folder = given.tasks or given.out / "releases"
    if given.tasks is None and not folder.exists():
        most = ("--most", given.most, "--hint", "none")
        say("tasks", "from-releases", *given.packages, *most, "--out", folder)
    found = sorted(path.parent for path in folder.rglob("task.json") if path.parent.name != "repo")
    found = [path for path in found if (path / "solution" / "reference.patch").is_file()]
    return sorted(found, key=lambda path: path.name)


def divide(tasks: Sequence[Path]) -> dict[str, list[Path]]:
    """Divide tasks by their package: of four packages two are demonstrated, and one trains."""
    names = {path: read(path)["metadata"]["package"] for path in tasks}
    parts: dict[str, list[Path]] = {"demonstrations": [], "train": [], "held-out": []}
    turns = ("held-out", "demonstrations", "train", "demonstrations")
    for place, package in enumerate(sorted(set(names.values()))):
        parts[turns[place % 4]] += [path for path in tasks if names[path] == package]
    empty = [name for name, of in parts.items() if not of]
    if empty:
        raise SystemExit(f"no task for: {', '.join(empty)}; name packages with more releases")
    return parts


def offer(source: Path, target: Path, *, choice: bool) -> None:
    """Copy a task; with `choice`, its work folder has the right patch and a useless one."""
    shutil.copytree(source, target, symlinks=True)
    task = read(target)
    task["task_id"] = target.name
    task["budgets"] |= {"agent_s": 900, "init_s": 900}
    if choice:
        right = (target / "solution" / "reference.patch").read_bytes()
        useless = (
            b"diff --git a/CANDIDATE b/CANDIDATE\nnew file mode 100644\n"
            b"--- /dev/null\n+++ b/CANDIDATE\n@@ -0,0 +1 @@\n+nothing\n"
        )
        names = CANDIDATES if is_first_right(target.name) else CANDIDATES[::-1]
        (target / "repo" / "candidates").mkdir()
        for name, patch in zip(names, (right, useless), strict=True):
            (target / "repo" / "candidates" / f"{name}.patch").write_bytes(patch)
        begin = task["instruction"].partition(". ")[0]
        task["instruction"] = f"{begin}. {HINT.format(*names)}"
        task["limits"] = {"max_turns": 6}
    task["agent"] = AGENT
    shutil.copy(HERE / "agent.py", target)
    upload = {"type": "upload_file", "source": "agent.py", "target": "/tmp/agent.py"}  # noqa: S108
    task["runtime"]["prepare"].append(upload)
    (target / "task.json").write_text(json.dumps(task, indent=1) + "\n")


def set_field(task: Path, name: str, value: object) -> None:
    """Set one field of a task folder."""
    (task / "task.json").write_text(json.dumps({**read(task), name: value}, indent=1) + "\n")


def is_first_right(name: str) -> bool:
    """Return whether the first candidate of a task is the right one: as good as random."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def write_tasks(given: argparse.Namespace) -> Path:
    """The folder of the three task sets."""
    folder = given.out / "tasks"
    if folder.exists():
        return folder
    draft = given.out / "tasks.part"
    shutil.rmtree(draft, ignore_errors=True)
    for name, of in divide(make_tasks(given)).items():
        for path in of[: given.most_tasks]:
            target = draft / name / path.name
            offer(path, target, choice=given.model is None)
            if name == "demonstrations":
                set_field(target, "evaluator", {"strategy": "session_completed"})
    return draft.rename(folder)


def verify(given: argparse.Namespace, tasks: Path) -> None:
    """Verify tasks into the manifest, and leave out those that are not sound here."""
    manifest = given.out / "manifest.jsonl"
    say("tasks", "verify", tasks, "--manifest", manifest, accepted=(0, 1))
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    for row in rows:
        if row["verdict"] != "sound":
            shutil.rmtree(tasks / row["task"], ignore_errors=True)
    if not any(tasks.glob("*/task.json")):
        raise SystemExit(f"{tasks}: no task is sound")


def demonstrate(given: argparse.Namespace, tasks: Path) -> Path:
    """Sessions of scripted engines, one for each behaviour of the demonstrator."""
    folder: Path = given.out / "demonstrations"
    folder.mkdir(exist_ok=True)
    for behaviour, share in DEMONSTRATED.items():
        script = folder / f"{behaviour}.json"
        script.write_text(json.dumps({"conversations": conversations(behaviour)}))
        say(
            *("generate", tasks, *harness(given), "--engine", f"scripted:{script}"),
            *("--samples", share * given.demonstrations, "--min-reward", 0),
            *("--concurrency", given.concurrency, "--out", folder / behaviour),
        )
    examples = folder / "examples.jsonl"
    texts = [(folder / behaviour / "data.jsonl").read_text() for behaviour in DEMONSTRATED]
    examples.write_text("".join(texts))
    return examples


def conversations(behaviour: str) -> list[dict[str, Any]]:
    """The script of a behaviour, for both places of the right patch."""
    if behaviour == "give-up":
        return [{"turns": [{"content": "I give up."}]}]
    found = []
    for names in (CANDIDATES, CANDIDATES[::-1]):
        taken = names[0] if behaviour == "right" else names[1]
        apply = {"content": "", "shell": [f"git apply candidates/{taken}.patch"]}
        when = {"user_contains": HINT.format(*names)}
        found.append({"when": when, "turns": [apply, {"content": "Done."}]})
    return found


def make_model(given: argparse.Namespace, tasks: Path) -> Path:
    """The small model, which has learned from the demonstrations alone."""
    folder: Path = given.out / "model"
    if folder.exists():
        return folder
    examples = demonstrate(given, tasks)
    sys.path.insert(0, str(ROOT))
    from examples.demo.recipe import SHORT, WHOLE, make_demo_model

    from bridle.training.sft import SftProgress

    def tell(name: str, done: SftProgress) -> None:
        if done.step % 20 == 0:
            print(f"supervised, {name}: step {done.step}, {done.loss:.3f} nats", flush=True)

    make_demo_model(
        examples,
        folder,
        tell,
        short=SHORT.model_copy(update={"max_steps": given.sft_steps}),
        whole=WHOLE.model_copy(update={"max_steps": given.sft_steps, "batch_tokens": 4096}),
    )
    return folder


def harness(given: argparse.Namespace) -> list[str]:
    """The flag for another harness than the tasks' own."""
    return ["--harness", given.harness] if given.harness else []


@contextmanager
def engine(given: argparse.Namespace, model: Path) -> Iterator[str | None]:
    """The URL of the engine; `None` = the embedded one, in the trainer's process."""
    if given.engine is not None:
        yield None if given.engine == "embedded" else given.engine
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ("--model", str(model), "--host", "127.0.0.1", "--port", str(port))
    log = given.out / "vllm.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [str(given.vllm), "-m", "vllm.entrypoints.openai.api_server", *where, *VLLM_FLAGS],
            env={**os.environ, **VLLM_ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until vLLM answers."""
    began = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            if server.poll() is not None or time.monotonic() - began > VLLM_START_S:
                raise SystemExit(f"vLLM did not start; see {log}") from None
            time.sleep(0.5)


def train(given: argparse.Namespace, tasks: Path, model: Path) -> None:
    """Train asynchronously, and play the held-out tasks before, during and after."""
    with engine(given, model) as url:
        settings = {
            "model": str(model),
            "tasks": str(tasks / "train"),
            "held_out": str(tasks / "held-out"),
            "out": str(given.out / "training"),
            "samples": given.samples,
            "held_out_samples": given.held_out_samples,
            "concurrency": given.concurrency,
            "verified": str(given.out / "manifest.jsonl"),
        }
        settings |= {"engines": [url]} if url else {}
        settings |= {"harness": given.harness} if given.harness else {}
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        lines += ["[grpo]", f"learning_rate = {given.learning_rate}", "threads = 1"]
        lines += ["[loop]", f"steps = {given.steps}", f"groups_per_step = {given.groups}"]
        lines += ["max_lag = 1", f"evaluate_every = {(given.steps + 1) // 2}"]
        lines += [f"checkpoint_every = {(given.steps + 1) // 2}"]
        path = given.out / "train.toml"
        path.write_text("\n".join(lines) + "\n")
        say("train", path, *(["--resume"] if (given.out / "training").exists() else []))


def export(given: argparse.Namespace, tasks: Path) -> Path:
    """The last checkpoint as a model folder; it plays a held-out task."""
    steps = (given.out / "training" / "checkpoints").glob("step-*")
    last = max(steps, key=lambda path: int(path.name.partition("-")[2]))
    target: Path = given.out / "exported"
    shutil.rmtree(target, ignore_errors=True)
    wanted = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
    target.mkdir()
    for path in (path for pattern in wanted for path in last.glob(pattern)):
        shutil.copy(path, target)
    shutil.rmtree(given.out / "check", ignore_errors=True)
    say(
        *("run", tasks / "held-out", "--first", 1, *harness(given)),
        *("--engine", f"embedded:{target}", "--out", given.out / "check"),
    )
    return target


def report(given: argparse.Namespace, seconds: float) -> str:
    """The curve as a Markdown table, and the share of groups whose rewards differ."""
    course = json.loads((given.out / "training" / "course.json").read_text())
    steps = course["steps"]
    rows = ["| training | held-out reward | 95 % interval | sessions |", "|---|---|---|---|"]
    for one in course["evaluations"]:
        when = {0: "before", len(steps): "after"}.get(one["step"], "during")
        width = "" if one.get("half_width") is None else f"± {one['half_width']:.2f}"
        place = f"{when}, {one['step']} updates"
        rows.append(f"| {place} | {one['reward']:.2f} | {width} | {one['sessions']} |")
    groups, flat = (sum(step[name] for step in steps) for name in ("groups", "flat"))
    rewards = ", ".join("-" if s["reward"] is None else f"{s['reward']:.2f}" for s in steps)
    share = f"{100 * (groups - flat) / groups:.0f} %" if groups else "none"
    differing = f"{groups - flat} of {groups} groups ({share}) have differing rewards."
    rows += ["", f"{differing} Mean rewards of the steps: {rewards}. {seconds:.0f} s."]
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("out/smoke"))
    parser.add_argument("--packages", nargs="+", default=PACKAGES, metavar="PACKAGE[==A..B]")
    parser.add_argument("--most", type=int, default=2, help="tasks of a package")
    parser.add_argument("--tasks", type=Path, help="release tasks that are there already")
    parser.add_argument("--most-tasks", type=int, default=8, help="that train, and held out")
    parser.add_argument("--model", type=Path, help="train this model, on the tasks as they are")
    parser.add_argument("--engine", help="embedded, or the URL of a server; default: a vLLM")
    parser.add_argument(
        "--vllm", type=Path, default=VLLM, help="Python that has vLLM; default: that of test-vllm"
    )
    parser.add_argument("--harness", help="in place of the small agent beside this file")
    parser.add_argument("--demonstrations", type=int, default=8, help="a quarter of a task's")
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=6, help="updates")
    parser.add_argument("--groups", type=int, default=2, help="of an update")
    parser.add_argument("--samples", type=int, default=4, help="sessions of a group")
    parser.add_argument("--held-out-samples", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--concurrency", type=int, default=4)
    given = parser.parse_args()
    began = time.monotonic()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    tasks = write_tasks(given)
    for name in ("train", "held-out"):
        verify(given, tasks / name)
    model = given.model or make_model(given, tasks / "demonstrations")
    train(given, tasks, model)
    exported = export(given, tasks)
    text = report(given, time.monotonic() - began)
    (given.out / "report.md").write_text(text)
    sys.stdout.write(f"{text}\nthe model: {exported}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

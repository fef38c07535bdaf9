"""`bridle doctor` and `bridle certify`: checks before a run and after it.

`doctor` checks this machine, tasks, engines and runtimes, and says what to do. The agents of tasks
are proved by one scripted model call each (`prove`). `certify` tells whether a trainer computes the
logprobs that the rollout had, and why not.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json as json_text
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import orjson
import typer

from bridle.bridges.parquet import read_logprobs, read_trajectories, write_logprobs
from bridle.cli.run import BatchRun, run_batch
from bridle.cli.show import counts_of
from bridle.cli.terminal import (
    JsonOption,
    check_file,
    console,
    notes,
    print_json,
    print_table,
    table,
)
from bridle.config import EvaluatorSpec, Limits, RuntimeSpec, Task, cache_dir
from bridle.datasets.jsonl import load_tasks
from bridle.dialects import DIALECTS
from bridle.dialects.base import Route, RouteKind
from bridle.engines import check_model_folder, open_engine
from bridle.engines.base import Engine, EngineInfo
from bridle.engines.probe import (
    Finding,
    ProbeReport,
    Render,
    compare_rendering,
    compare_template,
    compare_vocabulary,
    probe,
    recompute_logprobs,
)
from bridle.engines.vllm import VllmEngine
from bridle.errors import BridleError, ConfigError, EngineError, install_extra
from bridle.folders import private_file
from bridle.harnesses.packaged import OLDEST, c_library, carries
from bridle.node.results import CERTIFICATE, SUMMARY, capture_files, sessions, trajectory_of
from bridle.prompting.renderer import PromptRenderer, load_renderer
from bridle.runtimes import default_backend, runtime_class
from bridle.runtimes.conformance import CHECKS, Nonconformity, run_check
from bridle.training.settings import GrpoSettings
from bridle.trajectory import fidelity
from bridle.trajectory.fidelity import Certificate, Facts, Recomputed
from bridle.trajectory.sample import Trace
from bridle.types import JSON, Dialect, Ids, without_user_info


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    what: str
    ok: bool
    """False = a feature of Bridle will not work."""
    found: str
    advice: str = ""
    """The remedy; empty if the check passed."""


def doctor(
    tasks: Annotated[
        Path | None,
        typer.Argument(help="Try the agents of these tasks with one scripted model call each."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Probe this engine: URL, scripted:FILE or embedded:DIR; once for each replica."
        ),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer folder or 'builtin'.")] = None,
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="Sample, and recompute the logprobs with the model's folder on this machine.",
        ),
    ] = False,
    runtime: Annotated[
        str | None, typer.Option(help="Run the conformance suite of runtimes on this backend.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Image that the suite runs in, if the backend needs one.")
    ] = None,
    runs: Annotated[
        Path, typer.Option(help="Folder of runs whose requests are searched for unknown parts.")
    ] = Path("runs"),
    json: JsonOption = False,
) -> None:
    """Check this machine, tasks, an engine or a runtime, and say what is missing."""
    findings = []
    if tasks is not None:
        findings += _proofs(tasks)
    if engine:
        findings += asyncio.run(_probe_all(engine, tokenizer, logprobs=logprobs))
    if runtime is not None:
        findings += asyncio.run(_conformance(runtime, image))
    if not (tasks or engine or runtime):
        findings = [*machine(), *requests(runs)]
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = ((("ok" if f.ok else "MISSING"), f.what, f.found, f.advice) for f in findings)
        console.print(table("doctor", ("", "what", "found", "what to do"), rows))
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


def _proofs(path: Path) -> list[CheckResult]:
    """Check that the agents of tasks start in their runtimes and reach their model."""
    findings = []
    for proof in prove(distinct(load_tasks(path))):
        found = f"{proof.calls} scripted model calls answered, {proof.status}"
        advice = "" if proof.ok else f"{proof.error}\n{proof.output}".strip()
        findings.append(CheckResult(f"agent of {proof.task_id}", proof.ok, found, advice))
    return findings


def machine() -> list[CheckResult]:
    """Return the results of all checks of this machine that a run may need."""
    return [
        _python(),
        _program("git", "most agents need it: install git"),
        _program("npm", "harnesses from npm (such as pi) need it: install node with npm"),
        _program("bash", "runtimes run commands with it: install bash"),
        _torch(),
        _cache(),
        _bundles(),
        _runtime(),
    ]


def requests(runs: Path) -> list[CheckResult]:
    """Return a check for parts of the runs' captured requests that the gateway did not know, if
    any.
    """
    lines: list[JSON] = []
    for path in (runs / SUMMARY, *runs.glob(f"*/{SUMMARY}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            lines += json_text.loads(path.read_text())["sessions"]
    if not (unknown := counts_of(lines, "unknown")):
        return []
    found = ", ".join(f"{count} {name}" for name, count in unknown.most_common())
    advice = "served but ignored: check whether the model missed context (`bridle show SESSION`)"
    return [CheckResult("unknown in requests", ok=True, found=found, advice=advice)]


def _python() -> CheckResult:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return CheckResult(
        "python", sys.version_info >= (3, 11), version, "Python 3.11 or newer is needed"
    )


def _program(name: str, advice: str) -> CheckResult:
    path = shutil.which(name)
    if path is None:
        return CheckResult(name, ok=False, found="not on PATH", advice=advice)
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, check=False, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return CheckResult(name, ok=False, found=f"does not start: {error}", advice=advice)
    first = (answer.stdout or answer.stderr).strip().splitlines()[:1]
    return CheckResult(name, ok=answer.returncode == 0, found=first[0] if first else path)


def _torch() -> CheckResult:
    if importlib.util.find_spec("torch") is None:
        advice = f"the embedded engine and training need it: run {install_extra('embedded')}"
        return CheckResult("torch", ok=False, found="not installed", advice=advice)
    return CheckResult("torch", ok=True, found=version("torch"))


def _cache() -> CheckResult:
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_gib = shutil.disk_usage(existing).free / 2**30
    found = f"{folder}, {free_gib:.0f} GiB free"
    if not os.access(existing, os.W_OK):
        return CheckResult("cache", ok=False, found=found, advice="not writable: set BRIDLE_CACHE")
    return CheckResult(
        "cache", ok=free_gib >= 4, found=found, advice="" if free_gib >= 4 else "4 GiB are needed"
    )


def _runtime() -> CheckResult:
    backend, reason = default_backend()
    advice = "" if backend != "local" else "the agents' commands are not contained: make bwrap work"
    return CheckResult(
        "runtime", ok=backend != "local", found=f"{backend}: {reason}", advice=advice
    )


def _bundles() -> CheckResult:
    library = c_library()
    needed = f"bundles made here work in 'local' only: glibc {OLDEST[0]}.{OLDEST[1]} is needed"
    ok = carries(library)
    found = f"{library or 'unknown C library'}, bundles start in {'any image' if ok else 'local'}"
    return CheckResult("bundles", ok=ok, found=found, advice="" if ok else needed)


async def _probe_all(
    specs: list[str], tokenizer: str | None, *, logprobs: bool
) -> list[CheckResult]:
    """Probe each replica, and check that all serve one model in one way."""
    infos: dict[str, EngineInfo] = {}
    findings = []
    for spec in specs:
        found, info = await _probe(spec, tokenizer, logprobs=logprobs)
        name = f"{spec}: " if len(specs) > 1 else ""
        findings += [replace(finding, what=name + finding.what) for finding in found]
        if info is not None:
            infos[spec] = info
    if len(specs) > 1:
        findings.append(_alike(infos, len(specs)))
    return findings


def _alike(infos: dict[str, EngineInfo], wanted: int) -> CheckResult:
    """Check that replicas serve one model in one way."""
    if len(infos) < wanted:
        advice = "a gateway starts with those that answer and adds the others when they do"
        return CheckResult(
            "replicas", ok=bool(infos), found=f"{len(infos)} of {wanted} answer", advice=advice
        )
    ways = {
        f"{info.model}, {info.logprob_mode} logprobs, token in {info.token_in}"
        for info in infos.values()
    }
    lengths = {info.context_length for info in infos.values()}
    found = "; ".join(sorted(ways)) + f"; context {min(lengths)}"
    advice = (
        "" if len(ways) == 1 else "replicas must serve one model in one way: compare their flags"
    )
    return CheckResult("replicas", ok=len(ways) == 1, found=found, advice=advice)


ANSWER_S = 60.0
"""Time that a served engine may take to start answering and be probed."""


async def _probe(
    spec: str, tokenizer: str | None, *, logprobs: bool
) -> tuple[list[CheckResult], EngineInfo | None]:
    """Probe an engine; one that fails to start is reported too."""
    engine = open_engine(spec, tokenizer=tokenizer)
    info: EngineInfo | None = None
    compared = []
    try:
        async with asyncio.timeout(None if spec.startswith("embedded:") else ANSWER_S):
            info = await engine.start()
        report = getattr(engine, "report", None) or await probe(engine)
        compared = [one async for one in compare(engine, info, tokenizer, logprobs=logprobs)]
        context = CheckResult("context length", ok=True, found=f"{info.context_length} tokens")
    except (EngineError, TimeoutError) as error:
        report = getattr(engine, "report", None)
        late = f"{without_user_info(spec)} did not answer within {ANSWER_S:g} s; does it hang?"
        context = CheckResult("engine", ok=False, found=str(error) or late)
    finally:
        await engine.aclose()
    if not isinstance(report, ProbeReport):
        return [context], info
    checks = (
        CheckResult(f.what, f.ok or not f.needed, f.found, f.fix or f.means)
        for f in (*report.findings, *compared)
    )
    return [*checks, context], info


async def _conformance(backend: str, image: str | None) -> list[CheckResult]:
    factory = runtime_class(backend)
    findings = []
    for check in CHECKS:
        what = check.__name__.replace("_", " ")
        with tempfile.TemporaryDirectory(prefix="bridle-doctor-") as scratch:
            try:
                await run_check(check, factory, Path(scratch), RuntimeSpec(image=image))
            except (BridleError, Nonconformity) as error:
                findings.append(CheckResult(what, ok=False, found=str(error)))
            else:
                findings.append(CheckResult(what, ok=True, found="holds"))
    return findings


SAMPLED_CHAT = [{"role": "user", "content": "Say anything."}]
"""Conversation whose reply is sampled for the comparison of logprobs."""


async def compare(
    engine: Engine, info: EngineInfo, tokenizer: str | None, *, logprobs: bool
) -> AsyncIterator[Finding]:
    """Yield the findings of comparing a started engine with Bridle's tokenizer, renderer and
    template.

    `tokenizer=None` = the engine's. With `logprobs` it is also compared with a forward pass of the
    model, whose folder must be on this machine.
    """
    if isinstance(engine, VllmEngine):
        yield await engine.parsers()
    source = tokenizer or info.tokenizer_dir
    if source is None:
        yield Finding.note("tokenizer", "none to compare: give --tokenizer DIR")
        return
    try:
        renderer = load_renderer(source)
    except BridleError as error:
        yield failed("tokenizer", str(error), "Give the model's own tokenizer: --tokenizer DIR.")
        return
    plain = partial(renderer.tokenizer.encode, add_special_tokens=False)
    yield await compare_vocabulary(engine, lambda text: np.array(plain(text)), renderer.vocab_size)
    render = _render(renderer)
    yield await compare_rendering(engine, render)
    yield await compare_template(engine)
    if logprobs:
        yield await _check_recomputed(engine, info, render, source)


def failed(what: str, found: str, fix: str) -> Finding:
    """Return the finding that a check could not be made, and the fix."""
    return Finding(what, ok=False, needed=True, found=found, fix=fix)


def _render(renderer: PromptRenderer) -> Render:
    """Return a function that renders OpenAI Chat messages as the gateway does."""

    def render(messages: list[JSON], tools: list[JSON]) -> Ids:
        body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
        route = Route(Dialect.OPENAI_CHAT, RouteKind.GENERATE)
        asked = DIALECTS[Dialect.OPENAI_CHAT].parse(route, msgspec.json.encode(body), {})
        return renderer.render(asked.messages, asked.tools, thinking=None)

    return render


async def _check_recomputed(
    engine: Engine, info: EngineInfo, render: Render, source: str
) -> Finding:
    folder = Path(info.tokenizer_dir or source)
    try:
        from bridle.embedded.model import PlainModel

        score = await asyncio.to_thread(lambda: PlainModel(folder).logprobs)
        return await recompute_logprobs(engine, info.logprob_mode, score, render(SAMPLED_CHAT, []))
    except (BridleError, ImportError) as error:
        return failed(
            "recomputed logprobs",
            str(error),
            "The model's folder must be on this machine, and torch installed: run "
            + install_extra("embedded"),
        )


MAX_TURNS = 4
"""Model calls of a proof, after which an agent that does not end is stopped."""

AGENT_S = 120.0

TAIL_CHARS = 600


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a task's session against the scripted engine."""

    task_id: str
    calls: int
    """Model calls that were answered."""
    status: str
    reward: float | None
    error: str | None
    output: str
    """The end of the agent's stderr, or of its stdout."""

    @property
    def ok(self) -> bool:
        """Return whether the agent started and its model call was answered."""
        return self.calls > 0


def distinct(tasks: Sequence[Task]) -> list[Task]:
    """Return one task per agent and runtime, without its evaluator."""
    found: dict[str, Task] = {}
    for task in tasks:
        kind = task.model_dump_json(include={"agent", "runtime"})
        found.setdefault(kind, task.model_copy(update={"evaluator": EvaluatorSpec()}))
    return list(found.values())


def prove(tasks: Sequence[Task]) -> list[Proof]:
    """Run one session per task against a scripted model whose every reply is "hello".

    Returns for each whether the agent started and called the model. `ConfigError` for a mistake in
    the tasks, before anything runs.
    """
    limited = [_limited(task) for task in tasks]
    with tempfile.TemporaryDirectory(prefix="bridle-proof-") as scratch:
        script, run = Path(scratch, "script.json"), Path(scratch, "run")
        script.write_text(json_text.dumps({"conversations": [{"turns": [{"content": "hello"}]}]}))
        lines = run_batch(BatchRun(limited, f"scripted:{script}", run, title="proofs"))
        return [_proof(line, run) for line in lines]


def _limited(task: Task) -> Task:
    budgets = task.budgets.model_copy(update={"agent_s": min(AGENT_S, task.budgets.agent_s)})
    limits = Limits(max_turns=MAX_TURNS)
    return task.model_copy(update={"num_samples": 1, "limits": limits, "budgets": budgets})


def _proof(line: JSON, run: Path) -> Proof:
    logs = run / "sessions" / line["session_id"]
    texts = (_tail(logs / f"{name}.log") for name in ("stderr", "stdout"))
    return Proof(
        task_id=line["task_id"],
        calls=line["exchanges"] or 0,
        status=line["status"],
        reward=line["reward"],
        error=line["error"],
        output=next((text for text in texts if text), ""),
    )


def _tail(log: Path) -> str:
    return log.read_text("utf-8", "replace").strip()[-TAIL_CHARS:] if log.exists() else ""


SHOWN_TURNS = 10
"""Turns with the largest shares of the divergence that the table shows; `--json` has all."""


def certify(
    target: Annotated[Path, typer.Argument(help="Run folder, capture, or trajectories.parquet.")],
    logprobs: Annotated[
        Path | None, typer.Argument(help="File of a trainer's logprobs; or give --model.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder or checkpoint: the reference trainer computes them."),
    ] = None,
    engine: Annotated[
        Path | None, typer.Option(help="TOML file of facts about the engine, such as its dtype.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="With --model: also write its logprobs to this file.")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(min=0, help="Nats per token up to which a mismatch does not fail."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a trainer's logprobs of a run with the rollout's, and name the causes of a mismatch.

    Ends with code 1 where the two disagree. docs/guides/certify.md has the causes and the file.
    """
    if (logprobs is None) == (model is None):
        raise ConfigError("give either a file of logprobs or --model, and not both")
    if model is not None:
        check_model_folder(str(model))
    if write is not None:
        if model is None:
            raise ConfigError("--write writes the logprobs that --model computes: give --model too")
        check_file(write, "--write")
    traces = _traces(target)
    rollout = _engine_facts(engine)
    if logprobs is not None:
        answers, trainer = read_logprobs(logprobs)
    else:
        assert model is not None
        answers, trainer = _recomputed(model, traces)
    if write is not None:
        write_logprobs(write, answers, trainer)
    found = fidelity.certify(traces, answers, trainer, rollout)
    _keep(target, found, model or logprobs)
    if json:
        print_json(found.json())
    else:
        _show(found)
    failed = not found.faithful and (max_kl is None or found.kl > max_kl)
    raise typer.Exit(1 if failed else 0)


def _traces(target: Path) -> list[Trace]:
    """Return the traces of a run that train. `ConfigError` if there is none."""
    if target.suffix == ".parquet":
        trajectories = read_trajectories(target)
    else:
        trajectories = [trajectory_of(capture) for capture in sessions(target)]
    found = [t for one in trajectories for t in one.traces if t.loss_mask.any()]
    if not found:
        raise ConfigError(
            f"{target}: no trace of its {len(trajectories)} sessions has a token to train on, so "
            "there is nothing to compare"
        )
    return found


def _engine_facts(path: Path | None) -> Facts:
    if path is None:
        return Facts()
    try:
        return Facts.of(tomllib.loads(path.read_text()), str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--engine: cannot read the engine's facts from {path}: {error}"
        ) from error


def _recomputed(model: Path, traces: Sequence[Trace]) -> tuple[list[Recomputed], Facts]:
    """Return the logprobs of the reference trainer at the sessions' own temperature, and its
    facts.
    """
    from bridle.embedded.model import load_tokenizer
    from bridle.training.forward import digest_of_weights, facts_of, recompute
    from bridle.training.grpo import Learner
    from bridle.training.loop import STATE, read_state

    temperatures = {
        1.0 if value is None or trace.logprob_mode == "raw" else float(value)
        for trace in traces
        for value in (trace.metadata.get("sampling") or {}).get("temperature", ())
    } or {1.0}
    if len(temperatures) > 1 or min(temperatures) <= 0:
        among = ", ".join(f"{one:g}" for one in sorted(temperatures))
        raise ConfigError(
            f"the sessions were sampled at temperatures {among}; the comparison needs one "
            "temperature above 0 for all of them"
        )
    temperature = temperatures.pop()
    state = read_state(model) if (model / STATE).is_file() else {}
    trained = {name: state[name] for name in ("dtype", "replay_experts") if name in state}
    settings = GrpoSettings(**trained)
    replay = settings.replay_experts
    learner = Learner.load(model, settings)
    template = getattr(load_tokenizer(model), "chat_template", None)
    digest = hashlib.sha256(str(template).encode()).hexdigest() if template else None
    known = Facts(
        weights=digest_of_weights(learner.model),
        version=state.get("version"),
        template=digest,
        temperature=temperature,
        dtype=settings.dtype,
    )
    notes.print(f"computing {sum(int(t.loss_mask.sum()) for t in traces)} logprobs")
    with learner.computing():
        answers = list(recompute(learner.model, traces, temperature=temperature, replay=replay))
    return answers, facts_of(learner.model, known, traces if replay else ())


def _keep(target: Path, found: Certificate, trainer: Path | None) -> None:
    """Write the certificate into the run folder, for the dashboard."""
    if target.suffix == ".parquet":
        return
    content = orjson.dumps({"made_at": time.time(), "trainer": str(trainer), **found.json()})
    for path in capture_files(target):
        try:
            private_file(path.with_name(CERTIFICATE)).write_bytes(content)
        except OSError as error:
            notes.print(f"the dashboard will not show this: {error}")


def _show(found: Certificate) -> None:
    marks = {True: "", False: "differs", None: ""}
    rows = [
        [name, *(_short(value) for value in (ours, theirs)), marks[same]]
        for name, ours, theirs, same in found.facts()
    ]
    print_table("facts", ("fact", "rollout", "trainer", ""), rows)
    if found.mismatches:
        causes = [
            [
                s.cause.value,
                f"{m.token_share:.1%}",
                f"{m.kl_share:.1%}",
                f"{s.score:.2f}",
                s.evidence,
            ]
            for m in found.mismatches
            for s in m.causes
        ]
        title = f"{len(found.mismatches)} mismatches"
        print_table(title, ("cause", "#tokens", "#KL", "#score", "evidence"), causes)
        worst = sorted(found.turns, key=lambda turn: -turn.kl_share)[:SHOWN_TURNS]
        turns = [
            [t.exchange_id, t.tokens, f"{t.token_share:.1%}", f"{t.kl:.3g}", f"{t.kl_share:.1%}",
             f"{t.largest:.3g}", ", ".join(t.causes)]
            for t in worst
        ]  # fmt: skip
        title = f"{len(worst)} of {len(found.turns)} turns"
        columns = ("turn", "#tokens", "#of all", "#KL", "#of KL", "#largest", "cause")
        print_table(title, columns, turns)
    if found.missing:
        console.print(f"{found.missing} tokens that train have no logprob of the trainer")
    console.print(found.summary(), soft_wrap=True)


def _short(value: object) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:16]}..."

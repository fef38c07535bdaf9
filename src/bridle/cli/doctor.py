"""`bridle doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.util
import json as json_text
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.output import console, print_json, table
from bridle.errors import BridleError, EngineError, install_extra
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.engines.base import Engine, EngineInfo
    from bridle.engines.compare import Render, Score
    from bridle.engines.probe import Finding
    from bridle.prompting.renderer import PromptRenderer
    from bridle.types import Ids


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that was looked at."""

    what: str
    ok: bool
    """False = something that Bridle offers will not work."""
    found: str
    advice: str = ""
    """What to do; empty when all is well."""


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
            help="Sample, and compute the logprobs again from the model's folder on this machine.",
        ),
    ] = False,
    runtime: Annotated[
        str | None, typer.Option(help="Run the runtime conformance suite on this backend.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="The image that the suite runs in, where one is needed.")
    ] = None,
    runs: Annotated[
        Path, typer.Option(help="Folder of runs: name what their requests held that is unknown.")
    ] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at this machine, tasks, an engine or a runtime, and say what is missing."""
    import asyncio

    if tasks is not None:
        findings = _proofs(tasks)
    elif engine:
        findings = asyncio.run(_probe_all(engine, tokenizer, logprobs=logprobs))
    elif runtime is not None:
        findings = asyncio.run(_conformance(runtime, image))
    else:
        findings = [*machine(), *requests(runs)]
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        rows = ((("ok" if f.ok else "MISSING"), f.what, f.found, f.advice) for f in findings)
        console.print(table("doctor", ("", "what", "found", "what to do"), rows))
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


def _proofs(path: Path) -> list[CheckResult]:
    """Check that the agents of tasks start in their runtimes and reach their model."""
    from bridle.cli.proving import distinct, prove
    from bridle.datasets.jsonl import load_tasks

    findings = []
    for proof in prove(distinct(load_tasks(path))):
        found = f"{proof.calls} scripted model calls answered, {proof.status}"
        advice = "" if proof.ok else f"{proof.error}\n{proof.said}".strip()
        findings.append(CheckResult(f"agent of {proof.task_id}", proof.ok, found, advice))
    return findings


def machine() -> list[CheckResult]:
    """Everything about this machine that a run may need."""
    return [
        _python(),
        _program("git", "the demo tasks and most agents use it: install git"),
        _program("npm", "harnesses from npm (pi) need it: install node with npm"),
        _program("bash", "runtimes run commands with it: install bash"),
        _torch(),
        _cache(),
        _bundles(),
        _runtime(),
    ]


def requests(runs: Path) -> list[CheckResult]:
    """Name what the gateway did not know in the requests of these runs, if anything."""
    from bridle.cli.show import counts_of
    from bridle.node.run_folder import SUMMARY

    lines: list[JSON] = []
    for path in (runs / SUMMARY, *runs.glob(f"*/{SUMMARY}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            lines += json_text.loads(path.read_text())["sessions"]
    if not (unknown := counts_of(lines, "unknown")):
        return []
    found = ", ".join(f"{count} {name}" for name, count in unknown.most_common())
    advice = "served, not acted on: see whether the model missed context (`bridle show SESSION`)"
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
    from importlib.metadata import version

    return CheckResult("torch", ok=True, found=version("torch"))


def _cache() -> CheckResult:
    from bridle.config import cache_dir

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
    from bridle.runtimes import default_backend

    backend, reason = default_backend()
    advice = "" if backend != "local" else "what a model does is not contained: get bwrap to work"
    return CheckResult(
        "runtime", ok=backend != "local", found=f"{backend}: {reason}", advice=advice
    )


def _bundles() -> CheckResult:
    from bridle.harnesses.installers import OLDEST, c_library, carries

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
        advice = "a gateway starts with those that answer, and takes the others when they come"
        return CheckResult(
            "replicas", ok=bool(infos), found=f"{len(infos)} of {wanted} answer", advice=advice
        )
    ways = {
        f"{info.model}, {info.logprob_mode} logprobs, token in {info.token_in}"
        for info in infos.values()
    }
    lengths = {info.context_length for info in infos.values()}
    found = "; ".join(sorted(ways)) + f"; context {min(lengths)}"
    advice = "" if len(ways) == 1 else "they must serve one model in one way: compare their flags"
    return CheckResult("replicas", ok=len(ways) == 1, found=found, advice=advice)


async def _probe(
    spec: str, tokenizer: str | None, *, logprobs: bool
) -> tuple[list[CheckResult], EngineInfo | None]:
    """Probe an engine; one that fails at its start is reported all the same."""
    from bridle.engines import open_engine
    from bridle.engines.probe import ProbeReport, probe

    engine = open_engine(spec, tokenizer=tokenizer)
    info: EngineInfo | None = None
    compared = []
    try:
        info = await engine.start()
        report = getattr(engine, "report", None) or await probe(engine)
        compared = [one async for one in compare(engine, info, tokenizer, logprobs=logprobs)]
        context = CheckResult("context length", ok=True, found=f"{info.context_length} tokens")
    except EngineError as error:
        report = getattr(engine, "report", None)
        context = CheckResult("engine", ok=False, found=str(error))
    finally:
        await engine.aclose()
    if not isinstance(report, ProbeReport):
        return [context], info
    told = (
        CheckResult(f.what, f.ok or not f.needed, f.found, f.fix or f.means)
        for f in (*report.findings, *compared)
    )
    return [*told, context], info


async def _conformance(backend: str, image: str | None) -> list[CheckResult]:
    import tempfile

    from bridle.config import RuntimeSpec
    from bridle.runtimes import runtime_class
    from bridle.runtimes.conformance import CHECKS, Nonconformity, run_check

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


SAID = [{"role": "user", "content": "Say anything."}]
"""The conversation under which logprobs are sampled."""


async def compare(
    engine: Engine, info: EngineInfo, tokenizer: str | None, *, logprobs: bool
) -> AsyncIterator[Finding]:
    """Findings on a started engine, by `tokenizer` or its own.

    With `logprobs` also a plain forward pass of the model's folder, which must be on this machine.
    """
    import numpy as np

    from bridle.engines.compare import compare_rendering, compare_template, compare_vocabulary
    from bridle.engines.probe import Finding
    from bridle.engines.vllm import VllmEngine
    from bridle.prompting.renderer import load_renderer

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
        yield await _recomputed(engine, info, render, source)


def failed(what: str, found: str, fix: str) -> Finding:
    """A finding that something could not be looked at."""
    from bridle.engines.probe import Finding

    return Finding(what, ok=False, needed=True, found=found, fix=fix)


def _render(renderer: PromptRenderer) -> Render:
    """Our rendering of OpenAI Chat messages, by the dialect that reads them."""
    import msgspec

    from bridle.dialects import DIALECTS
    from bridle.dialects.base import Route, RouteKind
    from bridle.types import Dialect

    def render(messages: list[JSON], tools: list[JSON]) -> Ids:
        body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
        route = Route(Dialect.OPENAI_CHAT, RouteKind.GENERATE)
        asked = DIALECTS[Dialect.OPENAI_CHAT].parse(route, msgspec.json.encode(body), {})
        return renderer.render(asked.messages, asked.tools, thinking=None)

    return render


async def _recomputed(engine: Engine, info: EngineInfo, render: Render, source: str) -> Finding:
    import asyncio

    from bridle.engines.compare import recompute_logprobs

    folder = Path(info.tokenizer_dir or source)
    try:
        score = await asyncio.to_thread(_score, folder)
        return await recompute_logprobs(engine, info.logprob_mode, score, render(SAID, []))
    except (BridleError, ImportError) as error:
        return failed(
            "recomputed logprobs",
            str(error),
            "The model's folder must be on this machine, and torch installed: run "
            + install_extra("embedded"),
        )


def _score(folder: Path) -> Score:
    from bridle.embedded.model import PlainModel

    return PlainModel(folder).logprobs

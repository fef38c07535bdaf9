"""`bridle doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.util
import json as json_text
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridle.cli.output import console, print_json, table
from bridle.errors import BridleError, EngineError, install_extra
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.engines.base import EngineInfo


@dataclass(frozen=True, slots=True)
class Finding:
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


def _proofs(path: Path) -> list[Finding]:
    """Check that the agents of tasks start in their runtimes and reach their model."""
    from bridle.cli.proving import distinct, prove
    from bridle.datasets.jsonl import load_tasks

    findings = []
    for proof in prove(distinct(load_tasks(path))):
        found = f"{proof.calls} scripted model calls answered, {proof.status}"
        advice = "" if proof.ok else f"{proof.error}\n{proof.said}".strip()
        findings.append(Finding(f"agent of {proof.task_id}", proof.ok, found, advice))
    return findings


def machine() -> list[Finding]:
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


def requests(runs: Path) -> list[Finding]:
    """Name what the gateway did not know in the requests of these runs, if anything."""
    from bridle.cli.show import counts_of
    from bridle.lifecycle.run_folder import SUMMARY

    lines: list[JSON] = []
    for path in (runs / SUMMARY, *runs.glob(f"*/{SUMMARY}")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            lines += json_text.loads(path.read_text())["sessions"]
    if not (unknown := counts_of(lines, "unknown")):
        return []
    found = ", ".join(f"{count} {name}" for name, count in unknown.most_common())
    advice = "served, not acted on: see whether the model missed context (`bridle show SESSION`)"
    return [Finding("unknown in requests", ok=True, found=found, advice=advice)]


def _python() -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Finding("python", sys.version_info >= (3, 11), version, "Python 3.11 or newer is needed")


def _program(name: str, advice: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, ok=False, found="not on PATH", advice=advice)
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, check=False, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, ok=False, found=f"does not start: {error}", advice=advice)
    first = (answer.stdout or answer.stderr).strip().splitlines()[:1]
    return Finding(name, ok=answer.returncode == 0, found=first[0] if first else path)


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        advice = f"the embedded engine and training need it: run {install_extra('embedded')}"
        return Finding("torch", ok=False, found="not installed", advice=advice)
    from importlib.metadata import version

    return Finding("torch", ok=True, found=version("torch"))


def _cache() -> Finding:
    from bridle.config import cache_dir

    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_gib = shutil.disk_usage(existing).free / 2**30
    found = f"{folder}, {free_gib:.0f} GiB free"
    if not os.access(existing, os.W_OK):
        return Finding("cache", ok=False, found=found, advice="not writable: set BRIDLE_CACHE")
    return Finding(
        "cache", ok=free_gib >= 4, found=found, advice="" if free_gib >= 4 else "4 GiB are needed"
    )


def _runtime() -> Finding:
    from bridle.runtimes import default_backend

    backend, reason = default_backend()
    advice = "" if backend != "local" else "what a model does is not contained: get bwrap to work"
    return Finding("runtime", ok=backend != "local", found=f"{backend}: {reason}", advice=advice)


def _bundles() -> Finding:
    from bridle.harnesses.interpreters import OLDEST, c_library, carries

    library = c_library()
    needed = f"bundles made here work in 'local' only: glibc {OLDEST[0]}.{OLDEST[1]} is needed"
    ok = carries(library)
    found = f"{library or 'unknown C library'}, bundles start in {'any image' if ok else 'local'}"
    return Finding("bundles", ok=ok, found=found, advice="" if ok else needed)


async def _probe_all(specs: list[str], tokenizer: str | None, *, logprobs: bool) -> list[Finding]:
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


def _alike(infos: dict[str, EngineInfo], wanted: int) -> Finding:
    """Check that replicas serve one model in one way."""
    if len(infos) < wanted:
        advice = "a gateway starts with those that answer, and takes the others when they come"
        return Finding(
            "replicas", ok=bool(infos), found=f"{len(infos)} of {wanted} answer", advice=advice
        )
    ways = {
        f"{info.model}, {info.logprob_mode} logprobs, token in {info.token_in}"
        for info in infos.values()
    }
    lengths = {info.context_length for info in infos.values()}
    found = "; ".join(sorted(ways)) + f"; context {min(lengths)}"
    advice = "" if len(ways) == 1 else "they must serve one model in one way: compare their flags"
    return Finding("replicas", ok=len(ways) == 1, found=found, advice=advice)


async def _probe(
    spec: str, tokenizer: str | None, *, logprobs: bool
) -> tuple[list[Finding], EngineInfo | None]:
    """Probe an engine; one that fails at its start is reported all the same."""
    from bridle.cli.doctor_engine import compare
    from bridle.engines import open_engine
    from bridle.engines.probe import ProbeReport, probe

    engine = open_engine(spec, tokenizer=tokenizer)
    info: EngineInfo | None = None
    compared = []
    try:
        info = await engine.start()
        report = getattr(engine, "report", None) or await probe(engine)
        compared = [one async for one in compare(engine, info, tokenizer, logprobs=logprobs)]
        context = Finding("context length", ok=True, found=f"{info.context_length} tokens")
    except EngineError as error:
        report = getattr(engine, "report", None)
        context = Finding("engine", ok=False, found=str(error))
    finally:
        await engine.aclose()
    if not isinstance(report, ProbeReport):
        return [context], info
    told = (
        Finding(f.what, f.ok or not f.needed, f.found, f.fix or f.means)
        for f in (*report.findings, *compared)
    )
    return [*told, context], info


async def _conformance(backend: str, image: str | None) -> list[Finding]:
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
                findings.append(Finding(what, ok=False, found=str(error)))
            else:
                findings.append(Finding(what, ok=True, found="holds"))
    return findings

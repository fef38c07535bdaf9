"""`bridle certify`: whether a trainer computes the logprobs that the rollout had, and why not."""

from __future__ import annotations

import hashlib
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import orjson
import typer

from bridle.bridges.parquet import read_logprobs, read_trajectories, write_logprobs
from bridle.cli.output import check_file, console, notes, print_json, print_table
from bridle.errors import ConfigError
from bridle.folders import private_file
from bridle.node.results import trajectory_of
from bridle.node.run_folder import CERTIFICATE, capture_files, sessions
from bridle.training.settings import GrpoSettings
from bridle.trajectory import fidelity
from bridle.trajectory.fidelity import Certificate, Facts, Recomputed
from bridle.trajectory.sample import Trace

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
        raise ConfigError("give one of a file of logprobs and --model")
    if write is not None:
        if model is None:
            raise ConfigError("--write needs --model")
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
        raise ConfigError(f"{target}: no trace of its {len(trajectories)} sessions trains")
    return found


def _engine_facts(path: Path | None) -> Facts:
    if path is None:
        return Facts()
    try:
        return Facts.of(tomllib.loads(path.read_text()), str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--engine {path}: {error}") from error


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
        raise ConfigError(f"the sessions were sampled at temperatures {among}, and one is needed")
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

"""Probe of whether an engine can give what training needs (law 8: no blind run).

A few short calls check ids and logprobs of equal length, a prompt taken as given, the distribution
of the logprobs, streams and seeds. The mode follows from the best token's logprob, sampled with
top_k 1 at temperature 1, and freely at a temperature near zero: the same and below zero is the raw
model; zero for the second is after temperature; zero for both is after top-k as well. (Temperatures
with top_k 1 show nothing: SGLang gives raw logprobs of greedy samples at any temperature.) Every
finding says what it means and how to fix it.

A comparison of the engine's tokenizer, template and logprobs with Bridle's goes with it. Bridle's
renderer defines each prompt, so a different template of the engine breaks nothing, but users who
send it messages should know the differences. A different tokenizer breaks everything: a gateway
checks it at its start, `bridle doctor` checks all of it. Bridle's side is given as functions,
because engines import no renderer and no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final
from uuid import uuid4

import numpy as np

from bridle.engines.base import Engine, GenerateRequest, HasTokenizer, Templating
from bridle.engines.ids import ArrayIds, compact, parse_ids
from bridle.errors import BridleError, EngineError
from bridle.types import JSON, Ids, LogprobMode, Logprobs, Sampling, first_difference

Render = Callable[[list[JSON], list[JSON]], "Ids"]
"""OpenAI Chat messages and tools -> Bridle's ids of the whole prompt."""
Score = Callable[["Ids", "Ids", float], "Logprobs"]
"""Prompt, sampled ids, temperature -> logprobs by a plain forward pass."""

TEMPLATE: Final = "engine's template"

TEXTS = (
    "Plain words, and 1234567890.",
    "def f(x):\n\treturn {'a': [x, None]}  # \u00e4\u00f6\u00fc \u6f22\u5b57 \U0001f642\n",
    "  two spaces,\r\n\r\nlines, and <|im_start|> in the text",
)
CLOSE = 1e-3
"""Nats by which a logprob of float32 weights may differ from a plain forward pass."""
_SAMPLED = 32


@dataclass(frozen=True, slots=True)
class Case:
    """Conversation that templates render differently."""

    name: str
    messages: list[JSON]
    tools: tuple[JSON, ...] = ()
    refusable: bool = False
    """True if templates of some families refuse it."""


def _call(number: int) -> JSON:
    function = {"name": "read_file", "arguments": f'{{"path": "{number}.txt"}}'}
    return {"id": f"call_{number}", "type": "function", "function": function}


_TOOL: JSON = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
_ASKED: list[JSON] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
_ANSWERED = [*_ASKED, {"role": "assistant", "content": "Hello."}]
_MORE: list[JSON] = [{"role": "user", "content": "And now?"}]
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_call(1), _call(2)]}
_RESULTS = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"text {n}"} for n in (1, 2)]
CASES = (
    Case("one message", _ASKED[1:]),
    Case("a system message", _ASKED),
    Case("several turns", [*_ANSWERED, *_MORE]),
    Case("tools", _ASKED, (_TOOL,)),
    Case("parallel calls", [*_ASKED, _CALLS, *_RESULTS], (_TOOL,)),
    Case("system in the middle", [*_ANSWERED, {"role": "system", "content": "Stop."}, *_MORE],
         refusable=True),
    Case(
        "reasoning",
        [*_ASKED, {"role": "assistant", "content": "Hello.", "reasoning_content": "Greet.",
                   "reasoning": "Greet."}, *_MORE],
    ),
)  # fmt: skip


async def compare_rendering(engine: Engine, render: Render) -> Finding:
    """Compare the prompts that the engine's own chat template makes with those of Bridle's
    renderer.
    """
    differ: list[str] = []
    asked = 0
    for case in CASES:
        if not isinstance(engine, Templating):
            break
        try:
            theirs = await engine.template(case.messages, case.tools or None, {})
        except EngineError:
            continue
        asked += 1
        try:
            ours = render(case.messages, list(case.tools))
        except BridleError as error:
            differ.append(f"{case.name} (ours fails: {error})")
            continue
        if not np.array_equal(ours, theirs):
            differ.append(f"{case.name} (from token {first_difference(ours, theirs)})")
    if not asked:
        return Finding.note("rendering", "the engine renders nothing for us to compare")
    found = f"{asked - len(differ)} of {asked} alike"
    return Finding.check(
        "rendering",
        ok=not differ,
        found=found + (f"; others: {', '.join(differ)}" if differ else ""),
        means="The engine's template says something else there.",
        fix="Nothing: Bridle renders, and the engine samples under its ids; `--prompt engine` lets "
        "the engine render where a conversation begins.",
    )


async def compare_template(engine: Engine) -> Finding:
    """Check that the engine's chat route reports the prompt that it made of messages and tools.

    The setting `prompt = "engine"` needs that. Samples one token for each of `CASES`.
    """
    if not isinstance(engine, Templating):
        return _no_template("it is not asked for prompts")
    unlike: list[str] = []
    reported_by_chat = 0
    for case in CASES:
        try:
            ids = await engine.template(case.messages, case.tools or None, {})
            used = await _chat_prompt(engine, case, ids)
        except EngineError as error:
            if error.status == 400 and case.refusable:
                continue
            return _no_template(f"it reports no prompt for messages: {error}")
        reported_by_chat += used is not None
        if used is not None and not np.array_equal(ids, used):
            unlike.append(f"{case.name} (from token {first_difference(ids, used)})")
    if unlike:
        return _no_template(
            f"its chat route makes other prompts than it reports: {', '.join(unlike)}"
        )
    seen = "the same as its chat route's" if reported_by_chat else "its chat route reports none"
    return Finding.note(TEMPLATE, f"it reports prompts, {seen}")


def _no_template(found: str) -> Finding:
    return Finding(
        TEMPLATE,
        ok=False,
        needed=False,
        found=found,
        means='Its template cannot render prompts (`prompt = "engine"`).',
        fix='Keep `prompt = "renderer"`, or use vLLM with --enable-scale-out or SGLang 0.5.',
    )


async def _chat_prompt(engine: Engine, case: Case, ids: Ids) -> Ids | None:
    """Return the prompt that the engine used for messages; `None` = not reported."""
    request = GenerateRequest(
        request_id=f"probe-{uuid4().hex}",
        prompt=ArrayIds(ids),
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1),
        messages=case.messages,
        tools=case.tools or None,
        by_messages=True,
        calls=False,
    )
    prompts = [chunk.prompt_ids_json async for chunk in engine.generate(request)]
    texts = [text for text in prompts if text is not None]
    return parse_ids(compact(texts[0])) if texts else None


async def compare_vocabulary(
    engine: Engine | HasTokenizer, encode: Callable[[str], Ids], vocab_size: int
) -> Finding:
    """Check that Bridle's and the engine's tokenizers agree: equal ids for a few texts, all in
    range.
    """
    what = "tokenizer"
    limit = getattr(engine, "vocab_size", None)
    if isinstance(limit, int) and vocab_size > limit:
        return _mismatch(what, f"ours has {vocab_size} ids, the engine takes {limit}")
    if not isinstance(engine, HasTokenizer):
        return Finding.note(what, "the engine tokenises nothing for us to compare")
    asked = 0
    for text in TEXTS:
        theirs = await engine.tokenize(text)
        if theirs is None:
            continue
        asked += 1
        ours = encode(text)
        if not np.array_equal(ours, theirs):
            at = first_difference(ours, theirs)
            return _mismatch(what, f"other ids for {text[:24]!r} from token {at}")
    if not asked:
        return Finding.note(what, "the engine tokenises nothing for us to compare")
    return Finding(what, ok=True, needed=True, found="the engine's")


def _mismatch(what: str, found: str) -> Finding:
    return Finding(
        what,
        ok=False,
        needed=True,
        found=found,
        means="The model would read other words than were written.",
        fix="Give the model's own tokenizer: --tokenizer DIR.",
    )


async def recompute_logprobs(
    engine: Engine, mode: LogprobMode, score: Score, prompt: Ids, *, close: float = CLOSE
) -> Finding:
    """Compare the engine's sampled logprobs with those of a plain forward pass (`score`).

    Samples at temperatures 1 and 0.7, where the two logprob modes differ.
    """
    worst = 0.0
    for temperature in (1.0, 0.7):
        sampling = Sampling(temperature=temperature, top_p=1.0, top_k=-1, max_tokens=_SAMPLED)
        request = GenerateRequest(f"doctor-{temperature}", ArrayIds(prompt), sampling)
        try:
            chunks = [chunk async for chunk in engine.generate(request)]
        except EngineError as error:
            return _differs(f"it could not be sampled from: {error}")
        ids = np.concatenate([chunk.output_ids for chunk in chunks])
        reported = np.concatenate([chunk.logprobs for chunk in chunks])
        if not len(ids) or len(reported) != len(ids):
            return _differs(f"{len(reported)} logprobs for {len(ids)} ids")
        used = temperature if mode is LogprobMode.PROCESSED else 1.0
        worst = max(worst, float(np.abs(score(prompt, ids, used) - reported).max()))
    found = f"at most {worst:.2g} nats from a plain forward pass"
    if worst >= close:
        return _differs(found)
    return Finding("recomputed logprobs", ok=True, needed=True, found=found)


def _differs(found: str) -> Finding:
    return Finding(
        "recomputed logprobs",
        ok=False,
        needed=True,
        found=found,
        means="The trainer would see another policy than the one that sampled.",
        fix="Are these the weights that the engine serves, and of its dtype? vLLM: --dtype float32 "
        "to compare exactly; reload_weights is wrong with tied embeddings.",
    )


PROMPT = range(33, 65)
"""Ids that every vocabulary has; as a prompt they differ from any messages sent with them."""

_TOKENS = 4
_COLD = 0.01
"""The lowest temperature that vLLM does not change; SGLang's sampling is not greedy there."""
_SAME = 1e-3
"""Nats; two calls of one prompt differ by less on every engine seen, another mode by more."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    what: str
    ok: bool
    needed: bool
    """True if training needs it."""
    found: str
    means: str = ""
    """Consequence of a failed check."""
    fix: str = ""
    """Remedy of a failed check."""

    @classmethod
    def note(cls, what: str, found: str) -> Finding:
        """Return a finding that is only information."""
        return cls(what, ok=True, needed=False, found=found)

    @classmethod
    def check(
        cls, what: str, *, ok: bool, found: str, means: str, fix: str, needed: bool = False
    ) -> Finding:
        """Return the finding of a check; `means` and `fix` are kept only if it is not `ok`."""
        return cls(what, ok, needed, found, "" if ok else means, "" if ok else fix)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Findings of a probe."""

    findings: tuple[Finding, ...]
    logprob_mode: LogprobMode
    token_in: bool
    duration_s: float
    tells_prompt: bool = False
    """True if whole replies reported the prompt's ids."""
    tells_prompt_streamed: bool = False

    @property
    def missing(self) -> tuple[Finding, ...]:
        """Return the findings of features that training needs and that the engine lacks."""
        return tuple(one for one in self.findings if one.needed and not one.ok)

    @property
    def usable(self) -> bool:
        """Return whether training can use the engine."""
        return not self.missing

    def rows(self) -> list[JSON]:
        """Return the findings as plain objects, for tables and `--json`."""
        return [asdict(one) for one in self.findings]

    def require(self, where: str, *, allow_untokenized: bool = False) -> None:
        """Raise `EngineError` saying what is missing and how to get it.

        With `allow_untokenized`, an engine that gives text only is enough.
        """
        if self.usable or allow_untokenized:
            return
        lines = [
            f"- {one.what}: {one.found}. {one.means} {one.fix}".rstrip() for one in self.missing
        ]
        raise EngineError(
            f"{where} cannot give what training needs:\n" + "\n".join(lines) + "\n"
            "To capture text only, say so with --allow-untokenized."
        )


@dataclass(frozen=True, slots=True)
class _Reply:
    ids: Ids
    logprobs: Logprobs
    prompt_text: bytes | None
    pieces: int


async def probe(
    engine: Engine, *, prompt: Sequence[int] = PROMPT, assume: LogprobMode | None = None
) -> ProbeReport:
    """Probe the capabilities of an engine that is started. Never raises for missing features.

    `assume` is the logprob mode that its owner vouches for, if it cannot be measured.
    """
    began = time.monotonic()
    findings: list[Finding] = []
    mode = LogprobMode.NONE
    token_in = whole = streamed = False
    try:
        best = await _ask(engine, prompt, Sampling(temperature=1.0, top_k=1))
    except EngineError as error:
        findings.append(_no_answer(error))
    else:
        findings += [_ids(best), _logprobs(best), _token_in(best, prompt)]
        token_in = findings[-1].ok
        if findings[1].ok:
            mode, finding = await _mode(engine, prompt, best, assume)
            findings.append(finding)
            finding, streamed = await _streams(engine, prompt)
            findings.append(finding)
            finding, whole = await _seeds(engine, prompt)
            findings.append(finding)
    took_s = time.monotonic() - began
    return ProbeReport(tuple(findings), mode, token_in, took_s, whole, streamed)


async def _ask(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False
) -> _Reply:
    request = GenerateRequest(
        request_id=f"probe-{uuid4().hex}",
        prompt=ArrayIds(np.array(prompt, dtype=np.int32)),
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=sampling.top_k,
            max_tokens=_TOKENS,
            seed=sampling.seed,
        ),
        stream=stream,
    )
    chunks = [chunk async for chunk in engine.generate(request)]
    prompts = [chunk.prompt_ids_json for chunk in chunks if chunk.prompt_ids_json is not None]
    return _Reply(
        np.concatenate([chunk.output_ids for chunk in chunks]),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        prompts[0] if prompts else None,
        len(chunks),
    )


def _no_answer(error: EngineError) -> Finding:
    return Finding(
        "answer",
        ok=False,
        needed=True,
        found=str(error),
        means="It cannot sample in this way.",
        fix="Look at the engine's own log.",
    )


def _ids(reply: _Reply) -> Finding:
    return Finding.check(
        "sampled ids",
        ok=len(reply.ids) > 0,
        needed=True,
        found=f"{len(reply.ids)} ids" if len(reply.ids) else "none",
        means="What was sampled would have to be guessed from text.",
        fix="Use an engine that returns token ids: vLLM with `return_token_ids` (0.10.2 or later), "
        "and no proxy in between that drops fields it does not know.",
    )


def _logprobs(reply: _Reply) -> Finding:
    count = len(reply.logprobs)
    ok = 0 < count == len(reply.ids)
    return Finding.check(
        "logprobs",
        ok=ok,
        needed=True,
        found="one for each id" if ok else f"{count} for {len(reply.ids)} ids",
        means="The policy's update needs the probability that each token was sampled with.",
        fix="Start vLLM with --max-logprobs above 0, and no proxy in between that drops logprobs.",
    )


def _token_in(reply: _Reply, prompt: Sequence[int]) -> Finding:
    sent = ArrayIds(np.array(prompt, dtype=np.int32)).json()
    ok, found = False, "it does not report its prompt"
    if reply.prompt_text is not None:
        ok = compact(reply.prompt_text) == sent
        found = "the prompt is taken as given" if ok else "it used another prompt"
    return Finding.check(
        "token in",
        ok=ok,
        needed=True,
        found=found,
        means="Each turn would be sampled under a re-rendering of what came before.",
        fix="Use vLLM 0.32 or later (chat with `kv_transfer_params.prompt_token_ids`), or start it "
        "with --enable-scale-out for /inference/v1/generate.",
    )


async def _mode(
    engine: Engine, prompt: Sequence[int], best: _Reply, assume: LogprobMode | None
) -> tuple[LogprobMode, Finding]:
    try:
        cold = await _ask(engine, prompt, Sampling(temperature=_COLD, top_k=-1))
        mode = _compared(best, cold)
        if mode is None:
            # Zero at both: cut to one token, or so sure that nothing else had a chance.
            mode = _compared_free(
                best, await _ask(engine, prompt, Sampling(temperature=1.0, seed=1))
            )
    except EngineError:
        mode = None
    if mode is not None and assume not in {None, mode}:
        found = f"{mode} by measurement, {assume} by configuration"
        return mode, Finding(
            "logprob mode",
            ok=False,
            needed=True,
            found=found,
            means="One of the two is wrong, and with it every off-policy ratio.",
            fix="Drop the setting, or correct it.",
        )
    known = mode or assume
    source = "measured" if mode else "as configured, not measured"
    return known or LogprobMode.NONE, Finding.check(
        "logprob mode",
        ok=known is not None,
        needed=True,
        found=f"{known} ({source})" if known else "could not be measured",
        means="Whether a logprob is before or after temperature decides every off-policy ratio.",
        fix="Say which it is in the engine's `logprob_mode` setting (vLLM: --logprobs-mode, "
        "raw_logprobs unless set).",
    )


def _compared(best: _Reply, cold: _Reply) -> LogprobMode | None:
    """Compare the best tokens with those sampled at almost no temperature.

    `None` = they are other tokens, or all of them are certain.
    """
    length = min(len(best.ids), len(cold.ids))
    same = best.ids[:length] == cold.ids[:length]
    count = int(np.argmin(same)) if not same.all() else length
    first, second = best.logprobs[:count], cold.logprobs[:count]
    if not count or ((first > -_SAME).all() and (second > -_SAME).all()):
        return None
    return LogprobMode.PROCESSED if (np.abs(first - second) > _SAME).any() else LogprobMode.RAW


def _compared_free(best: _Reply, free: _Reply) -> LogprobMode | None:
    """Return PROCESSED if free sampling draws, on the greedy path, a token that was not certain.

    The first position of both replies has one context: if the greedy logprob of 0 were the model's
    own, its free logprob would be 0 as well, and no other token could be drawn.
    """
    for greedy, drawn, logprob in zip(best.ids, free.ids, free.logprobs, strict=False):
        if logprob < -_SAME:
            return LogprobMode.PROCESSED
        if greedy != drawn:
            return None
    return None


async def _streams(engine: Engine, prompt: Sequence[int]) -> tuple[Finding, bool]:
    """Check that streams have ids and logprobs in each chunk, and whether they report prompts."""
    reports = False
    try:
        reply = await _ask(engine, prompt, Sampling(temperature=1.0, top_k=-1), stream=True)
    except EngineError as error:
        found, ok = f"a streamed call fails: {error}", False
    else:
        ok = 0 < len(reply.ids) == len(reply.logprobs)
        pieces = "in pieces" if reply.pieces > 1 else "in one piece"
        found = f"{pieces}, with ids and logprobs" if ok else "without ids or logprobs"
        reports = reply.prompt_text is not None
    finding = Finding.check(
        "streaming",
        ok=ok,
        found=found,
        means="A harness sees nothing of a reply before its end.",
        fix="Look for a proxy in between that changes server-sent events.",
    )
    return finding, reports


async def _seeds(engine: Engine, prompt: Sequence[int]) -> tuple[Finding, bool]:
    """Check that a seed makes sampling deterministic, and whether the replies report prompts."""
    reports = False
    seeded = Sampling(temperature=1.0, top_k=-1, seed=7)
    try:
        one, other = await _ask(engine, prompt, seeded), await _ask(engine, prompt, seeded)
    except EngineError as error:
        found, ok = f"a call with a seed fails: {error}", False
    else:
        ok = np.array_equal(one.ids, other.ids)
        found = "the same seed draws the same" if ok else "seeds are not obeyed"
        reports = one.prompt_text is not None and other.prompt_text is not None
    finding = Finding.check(
        "seeds",
        ok=ok,
        found=found,
        means="A run cannot be drawn again.",
        fix="SGLang: start with --enable-deterministic-inference.",
    )
    return finding, reports

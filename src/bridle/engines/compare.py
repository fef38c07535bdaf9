"""Comparison of an engine's tokenizer, template and logprobs with Bridle's.

Bridle's renderer defines each prompt, so a different template of the engine breaks nothing, but
users who send it messages should know the differences. A different tokenizer breaks everything: a
gateway checks it at its start, `bridle doctor` checks all of it. Bridle's side is given as
functions, because engines import no renderer and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import numpy as np

from bridle.engines.base import Engine, GenerateRequest, Templating, Tokenizing
from bridle.engines.ids import ArrayIds, compact, parse_ids
from bridle.engines.probe import Finding
from bridle.errors import BridleError, EngineError
from bridle.types import JSON, LogprobMode, Sampling

if TYPE_CHECKING:
    from bridle.types import Ids, Logprobs

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
    """Compare the prompts of the engine's own template with those of Bridle's renderer."""
    differ: list[str] = []
    asked = 0
    for case in CASES:
        theirs = await _rendered(engine, case)
        if theirs is None:
            continue
        asked += 1
        try:
            ours = render(case.messages, list(case.tools))
        except BridleError as error:
            differ.append(f"{case.name} (ours fails: {error})")
            continue
        if not np.array_equal(ours, theirs):
            differ.append(f"{case.name} (from token {_first_difference(ours, theirs)})")
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
    """Check that the engine reports the prompts of its chat route, which `prompt = "engine"` needs.

    A chat call with messages and tools, of one token, reports the prompt that the route made.
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
            unlike.append(f"{case.name} (from token {_first_difference(ids, used)})")
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


async def _rendered(engine: Engine, case: Case) -> Ids | None:
    if not isinstance(engine, Tokenizing):
        return None
    return await engine.render(case.messages, case.tools or None, {})


def _first_difference(ours: Ids, theirs: Ids) -> int:
    size = min(len(ours), len(theirs))
    same = ours[:size] == theirs[:size]
    return size if same.all() else int(np.argmin(same))


async def compare_vocabulary(
    engine: Engine, encode: Callable[[str], Ids], vocab_size: int
) -> Finding:
    """Check that the tokenizers are the same: equal ids for a few texts, none out of range."""
    what = "tokenizer"
    limit = getattr(engine, "vocab_size", None)
    if isinstance(limit, int) and vocab_size > limit:
        return _mismatch(what, f"ours has {vocab_size} ids, the engine takes {limit}")
    if not isinstance(engine, Tokenizing):
        return Finding.note(what, "the engine tokenises nothing for us to compare")
    asked = 0
    for text in TEXTS:
        theirs = await engine.tokenize(text)
        if theirs is None:
            continue
        asked += 1
        ours = encode(text)
        if not np.array_equal(ours, theirs):
            at = _first_difference(ours, theirs)
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
    """Compare sampled logprobs with a plain forward pass of the weights that `score` has.

    Samples at temperatures 1 and 0.7, where the two modes differ.
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

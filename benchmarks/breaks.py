"""Breaks with and without token-in, per harness, on the same scripted runs.

A *break* is a model call that continues a conversation, but whose prompt does not begin with all
ids that were given and sampled in it: a trainer has to start another training sequence there. The
sessions are real harnesses on ten turns of real work (`tests/real_clients/work.py`), with two
sub-agents where the harness has any. The model's words are scripted: `hard` has white space around
text and JSON spaced and escaped as no library writes it; `plain` is the same, trimmed and written
as the chat template would. Its ids are the tokenizer's own but for a share of tokens (`--split`)
that come as two tokens of the same text, as a model that samples at temperature 1 gives them now
and then. Both sides see the same words and ids:

- `token-in`: what Bridle does; a prompt is its parent's ids, the sampled ids, and what is new;
- `messages`: each call sends its messages, and the engine's chat template renders the history anew.

One rollout is one session. Breaks are reported per 64 rollouts, so that runs of any size compare.

    scripts/setup dev; bridle harness install NAME   # once per harness; or make test-harnesses
    python -m benchmarks.breaks [--harness NAME...] [--work hard] [--split 0.005] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import uvloop
from tests.real_clients import test_harness_long_runs as alone
from tests.real_clients import test_harness_subagents as agents
from tests.real_clients.side_by_side import Ran, Run, side_by_side
from tests.real_clients.work import the_files_are_right

from bridle.engines.base import EngineInfo, GenerateChunk, GenerateRequest
from bridle.engines.ids import ArrayIds
from bridle.scripted.engine import ScriptedEngine
from bridle.scripted.script import ScriptedTurn, make_script
from bridle.scripted.tokenizer import load_tokenizer
from bridle.types import JSON

if TYPE_CHECKING:
    from bridle.types import Ids

HARNESSES = {
    "mini_swe_agent": "openai_chat",
    "pi": "openai_chat",
    "claude_code": "anthropic",
    "codex": "openai_responses",
    "qwen_code": "openai_chat",
    "gemini_cli": "google",
}
PER: Final = 64
"""Rollouts that breaks are reported for."""

MARK: Final = re.compile(r"\[work-\d+\]")
"""What a session's instruction ends with."""


class Sampling(ScriptedEngine):
    """A scripted engine whose ids are now and then two tokens in place of one.

    Which ones is a fixed function of the rollout (its mark, which its prompts hold) and of the
    turn's ids, so both ways of prompting sample the same.
    """

    split = 0.0
    """Share of the tokens that can be split and are."""

    def _sample(self, turn: ScriptedTurn, tools: Sequence[JSON], prompt: Ids) -> Ids:
        ids = super()._sample(turn, tools, prompt)
        mark = MARK.search(self.tokenizer.decode(prompt)) if self.split else None
        chance = random.Random(ids.tobytes() + (mark[0].encode() if mark else b""))  # noqa: S311 - no secret
        found: list[int] = []
        for one in ids.tolist():
            split = chance.random() < self.split
            found += halves().get(one, (one,)) if split else (one,)
        return np.array(found, dtype=np.int32)


class Messages(Sampling):
    """The same, but it renders its prompts itself, from messages, as a chat route does."""

    async def start(self) -> EngineInfo:
        """Says that it takes messages only."""
        return replace(await super().start(), token_in=False)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Render, then play as under ids."""
        asked = request
        if request.messages is not None:
            text = self.tokenizer.render(list(request.messages), list(request.tools or ()))
            prompt = ArrayIds(self.tokenizer.encode(text))
            asked = replace(request, prompt=prompt, messages=None, tools=None)
        async with aclosing(super().generate(asked)) as chunks:
            async for chunk in chunks:
                yield chunk


@cache
def halves() -> dict[int, tuple[int, int]]:
    """Token -> two others of the same text, for plain tokens of more than one character."""
    tokenizer = load_tokenizer(None)
    texts = [tokenizer.decode([one]) for one in range(tokenizer.vocab_size)]
    plain = {text: one for one, text in enumerate(texts) if text.isascii() and "<" not in text}
    return {
        one: (plain[text[:-1]], plain[text[-1]])
        for text, one in plain.items()
        if len(text) > 1 and text[:-1] in plain and text[-1] in plain
    }


def trimmed(turn: JSON) -> JSON:
    """A turn as a chat template writes it again from a harness's history."""
    words = {name: turn[name].strip() for name in ("content", "reasoning") if turn.get(name)}
    calls = [
        {**call, "arguments": json.loads(call["arguments"])} for call in turn.get("tool_calls", ())
    ]
    return {**turn, **words, "tool_calls": calls}


def player(kind: type[Sampling], split: float, *, plain: bool) -> Callable[[list[JSON]], Sampling]:
    """Return a function that makes an engine of `kind` for some conversations."""

    def play(conversations: list[JSON]) -> Sampling:
        if plain:
            conversations = [
                {**one, "turns": [trimmed(turn) for turn in one["turns"]]} for one in conversations
            ]
        engine = kind(make_script({"conversations": conversations}, "script"))
        engine.split = split
        return engine

    return play


def run_of(harness: str) -> Run:
    """One rollout: ten turns, and two agents where the harness starts any."""
    dialect, check = HARNESSES[harness], the_files_are_right()
    if harness in agents.START:
        script, settings = agents.script(harness, dialect), agents.SETTINGS.get(harness, {})
        return Run(harness, dialect, script, check, settings)
    return Run(harness, dialect, alone.script(harness), check)


async def measure(
    harnesses: Sequence[str], rollouts: int, play: Callable[[list[JSON]], Sampling], folder: Path
) -> dict[str, JSON]:
    """Numbers of each harness. `RuntimeError` if a session did not do its work."""
    runs = [run_of(harness) for harness in harnesses for _ in range(rollouts)]
    ran = await side_by_side(folder, runs, play=play, allow_untokenized=True)
    found: dict[str, JSON] = {}
    for harness in harnesses:
        own = [one for one in ran if one.run.harness == harness]
        found[harness] = numbers(own)
    return found


def numbers(ran: Sequence[Ran]) -> JSON:
    """Sum up the sessions of one harness."""
    failed = [one.table() for one in ran if one.result.reward != 1.0]
    if failed:
        raise RuntimeError("\n".join(failed))
    drift: Counter[str] = Counter()
    breaks = 0
    for one in ran:
        drift.update(one.stats["drift"])
        merging = one.stats["merging"]
        breaks += merging["showing"] - merging["extending"]
    return {
        "rollouts": len(ran),
        "calls": round(sum(len(one.exchanges) for one in ran) / len(ran), 1),
        "tokens": sum(one.stats["tokens_captured"] for one in ran) // len(ran),
        "breaks": round(breaks * PER / len(ran)),
        "traces": round(sum(one.stats["traces"] for one in ran) / len(ran), 2),
        "drift": dict(drift),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--harness", nargs="+", choices=HARNESSES, default=[*HARNESSES])
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--split", type=float, default=0.0)
    parser.add_argument("--work", choices=("plain", "hard"), default="plain")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    ways = {"token-in": Sampling, "messages": Messages}
    with tempfile.TemporaryDirectory() as name:
        found = {}
        for way, kind in ways.items():
            play = player(kind, chosen.split, plain=chosen.work == "plain")
            folder = Path(name) / "run"
            folder.mkdir()  # of the same name for both ways: the model says it
            found[way] = uvloop.run(measure(chosen.harness, chosen.rollouts, play, folder))
            shutil.rmtree(folder)
    if chosen.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    heads = ("calls", "tokens", f"breaks/{PER}", "traces", f"breaks/{PER}", "traces")
    sys.stdout.write(f"{'':38}token-in{'':14}messages\n")
    sys.stdout.write(f"{'harness':16}" + "".join(f"{head:>11}" for head in heads) + "\n")
    for harness in chosen.harness:
        with_ids, without = (found[way][harness] for way in ways)
        cells = [with_ids["calls"], with_ids["tokens"]]
        cells += [side[name] for side in (with_ids, without) for name in ("breaks", "traces")]
        line = "".join(f"{cell:>11}" for cell in cells)
        sys.stdout.write(f"{harness:16}{line}   {without['drift']}\n")


if __name__ == "__main__":
    main()

"""Cost of making a prompt: placing, extending, parsing, and the forms of the ids.

Workload: one agent conversation on the shipped tokenizer, turns of 128 sampled ids and a tool
result of about 800, grown to a context; 20 tools of 1 kB. Medians of many runs in microseconds, the
first run of each left out.

    python benchmarks/prompting.py [--contexts 2000 16000 64000] [--runs 200] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bridle.dialects.json_reader import content_digest
from bridle.prompting.canonical import AtomMemo, answer_atoms, canonical
from bridle.prompting.conversation import Conversation
from bridle.prompting.prompt import PromptIds
from bridle.prompting.renderer import PromptRenderer, load_renderer
from bridle.types import (
    Dialect,
    FinishReason,
    Message,
    ModelRequest,
    Role,
    Sampling,
    TextPart,
    ToolCall,
    ToolSpec,
)

if TYPE_CHECKING:
    from bridle.types import Ids

TOOLS = tuple(
    ToolSpec(
        f"tool_{number}",
        "Reads a file from the local file system and returns its lines. " * 15,
        {"type": "object", "properties": {"path": {"type": "string", "default": "."}}},
    )
    for number in range(20)
)
LINE = "src/main.py:17: the value of port is 8080 in config.json\n"
CALL = '<tool_call>\n{"name": "tool_0", "arguments": {"path": "src/main.py"}}\n</tool_call>'
HISTORY = 120
"""Messages of the request that is placed."""


def median_us(run: Callable[[], object], runs: int) -> float:
    """Median time of one call, microseconds."""
    run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


class Workload:
    """The texts and ids that every row uses."""

    def __init__(self) -> None:
        self.renderer: PromptRenderer = load_renderer("builtin")
        self.output = self._sampled("I look at the file. ", 128 - len(self._ids(CALL)) - 1)
        self.reasoned = self._ids("<think>\n" + "let me see what it says. " * 60 + "</think>\n\nok")
        self.result = Message(Role.TOOL, (TextPart(self._text(800)),), tool_call_id="c")

    def _ids(self, text: str) -> Ids:
        found = self.renderer.tokenizer.encode(text, add_special_tokens=False)
        return np.array(found, dtype=np.int32)

    def _text(self, count: int) -> str:
        """Text of `count` ids."""
        return self.renderer.decode(self._ids(LINE * count)[:count])

    def _sampled(self, text: str, count: int) -> Ids:
        return np.concatenate([self._ids(text * count)[:count], self._ids(CALL + "<|im_end|>")])

    def suffix(self, prompt: PromptIds, *new: Message) -> Ids:
        """Return the ids that follow the sampled ones under a prompt."""
        found = self.renderer.extend(prompt, self.output, new, TOOLS, thinking=None)
        assert found is not None
        return found

    def grown(self, context: int) -> PromptIds:
        """A conversation's prompt of at least `context` ids, turn by turn."""
        task = Message(Role.USER, (TextPart("Find the port."),))
        prompt = PromptIds.root(self.renderer.render([task], TOOLS[:2], thinking=None))
        while len(prompt) < context:
            prompt = prompt.extend(self.output, self.suffix(prompt, self.result))
        return prompt


def requests(messages: int) -> tuple[ModelRequest, ModelRequest]:
    """A request of that many messages, and the one before it; spans as a dialect gives them."""
    listed = [Message(Role.SYSTEM, (TextPart("You are a helpful assistant. " * 300),))]
    for turn in range(messages // 2):
        call = ToolCall(f"call_{turn:024x}", "tool_0", json.dumps({"path": f"file{turn}.txt"}))
        listed.append(
            Message(Role.ASSISTANT, (TextPart(f"Step {turn}. " * 20),), tool_calls=(call,))
        )
        listed.append(Message(Role.TOOL, (TextPart(LINE * 40),), tool_call_id=call.id))
    spans = tuple(repr(message).encode() for message in listed)
    whole = ModelRequest(
        Dialect.OPENAI_CHAT,
        "m",
        tuple(listed),
        TOOLS,
        Sampling(),
        stream=False,
        message_spans=spans,
        span_digests=tuple(map(content_digest, spans)),
        span_lengths=(1,) * len(spans),
        tools_span=repr(TOOLS).encode(),
    )
    before = replace(
        whole,
        messages=whole.messages[:-2],
        span_digests=whole.span_digests[:-2],
        span_lengths=whole.span_lengths[:-2],
    )
    return before, whole


def placing(runs: int) -> dict[str, float]:
    """Normalise and place a long request of which one turn is new; with and without the memo."""
    before, whole = requests(HISTORY)
    memo, conversation = AtomMemo(), Conversation()
    answer = answer_atoms(whole.messages[-2:-1], TOOLS)
    conversation.commit("parent", canonical(before, memo), answer, [])
    newest = canonical(before, memo).tools_digest + whole.span_digests[-1]

    def place() -> None:
        memo.pop(newest, None)
        again = replace(whole, tools_span=bytes(bytearray(whole.tools_span or b"")))
        assert conversation.place(again, canonical(again, memo)).extend

    def place_plainly() -> None:
        assert conversation.place(whole, canonical(whole, AtomMemo())).extend

    return {"with memo": median_us(place, runs), "without": median_us(place_plainly, runs // 4)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2000, 16000, 64000])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    rows = measure(chosen.contexts, chosen.runs)
    if chosen.json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    for name, columns in rows.items():
        cells = "".join(f"{column:>14} {value:8.1f}" for column, value in columns.items())
        sys.stdout.write(f"{name:<48}{cells}\n")


def measure(contexts: Sequence[int], runs: int) -> dict[str, dict[str, float]]:
    """Every row: name -> column -> microseconds."""
    work = Workload()
    prompts = {f"{context // 1000}k": work.grown(context) for context in contexts}
    result = Message(Role.ASSISTANT, (TextPart("kept"),))
    rows: dict[str, dict[str, float]] = {}

    def per_context(name: str, run: Callable[[PromptIds], object], share: int = 1) -> None:
        rows[name] = {
            context: median_us(lambda prompt=prompt: run(prompt), runs // share)  # type: ignore[misc]
            for context, prompt in prompts.items()
        }

    per_context("suffix for 800 new ids", lambda p: work.suffix(p, work.result))
    per_context("suffix by template difference", lambda p: work.suffix(p, result, work.result), 4)
    suffix = work.suffix(prompts[next(iter(prompts))], work.result)
    per_context("child prompt from output and suffix", lambda p: p.extend(work.output, suffix))
    per_context("child prompt and its JSON", lambda p: p.extend(work.output, suffix).json(), 4)
    per_context("a copy of that JSON", lambda p: bytearray(p.json()))
    per_context("child prompt and its array", lambda p: p.extend(work.output, suffix).array(), 4)
    tail = prompts[next(iter(prompts))].tail(64)
    for name, ids in (("call", work.output), ("reasoning", work.reasoned)):
        rows[f"parse {len(ids)} ids with {name}"] = {
            "": median_us(
                lambda ids=ids: work.renderer.parse(  # type: ignore[misc]
                    ids,
                    tools=TOOLS,
                    prompt_tail=tail,
                    finish=FinishReason.STOP,
                    stop_text=None,
                ),
                runs,
            )
        }
    rows[f"normalise and place {HISTORY} messages, one new"] = placing(runs)
    return rows


if __name__ == "__main__":
    main()

"""The scripted engine: a real tokenizer and a script in place of a model.

It samples the tokens of its script and is in every other way an engine: ids and logprobs for every
token, output budget, stop strings, context overflow, abort, policy versions, streaming. With it
every path of Bridle runs without weights, and a recorded fault of a harness can be replayed.

- Logprobs are a fixed function of the ids (`scripted_logprobs`), the same at every temperature, so
  their mode is raw.
- A prompt that already holds the beginning of the reply (a resumed call) gets the rest of it.
- A request whose id starts with `probe-` gets a fixed reply, so that scripts need none for the
  start-up probe.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from bridle.engines.base import (
    RETRYABLE,
    CutError,
    EngineInfo,
    GenerateChunk,
    GenerateRequest,
)
from bridle.engines.ids import IdsError, check_vocabulary
from bridle.errors import ConfigError, ContextOverflowError, EngineError
from bridle.harness_rules import HARNESS_RULES
from bridle.scripted.script import (
    THINK,
    THINK_END,
    PromptView,
    RequestView,
    Script,
    ScriptedTurn,
    choose,
    load_script,
    opening_of,
    spell_call,
    spell_turn,
    tool_names,
    view_messages,
)
from bridle.scripted.tokenizer import ChatTokenizer, load_tokenizer
from bridle.types import JSON, FinishReason, Ids, LogprobMode, Logprobs, Sampling, VersionSpan

PIECE = 8
"""Tokens per chunk of a streamed reply."""

PROBE_PREFIX = "probe-"
"""Beginning of the request ids of a start-up probe."""

_PROBED = ScriptedTurn(content="A probe was answered.")
_NO_THOUGHT = f"{THINK}\n\n{THINK_END}\n\n"
_HALF = -1
_FAULTS_REMEMBERED = 10_000
_TEXTS_REMEMBERED = 1_000


def scripted_logprobs(ids: Ids) -> Logprobs:
    """Return `-(1/64 + 4 * frac(id * 2654435761 / 2**32))` for each id, float32, all below 0.

    Each depends on its own id alone, so a test can recompute them and a shift between ids and
    logprobs is visible.
    """
    mixed = ids.astype(np.uint32) * np.uint32(2_654_435_761)
    return (-(1 / 64 + 4 * (mixed / 2.0**32))).astype(np.float32)


class ScriptedEngine:
    """Plays a script; implements `bridle.engines.base.Engine` and `Versioned`.

    `where` names the script in error messages. Construction checks the script against the
    tokenizer and raises `ConfigError`.
    """

    def __init__(
        self, script: Script, *, tokenizer: ChatTokenizer | None = None, where: str = "script"
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer or load_tokenizer(None)
        self.version = 0
        self._calls: dict[str, asyncio.Event] = {}
        self._faults: OrderedDict[tuple[int, int, bytes], int] = OrderedDict()
        self._encoded: dict[str, Ids] = {}
        self._check_ids(where)

    @classmethod
    def open(
        cls,
        target: str,
        *,
        tokenizer: str | None = None,
        allow_untokenized: bool = False,  # noqa: ARG003 - it gives ids in any case
    ) -> Self:
        """Return an engine that plays the script file `target`. Raises `ConfigError`."""
        script = load_script(Path(target))
        return cls(script, tokenizer=load_tokenizer(tokenizer), where=target)

    def _check_ids(self, where: str) -> None:
        size = self.tokenizer.vocab_size
        for c, conversation in enumerate(self.script.conversations):
            for t, turn in enumerate(conversation.turns):
                for i, given in enumerate(turn.token_ids or ()):
                    if given >= size:
                        field = f"conversations.{c}.turns.{t}.token_ids.{i}"
                        raise ConfigError(
                            f"{where}: {field}: token id {given} is beyond the tokenizer's "
                            f"vocabulary of {size}"
                        )

    async def start(self) -> EngineInfo:
        """Return the engine's capabilities; there is nothing to start."""
        return EngineInfo(
            model=self.script.model,
            context_length=self.script.context_length,
            logprob_mode=LogprobMode.RAW,
            token_in=True,
            version=self.version,
            eos_token_ids=(self.tokenizer.end_id,),
            tokenizer_dir=str(self.tokenizer.folder),
        )

    async def health(self) -> None:
        """Return at once: this engine does not fail."""

    async def set_version(self, version: int) -> None:
        """Set the policy version that later tokens report."""
        self.version = version

    async def template(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, arguments: JSON
    ) -> Ids:
        """Return the prompt ids that the tokenizer's chat template makes of messages."""
        return self.tokenizer.prompt_ids(messages, tools, arguments)

    async def abort(self, request_id: str) -> None:
        """End a call; its tokens that were not sent yet are dropped."""
        if request_id in self._calls:
            self._calls[request_id].set()

    async def aclose(self) -> None:
        """End all calls."""
        for aborted in self._calls.values():
            aborted.set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Yield the reply that the script has for the request; in one chunk unless asked to stream.

        Raises `EngineError` for a scripted fault (`CutError` for `cut`), a request that no
        conversation fits, and a turn that needs a shell tool where there is none;
        `ContextOverflowError` for a prompt that leaves no room.
        """
        aborted = self._calls.setdefault(request.request_id, asyncio.Event())
        try:
            budget = self._budget(request)
            ids = _prompt_array(request, self.tokenizer.vocab_size)
            if request.request_id.startswith(PROBE_PREFIX):
                turn, fault = _PROBED, None
                tools: Sequence[JSON] = ()
            else:
                view = self._view(request, ids)
                c, t = choose(self.script, view, request.model)
                turn, tools = self.script.conversations[c].turns[t], view.tools
                fault = self._fault(turn, (c, t), request)
                if fault is None or turn.fault_after is None:
                    await _wait(turn.delay_s, aborted)
                if fault is not None and not fault.tokens and not aborted.is_set():
                    raise fault.error
            sampled = self._sample(turn, tools, ids)
            played = self._limit(sampled, turn, request.sampling, budget)
            async for chunk in self._give(request, played, aborted, fault):
                yield chunk
        finally:
            self._calls.pop(request.request_id, None)

    def _budget(self, request: GenerateRequest) -> int:
        room = self.script.context_length - len(request.prompt)
        asked = request.sampling.max_tokens
        if room <= 0:
            raise ContextOverflowError(len(request.prompt), self.script.context_length, asked)
        return room if asked is None else min(asked, room)

    def _view(self, request: GenerateRequest, ids: Ids) -> RequestView:
        if request.messages is not None:
            return view_messages(request.messages, request.tools)
        return PromptView(ids, self.tokenizer)

    def _fault(
        self, turn: ScriptedTurn, key: tuple[int, int], request: GenerateRequest
    ) -> _Fault | None:
        """Return the turn's fault, if it is still due for this prompt."""
        if turn.fault is None:
            return None
        if turn.fault_times is not None:
            seen = (*key, hashlib.sha256(request.prompt.json()).digest())
            count = self._faults[seen] = self._faults.pop(seen, 0) + 1
            if len(self._faults) > _FAULTS_REMEMBERED:
                self._faults.popitem(last=False)
            if count > turn.fault_times:
                return None
        wait_s = 0.0 if turn.fault_after is None else turn.delay_s
        if turn.fault == "cut":
            error: EngineError = CutError("the script cuts this reply")
            return _Fault(error, turn.fault_after or _HALF, wait_s)
        error = EngineError(
            f"a scripted fault of status {turn.fault}",
            retryable=turn.fault in RETRYABLE,
            status=turn.fault,
        )
        return _Fault(error, turn.fault_after or 0, wait_s)

    # ---- sampling

    def _sample(self, turn: ScriptedTurn, tools: Sequence[JSON], prompt: Ids) -> Ids:
        """Return the ids of a turn without those that the prompt already holds."""
        held = opening_of(prompt, self.tokenizer)
        if turn.token_ids is not None:
            ids, text = np.array(turn.token_ids, dtype=np.int32), None
        else:
            held, text = self._text(turn, tools, held)
            ids = self._encode(text)
        if turn.finish == "stop" and (not len(ids) or ids[-1] != self.tokenizer.end_id):
            ids = np.append(ids, np.int32(self.tokenizer.end_id))
        if not len(held) or np.array_equal(ids[: len(held)], held):
            return ids[len(held) :]
        begun = self.tokenizer.decode(held)
        if text is None or not text.startswith(begun):
            return ids
        rest = self._encode(text[len(begun) :])
        return np.append(rest, ids[-1:]) if turn.finish == "stop" else rest

    def _text(self, turn: ScriptedTurn, tools: Sequence[JSON], held: Ids) -> tuple[Ids, str]:
        """Return the ids of the turn that the prompt holds, and the turn's text.

        A prompt with a closed, empty thinking block has thinking off: reasoning is left out. If the
        prompt opened a block (templates that always think), a turn without reasoning closes it.
        """
        if turn.raw is not None:
            return held, turn.raw
        reasoning = turn.reasoning
        closed = self._encode(_NO_THOUGHT)
        if len(held) >= len(closed) and np.array_equal(held[: len(closed)], closed):
            held, reasoning = held[len(closed) :], None
        elif reasoning is None and len(held) and held[0] == self.tokenizer.id_of(THINK):
            reasoning = ""
        calls = [spell_call(call.name, call.arguments) for call in turn.tool_calls]
        calls += self._shell_calls(turn.shell, tools)
        return held, spell_turn(reasoning, turn.content or "", calls)

    def _shell_calls(self, commands: Sequence[str], tools: Sequence[JSON]) -> list[str]:
        if not commands:
            return []
        function = find_shell(tools)
        if function is None:
            raise EngineError(
                f"the script's turn uses `shell`, but none of the request's tools runs commands: "
                f"{tool_names(tools)}",
                status=400,
            )
        spelled = [(function["name"], shell_arguments(function, each)) for each in commands]
        return [spell_call(name, arguments) for name, arguments in spelled]

    def _encode(self, text: str) -> Ids:
        if text not in self._encoded:
            if len(self._encoded) >= _TEXTS_REMEMBERED:
                self._encoded.clear()
            self._encoded[text] = self.tokenizer.encode(text)
        return self._encoded[text]

    def _limit(self, ids: Ids, turn: ScriptedTurn, sampling: Sampling, budget: int) -> _Played:
        """Cut the ids at the first stop token, stop string or the budget."""
        finish = FinishReason.LENGTH if turn.finish == "length" else FinishReason.STOP
        stop_text = None
        if sampling.stop_token_ids:
            stops = np.flatnonzero(np.isin(ids, sampling.stop_token_ids))
            if len(stops):
                ids, finish = ids[: int(stops[0]) + 1], FinishReason.STOP
        if sampling.stop:
            count = self._tokens_to_stop(ids, sampling.stop)
            if count is not None:
                ids, finish = ids[:count], FinishReason.STOP
                text = self.tokenizer.decode(ids, skip_special=True)
                stop_text = next(stop for stop in sampling.stop if stop in text)
        if len(ids) > budget:
            return _Played(ids[:budget], FinishReason.LENGTH, None, turn.pace_s)
        return _Played(ids, finish, stop_text, turn.pace_s)

    def _tokens_to_stop(self, ids: Ids, stops: Sequence[str]) -> int | None:
        """Return the fewest ids whose text has a stop string; `None` = no stop string occurs."""

        def stopped(count: int) -> bool:
            text = self.tokenizer.decode(ids[:count], skip_special=True)
            return any(stop in text for stop in stops)

        if not stopped(len(ids)):
            return None
        return bisect.bisect_left(range(len(ids) + 1), True, key=stopped)  # noqa: FBT003 - a value

    # ---- streaming

    async def _give(
        self,
        request: GenerateRequest,
        played: _Played,
        aborted: asyncio.Event,
        fault: _Fault | None,
    ) -> AsyncGenerator[GenerateChunk, None]:
        ids = played.ids if fault is None else fault.left(played.ids)
        piece_size = 1 if played.pace_s else PIECE
        size = piece_size if request.stream else max(len(ids), 1)
        versions: list[VersionSpan] = []
        for start in range(0, max(len(ids), 1), size):
            piece = ids[start : start + size]
            await _wait(played.pace_s * (len(piece) - (start == 0)), aborted)
            piece = piece if not aborted.is_set() else ids[:0]
            end = start + len(piece)
            last = (end == len(ids) and fault is None) or aborted.is_set()
            versions = _spans(versions, self.version, start, end)
            finish = FinishReason.ABORT if aborted.is_set() else played.finish
            yield GenerateChunk(
                output_ids=piece,
                logprobs=scripted_logprobs(piece),
                finish_reason=finish if last else None,
                stop_text=played.stop_text if last and finish is FinishReason.STOP else None,
                versions=tuple(versions) if last else (),
                prompt_ids_json=request.prompt.json() if start == 0 else None,
            )
            if last:
                return
            await asyncio.sleep(0)
        if fault is not None:
            await _wait(fault.delay_s, aborted)
            if not aborted.is_set():
                raise fault.error
            yield GenerateChunk(
                ids[:0], scripted_logprobs(ids[:0]), FinishReason.ABORT, versions=tuple(versions)
            )


@dataclass(frozen=True, slots=True)
class _Played:
    ids: Ids
    finish: FinishReason
    stop_text: str | None
    pace_s: float


@dataclass(frozen=True, slots=True)
class _Fault:
    """Failure due after some tokens and a wait."""

    error: EngineError
    tokens: int
    """`_HALF` = half of the reply."""
    delay_s: float

    def left(self, ids: Ids) -> Ids:
        """Return the part of the reply that is delivered before the fault."""
        return ids[: len(ids) // 2 if self.tokens == _HALF else self.tokens]


def _prompt_array(request: GenerateRequest, vocab_size: int) -> Ids:
    """Return the prompt's ids. Raises `EngineError` (400) for ids outside the vocabulary."""
    try:
        ids = request.prompt.array()
    except IdsError as error:
        raise EngineError(f"prompt: {error}", status=400) from error
    check_vocabulary(ids, vocab_size)
    return ids


async def _wait(seconds: float, aborted: asyncio.Event) -> None:
    """Sleep, or return early at an abort."""
    if seconds <= 0:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await aborted.wait()


def _spans(spans: list[VersionSpan], version: int, start: int, end: int) -> list[VersionSpan]:
    if start == end:
        return spans
    if spans and spans[-1].version == version:
        return [*spans[:-1], VersionSpan(version, spans[-1].start, end)]
    return [*spans, VersionSpan(version, start, end)]


NAMES = tuple(
    dict.fromkeys(
        (
            *("bash", "shell"),
            *(name for row in HARNESS_RULES.values() for name in row.shell_tools),
            *("run_terminal_cmd", "run_command", "run_bash", "sh"),
        )
    )
)
"""Names of shell tools, lower case, best first: usual ones and those of the known harnesses."""

ARGUMENTS = ("command", "cmd", "commands", "bash_command", "shell_command", "script", "input")
"""Names of the argument that holds the command line, best first."""

_HINTS = ("shell", "bash", "terminal", "command", "exec")
_PLACES = {"cwd", "workdir", "path", "directory", "dir"}
_TIMEOUT_S = 120


def find_shell(tools: Sequence[JSON]) -> JSON | None:
    """Return the function (`name`, `parameters`) of the shell tool among `tools`; `None` = there is
    none.

    An exact name wins over a name with a hint, and that over a tool that merely requires a command.
    Among equals the first listed is taken. A tool without a command argument is never chosen.
    """
    functions = [function for tool in tools if (function := _function(tool))]
    usable = [function for function in functions if _command_argument(function)]
    by_name = {str(function["name"]).lower(): function for function in reversed(usable)}
    for name in NAMES:
        if name in by_name:
            return by_name[name]
    for function in usable:
        if any(hint in str(function["name"]).lower() for hint in _HINTS):
            return function
    for function in usable:
        if _command_argument(function) in _required(_parameters(function)):
            return function
    return None


def shell_arguments(function: JSON, command: str) -> JSON:
    """Return the arguments with which a shell tool's `function` runs `command`.

    The command's argument takes the form that its schema has: a string, `["bash", "-lc", command]`,
    or a list of whole commands where its name is plural. Every other required argument gets its
    default, its first allowed value, or something harmless of its type.
    """
    root = _parameters(function)
    name = _command_argument(function) or ARGUMENTS[0]
    arguments: JSON = {name: _command_value(name, _property(root, name), command, root)}
    for other in _required(root):
        if other not in arguments:
            arguments[other] = _harmless(other, _property(root, other), root)
    return arguments


def _function(tool: JSON) -> JSON | None:
    inner = tool.get("function")
    function = inner if isinstance(inner, dict) else tool
    return function if isinstance(function.get("name"), str) else None


def _parameters(function: JSON) -> JSON:
    found = function.get("parameters") or function.get("input_schema") or {}
    return found if isinstance(found, dict) else {}


def _properties(schema: JSON) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _property(root: JSON, name: str) -> JSON:
    return _resolved(_properties(root).get(name), root)


def _required(schema: JSON) -> list[str]:
    found = schema.get("required")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _command_argument(function: JSON) -> str | None:
    root = _parameters(function)
    for name in ARGUMENTS:
        if name in _properties(root) and _type(_property(root, name)) in {"string", "array"}:
            return name
    return None


def _command_value(name: str, schema: JSON, command: str, root: JSON) -> Any:  # noqa: ANN401 - JSON
    if _type(schema) != "array":
        return command
    items = _resolved(schema.get("items"), root)
    if _type(items) == "object":
        return [shell_arguments({"parameters": {**items, "$defs": root.get("$defs", {})}}, command)]
    return [command] if name.endswith("s") else ["bash", "-lc", command]


def _resolved(schema: object, root: JSON) -> JSON:
    """Resolve a local reference, or take the first alternative that is not null."""
    if not isinstance(schema, dict):
        return {}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return target if isinstance(target, dict) else {}
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            found = _resolved(choice, root)
            if _type(found) != "null":
                return {**schema, **found}
    return schema


def _type(schema: JSON) -> str:
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    named = [one for one in kinds if isinstance(one, str) and one != "null"]
    if named:
        return named[0]
    if "null" in kinds:
        return "null"
    return "object" if "properties" in schema else "string"


def _harmless(name: str, schema: JSON, root: JSON) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value of the schema that does not change how the command runs."""
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    kind = _type(schema)
    if kind == "object":
        inner = {one: _resolved(_properties(schema).get(one), root) for one in _required(schema)}
        return {one: _harmless(one, found, root) for one, found in inner.items()}
    if kind in {"integer", "number"}:
        return _number(name, schema)
    text = "." if name.lower() in _PLACES else "Run a command"
    return {"boolean": False, "array": []}.get(kind, text)


def _number(name: str, schema: JSON) -> int:
    if "timeout" in name.lower():
        text = f"{name} {schema.get('description', '')}".lower()
        in_ms = "ms" in text.replace("_", " ").split() or "millisecond" in text
        return _TIMEOUT_S * (1000 if in_ms else 1)
    return int(schema.get("minimum", 0))

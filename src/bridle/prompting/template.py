"""A folder's own chat template: whole prompts, and extensions as a difference of two renderings.

What follows a sampled turn is what the template writes after it: render a short stand-in
conversation that ends in an assistant turn, once alone and once with the new messages; the second
text, cut behind the turn's end token, is the suffix. It starts right behind a control token, so
its ids do not depend on what is before; that is checked on fixed conversations before any use. This
needs no knowledge of the model family, takes assistant messages that a harness wrote itself, turns
that were cut, and reasoning that was left open.

The prompt so far is never touched, so a suffix costs only its new messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bridle.errors import RenderError, boundary
from bridle.prompting.tokenizer import MARK, PromptTokenizer
from bridle.types import JSON

STAND_IN = MARK + "2"
"""Content of the stand-in turn; escaped text never holds it."""

_STAND_IN_NAME = MARK + "3"
"""Name of a stand-in call; where a suffix shows it, the suffix is not used."""

_USER: JSON = {"role": "user", "content": "x"}

_CHECKS: tuple[list[JSON], ...] = (
    [_USER],
    [{"role": "user", "content": "\n\nab\n"}, {"role": "user", "content": "c d"}],
    [{"role": "assistant", "content": "answer"}, _USER],
)
"""New messages that `check` extends by; the last holds an assistant message."""


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: PromptTokenizer, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self.close = self._find_close()
        """The token that ends an assistant turn, as text; `None` = the template has none."""
        self.extends = self.close is not None and self._check()
        """True if extensions by difference are right with this template."""

    def text(
        self,
        messages: Sequence[JSON],
        tools: Sequence[JSON] | None,
        *,
        thinking: bool | None,
        generation: bool = True,
    ) -> str:
        """Return the prompt as text, marks included; with the beginning of a turn if `generation`.

        Raises `RenderError` with what the template says against the messages.
        """
        switches = {} if thinking is None else {"enable_thinking": thinking}
        with boundary(RenderError, "the chat template refuses these messages"):
            text = self._tokenizer.fast.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                add_generation_prompt=generation,
                tokenize=False,
                **switches,
            )
        return str(text)

    def render(
        self, messages: Sequence[JSON], tools: Sequence[JSON] | None, *, thinking: bool | None
    ) -> list[int]:
        """Return ids of a whole prompt, ready to sample."""
        return self._tokenizer.encode(self.text(messages, tools, thinking=thinking))

    def extend(
        self,
        new_messages: Sequence[JSON],
        tools: Sequence[JSON] | None,
        *,
        closed: bool,
        thinking: bool | None,
    ) -> list[int] | None:
        """Return ids after a sampled turn; `None` = this template cannot be extended by these
        messages.

        `closed` says whether the sampled turn ends with an end token; if not, one is put before.
        """
        if not self.extends or self.close is None:
            return None
        try:
            after = self._after_close(new_messages, tools, thinking=thinking)
        except RenderError:
            return None  # the full prompt tells what is wrong with the messages
        if after is None:
            return None
        ids = self._tokenizer.encode(after)
        return ids if closed else [self._tokenizer.added[self.close], *ids]

    def _after_close(
        self, new_messages: Sequence[JSON], tools: Sequence[JSON] | None, *, thinking: bool | None
    ) -> str | None:
        """Return the template's text from the last turn's end token to the end of the prompt."""
        assert self.close is not None
        stand_in = [_USER, _stand_in(new_messages)]
        alone = self.text(stand_in, tools, thinking=thinking, generation=False)
        whole = self.text([*stand_in, *new_messages], tools, thinking=thinking)
        _, found, ending = alone.rpartition(STAND_IN)
        _, again, behind = whole.rpartition(STAND_IN)
        end = ending.rfind(self.close) + len(self.close)
        if not (found and again) or end < len(self.close) or not behind.startswith(ending):
            return None
        return None if _STAND_IN_NAME in behind[end:] else behind[end:]

    def _find_close(self) -> str | None:
        """Return the end token that stands right behind an assistant's text."""
        stand_in = [_USER, {"role": "assistant", "content": STAND_IN}]
        try:
            text = self.text(stand_in, None, thinking=None, generation=False)
        except RenderError:
            return None
        ending = text.rpartition(STAND_IN)[2].lstrip()
        for name, id_ in self._tokenizer.added.items():
            if id_ in self._stop_ids and ending.startswith(name):
                return name
        return None

    def _check(self) -> bool:
        """Return whether end token plus suffix tokenize as the whole text does."""
        assert self.close is not None
        for new_messages in _CHECKS:
            stand_in = [_USER, _stand_in(new_messages)]
            try:
                whole = self.text([*stand_in, *new_messages], None, thinking=None)
                after = self._after_close(new_messages, None, thinking=None)
            except RenderError:
                continue  # not every template takes every conversation
            if after is None:
                return False
            before = whole[: len(whole) - len(after)]
            encode = self._tokenizer.encode
            if encode(before) + encode(after) != encode(whole):
                return False
        return True


def _stand_in(new_messages: Sequence[JSON]) -> JSON:
    """Return an assistant turn that makes the calls which the new messages answer."""
    turn: JSON = {"role": "assistant", "content": STAND_IN}
    calls = []
    for message in new_messages:
        if message["role"] != "tool":
            break
        function: JSON = {"name": message.get("name") or _STAND_IN_NAME, "arguments": {}}
        calls.append(
            {"type": "function", "id": message.get("tool_call_id", ""), "function": function}
        )
    if calls:
        turn["tool_calls"] = calls
    return turn


def tool_parser_of(template: str) -> str | None:
    """Return the name of the `renderers` tool parser that reads calls of this template."""
    signs = {
        "<function=": "qwen3.5",
        "<arg_key>": "glm",
        "tool▁calls▁begin": "deepseek-v3",
        "<tool_call>": "qwen3",
    }
    return next((name for sign, name in signs.items() if sign in template), None)

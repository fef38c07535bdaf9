"""Messages to exact prompt ids and sampled ids to a reply, for one tokenizer folder.

A whole prompt is rendered once, at a root; after that a prompt is the parent's ids, the sampled ids
as they are, and a suffix for the new messages. Suffixes come from the family's bridge in the
`renderers` package, given only the parent's last ids, so that their cost does not grow with the
context; what it refuses is extended by the difference of two renderings of the folder's own
template. Where neither can, `extend` says so and the caller renders anew.

`call_grammar` makes the grammar under which a model must call a tool in the form of its own chat
template: an xgrammar structural tag, as vLLM takes it. Engines' own grammars for required calls
have a form that no template writes, so neither the model's training nor our parser knows it.

Templates take messages in OpenAI Chat's shape, with every text escaped.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from bridle.config import builtin_tokenizer_dir
from bridle.dialects.json_reader import without_lone_surrogates
from bridle.dialects.media import block_name, shown_block
from bridle.errors import RenderError, boundary
from bridle.prompting.calls import once_per_tools
from bridle.prompting.canonical import results_in_call_order
from bridle.prompting.family import (
    ChatTemplate,
    Family,
    History,
    Parser,
    check_reasoning,
    differences,
    family_names,
    find_family,
    live_marks,
    make_family,
    plain_parser,
    tool_parser_of,
)
from bridle.prompting.placeholders import END, PlaceholderFamily, suffix_of, with_placeholders
from bridle.prompting.prompt import PromptIds
from bridle.prompting.reply import PLAIN_FAMILIES, LiveReader, parse_reply, read_calls
from bridle.prompting.tokenizer import PromptTokenizer, load_tokenizer, stop_ids_of
from bridle.types import (
    JSON,
    FinishReason,
    Ids,
    MediaPart,
    Message,
    ModelRequest,
    Part,
    Reply,
    Role,
    TextPart,
    ToolCall,
    ToolSpec,
)

TAIL = 128
"""Number of the parent's last ids that a bridge is given. It looks for what the generation prompt
opened (a few ids); `test_a_suffix_depends_on_the_parents_tail_only` proves that it looks no
further."""


def load_renderer(
    source: str,
    *,
    thinking: bool | None = None,
    history: Literal["exact", "template"] = "exact",
    family: str | None = None,
    new_call_id: Callable[[], str] | None = None,
) -> PromptRenderer:
    """Return the prompt renderer of a tokenizer folder, or of the tokenizer in this package.

    Args:
        source: A folder with a fast tokenizer and a chat template, or `builtin`.
        thinking: Whether thinking is on where a request does not say; `None` = the template's way.
        history: `exact` keeps sampled tokens in context for the whole conversation; `template`
            re-renders where the model's template drops reasoning.
        family: The model family's name; `None` = it is found by comparing renderings.
        new_call_id: Makes ids of tool calls; the default is `call_` and 96 random bits in hex.

    Raises:
        RenderError: Naming the folder, what is wrong there, and what to do.
    """
    folder = builtin_tokenizer_dir() if source == "builtin" else Path(source)
    tokenizer = load_tokenizer(folder)
    if not tokenizer.fast.chat_template and family is None:
        raise RenderError(
            f"{folder}: the tokenizer has no chat template; put a chat_template.jinja there, "
            f"or name its family ({', '.join(family_names())})"
        )
    stop_ids = stop_ids_of(folder, tokenizer)
    template = ChatTemplate(tokenizer, stop_ids)
    found = family
    if found is None and (match := find_family(tokenizer, template)) is not None:
        found, default = match
        thinking = default if thinking is None else thinking
    try:
        return PromptRenderer(
            tokenizer,
            template,
            source=source,
            family=found,
            stop_ids=stop_ids,
            thinking=thinking,
            history=history,
            new_call_id=new_call_id or (lambda: f"call_{secrets.token_hex(12)}"),
        )
    except RenderError as error:
        raise RenderError(f"{folder}: {error}") from error


class PromptRenderer:
    """Renders, extends and parses for one tokenizer."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        template: ChatTemplate,
        *,
        source: str,
        family: str | None,
        stop_ids: Sequence[int],
        thinking: bool | None,
        history: History,
        new_call_id: Callable[[], str],
    ) -> None:
        self.family = family
        """Name of the family that renders; `None` = the template does."""
        self.source = source
        """Source of the tokenizer: a folder, or `builtin`."""
        self._tokens = tokenizer
        self.chars_per_token = tokenizer.chars_per_token
        """The most characters that one token can stand for; infinite = no bound is known."""
        self._template = template
        self._thinking = thinking
        self._history: History = history
        self._new_call_id = new_call_id
        self._families: dict[bool | None, Family | PlaceholderFamily] = {}
        self._parser: Parser = self._family_for(thinking=thinking) or plain_parser(tokenizer)
        self._text = self._parser.text if isinstance(self._parser, PlaceholderFamily) else None
        if family is None:
            check_reasoning(self._parser, tokenizer, template)
        self._marks = live_marks(family, tokenizer)
        named = [*self._parser.get_stop_token_ids(), *stop_ids]
        self.stop_token_ids = tuple(dict.fromkeys(named))
        """Ids that end a turn."""
        self.vocab_size = max(len(tokenizer), *(id_ + 1 for id_ in tokenizer.control_ids), 0)
        """Ids are below it."""
        self.tokenizer = tokenizer.fast
        """The transformers fast tokenizer."""

    @property
    def differences(self) -> list[str]:
        """Return the names of the probe conversations that the model family renders otherwise than
        the chat template.
        """
        family = self._family_for(thinking=None)
        if family is None or not self._tokens.fast.chat_template:
            return []
        return list(differences(family, self._template))

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool | None
    ) -> Ids:
        """Return the ids of a whole prompt, ready to sample; int32, shape (T,).

        `thinking` `None` = the renderer's own setting. `RenderError` says what is wrong.
        """
        ordered = results_in_call_order(messages)
        escape = self._tokens.escape
        listed = chat_tools(tools, escape)
        chat = chat_messages(ordered, escape)
        on = self._thinking if thinking is None else thinking
        try:
            ids = self._rendered(chat, listed, thinking=on)
        except RenderError:
            objects = chat_messages(ordered, escape, objects=True)
            if objects == chat:
                raise
            ids = self._rendered(objects, listed, thinking=on)
        return _array(ids)

    def _rendered(
        self, chat: list[JSON], tools: list[JSON] | None, *, thinking: bool | None
    ) -> list[int]:
        family = self._family_for(thinking=thinking)
        if family is None:
            return self._template.render(chat, tools, thinking=thinking)
        with boundary(RenderError, f"rendering as {self.family!r}"):
            return family.render_ids(chat, tools=tools, add_generation_prompt=True)

    def extend(
        self,
        parent: PromptIds,
        output_ids: Ids,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool | None,
    ) -> Ids | None:
        """Return the ids that new messages add behind the prompt `parent` and the sampled
        `output_ids`.

        `None` = the prompt must be rendered anew. `RenderError` names a part that is not text.
        """
        on = self._thinking if thinking is None else thinking
        family = self._families.get(on) or self._family_for(thinking=on)
        chat = chat_messages(new_messages, self._tokens.escape)
        if type(family) is PlaceholderFamily:
            end: list[int] = parent.tail(END).tolist()
            known = family.layouts.known(end, output_ids, chat, tools=bool(tools))
            if known is not None:
                return _array(known)
        sampled: list[int] = output_ids.tolist()
        if family is not None and Role.ASSISTANT not in [m.role for m in new_messages]:
            tail: list[int] = parent.tail(TAIL).tolist()
            with boundary(RenderError, f"extending as {self.family!r}"):
                suffix = suffix_of(family, tail, sampled, chat, chat_tools(tools))
            if suffix is not None:
                return _array(suffix)
        if self._history == "template":
            return None
        closed = bool(sampled) and sampled[-1] in self.stop_token_ids
        ids = self._template.extend(
            chat, chat_tools(tools, self._tokens.escape), closed=closed, thinking=on
        )
        return None if ids is None else _array(ids)

    def parse(
        self,
        output_ids: Ids,
        *,
        tools: Sequence[ToolSpec],
        prompt_tail: Ids,
        finish: FinishReason,
        stop_text: str | None,
        call_ids: Sequence[str] = (),
        calls_as_text: bool = False,
    ) -> Reply:
        """Parse sampled ids as a reply. Never raises; `prompt_tail` are the last ids of the prompt.

        `call_ids` are those that the first calls have been given already. With `calls_as_text` tool
        calls stay in the text as they were sampled.
        """
        sampled: list[int] = output_ids.tolist()
        listed = chat_tools(tools) if tools else None
        if self._text is not None and not stop_text:
            text = self._text(sampled, tools=listed, prompt_ids=prompt_tail[-END:].tolist())
            if text is not None:
                return Reply(text.lstrip(), None, (), finish)
        new_id = self._new_call_id
        if call_ids:
            given = iter(call_ids)
            new_id = lambda: next(given, None) or self._new_call_id()  # noqa: E731
        return parse_reply(
            self._parser,
            self._tokens,
            sampled,
            tools=listed,
            prompt_tail=prompt_tail.tolist(),
            finish=finish,
            stop_text=stop_text,
            new_id=None if calls_as_text else new_id,
            bare=self.family == "llama-3",
        )

    def live(
        self,
        *,
        tools: Sequence[ToolSpec],
        prompt_tail: Ids,
        stops: Sequence[str],
        calls_as_text: bool = False,
    ) -> LiveReader | None:
        """Return a reader of one reply while it is sampled; `None` = replies of this model family
        can be parsed at the end only.

        The text that it returns is always a beginning of what `parse` will return.
        """
        if self._marks is None:
            return None
        listed = chat_tools(tools)
        made: list[str] = []

        def read(region: list[int]) -> list[ToolCall]:
            known = iter(made)
            calls = read_calls(
                self._parser,
                region,
                tools=listed,
                new_id=lambda: next(known, None) or self._new_call_id(),
            )
            made[:] = [call.id or "" for call in calls]
            return calls

        return LiveReader(
            replace(self._marks, openers=frozenset()) if calls_as_text else self._marks,
            self._tokens,
            thinking=self._leaves_reasoning_open(prompt_tail.tolist()),
            stop_ids=frozenset(self._parser.get_stop_token_ids()),
            stops=[stop for stop in stops if stop],
            read_calls=read,
        )

    def _leaves_reasoning_open(self, prompt_tail: list[int]) -> bool:
        """Return whether the parser reads an ordinary word after this prompt as reasoning."""
        word = self._tokens.encode("x")
        parsed = self._parser.parse_response(word, tools=None, prompt_ids=prompt_tail)
        return not parsed.content

    def decode(self, ids: Ids) -> str:
        """Return the text of ids, control tokens shown."""
        return self._tokens.decode(ids.tolist())

    def call_grammar(self, tools: Sequence[ToolSpec], choice: str) -> JSON | None:
        """Return a structural tag (grammar) that forces the tool call that `choice` demands.

        `None` = the form of this model family's calls is not known.
        """
        template = str(self._tokens.fast.chat_template or "")
        return call_grammar(self.family or tool_parser_of(template), tools, choice)

    def text_ids(self, text: str) -> Ids:
        """Tokenise a text without a template; control tokens that it spells are plain text."""
        return _array(self._tokens.encode(self._tokens.escape(text)))

    def apart(self, text: str) -> str:
        """Return the text changed so that a server that tokenises it finds no control token
        in it.
        """
        return self._tokens.apart(text)

    def template_args(self, request: ModelRequest) -> Hashable:
        """Return the request's settings that shape its prompt besides messages and tools:
        thinking.
        """
        return self._thinking if request.thinking is None else request.thinking

    def _family_for(self, *, thinking: bool | None) -> Family | PlaceholderFamily | None:
        """Return the family's renderer with thinking on, off, or as the family has it."""
        if self.family is None:
            return None
        if thinking not in self._families:
            made = make_family(self.family, self._tokens, thinking=thinking, history=self._history)
            self._families[thinking] = with_placeholders(
                made, self._tokens, plain=self.family in PLAIN_FAMILIES
            )
        return self._families[thinking]


def _array(ids: list[int]) -> Ids:
    # A third of the time of `np.array`; read-only, so that it need not be copied to be kept.
    return np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

CALL_FAMILIES: Final = frozenset({"qwen3", "prime-qwen3", "qwen3-vl"})
"""Families, and the tool parser of templates like theirs, that write a call as one JSON object with
`name` and `arguments` between `<tool_call>` and `</tool_call>`, each on a line of its own."""


def call_grammar(form: str | None, tools: Sequence[ToolSpec], choice: str) -> JSON | None:
    """Return a structural tag (grammar) that forces the tool call that `choice` demands:
    `required`, or a tool's name.

    `form` is the model family's name, or that of the tool parser where there is no family. `None` =
    the form of its calls is not known.
    """
    offered = [tool for tool in tools if choice in ("required", tool.name)]
    if form not in CALL_FAMILIES or not offered:
        return None
    calls = {
        "type": "triggered_tags",
        "triggers": [_OPEN],
        "tags": [_tag(tool) for tool in offered],
        "at_least_one": True,
        "stop_after_first": False,
    }
    said = {"type": "any_text", "excludes": [_OPEN]}
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [said, calls]}}


def _tag(tool: ToolSpec) -> JSON:
    name = json.dumps(tool.name, ensure_ascii=False)
    schema = tool.parameters or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'{_OPEN}\n{{"name": {name}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": f"}}\n{_CLOSE}",
    }


# ---- messages as templates take them


Escape: TypeAlias = Callable[[str], str]


def chat_messages(
    messages: Sequence[Message],
    escape: Escape,
    *,
    objects: bool = False,
    media: Callable[[MediaPart], JSON] | None = None,
) -> list[JSON]:
    """Return messages in the form that chat templates take. `RenderError` names a part that is not
    text.

    `media` gives the form of such parts, for engines that take them; a reply never holds any.
    Arguments that are no JSON object stay the text that they are; with `objects`, for templates
    that take nothing else, they become the one argument of an object. Assistant messages that are
    one turn in pieces (some dialects give reasoning, text and calls as items) become one message,
    in their order.
    """
    chat: list[JSON] = []
    for index, message in enumerate(messages):
        parts, role = message.content, message.role
        content: str | list[JSON]
        if media is not None and role is not Role.ASSISTANT:
            content = _content(index, message, escape, media)
        elif len(parts) == 1 and type(parts[0]) is TextPart:
            content = escape(parts[0].text)
        else:
            content = escape(_text_of(index, message))
        if role is Role.ASSISTANT:
            turn = _assistant(message, content, escape, objects=objects)
            if chat and chat[-1]["role"] == "assistant" and _continues(chat[-1], turn):
                _merge(chat[-1], turn)
            else:
                chat.append(turn)
        elif role is Role.TOOL:
            chat.append(_result(message, content, escape))
        else:
            chat += ({"role": str(role), "content": content},)
    return chat


def server_messages(
    messages: Sequence[Message],
    *,
    escape: Escape = without_lone_surrogates,
    media: Callable[[MediaPart], JSON] | None = None,
) -> list[JSON]:
    """Return messages in the form that servers of OpenAI's chat route take: call arguments as text,
    tool results in the order of their calls.
    """
    chat = chat_messages(results_in_call_order(messages), escape, media=media)
    for call in (call for turn in chat for call in turn.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return chat


def _content(
    index: int,
    message: Message,
    escape: Escape,
    media: Callable[[MediaPart], JSON],
) -> str | list[JSON]:
    """Return the text of a message; with media, its parts in their order."""
    if not any(isinstance(part, MediaPart) for part in message.content):
        return escape(_text_of(index, message))
    shown: list[JSON] = []
    for part in message.content:
        text = part.text if isinstance(part, TextPart) else shown_block(part)
        if text is not None:
            shown.append({"type": "text", "text": escape(text)})
        elif isinstance(part, MediaPart):
            shown.append(media(part))
    return shown


def chat_tools(tools: Sequence[ToolSpec], escape: Escape | None = None) -> list[JSON] | None:
    """Return tools in the form that chat templates take; `None` if there are none.

    Without `escape`, for parsing only. The caller must not change the list.
    """
    listed = _listed(tools)
    if not listed:
        return None
    return listed if escape is None else [_escaped(tool, escape) for tool in listed]


@once_per_tools
def _listed(tools: Sequence[ToolSpec]) -> list[JSON]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def _text_of(index: int, message: Message) -> str:
    texts: list[str] = []
    for position, part in enumerate(message.content):
        text = part.text if isinstance(part, TextPart) else shown_block(part)
        if text is None:
            raise RenderError(
                f"{message.role.value} message {index} holds {_named(part)} "
                f"(part {position}); prompts of this tokenizer are text only"
            )
        texts.append(text)
    return "".join(texts)


def _named(part: Part) -> str:
    name = block_name(part)
    if name is not None:
        return f"a file of the provider's in a block of type {name!r}"
    return part.media_type if isinstance(part, MediaPart) else "text"


def _assistant(
    message: Message, content: str | list[JSON], escape: Escape, *, objects: bool
) -> JSON:
    turn: JSON = {"role": "assistant", "content": content}
    if message.reasoning:
        turn["reasoning_content"] = escape(message.reasoning)
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, escape, objects=objects) for call in message.tool_calls]
    return turn


def _call(call: ToolCall, escape: Escape, *, objects: bool) -> JSON:
    arguments = _arguments(call, escape)
    if objects and isinstance(arguments, str):
        arguments = {"arguments": arguments}
    function = {"name": escape(call.name), "arguments": arguments}
    return {"type": "function", "id": escape(call.id or ""), "function": function}


def _arguments(call: ToolCall, escape: Escape) -> JSON | str:
    """Return an object where the text is one (as serving engines do), else the text itself."""
    if call.custom:  # the model was shown a function with the one argument `input`
        return {"input": escape(call.arguments)}
    try:
        value = json.loads(call.arguments or "{}")
        shown = _escaped(value, escape) if isinstance(value, dict) else escape(call.arguments)
    except (ValueError, RecursionError):
        return escape(call.arguments)
    return {} if value is None else shown


def _result(message: Message, content: str | list[JSON], escape: Escape) -> JSON:
    result: JSON = {"role": "tool", "content": content}
    if message.tool_call_id is not None:
        result["tool_call_id"] = escape(message.tool_call_id)
    if message.name is not None:
        result["name"] = escape(message.name)
    return result


def _continues(turn: JSON, piece: JSON) -> bool:
    """Return whether a piece continues a turn: reasoning comes first, then text, then calls."""
    if "tool_calls" in turn:
        return set(piece) == {"role", "content", "tool_calls"} and not piece["content"]
    return not turn["content"] or not (piece["content"] or "reasoning_content" in piece)


def _merge(turn: JSON, piece: JSON) -> None:
    turn["content"] += piece["content"]
    if "reasoning_content" in piece:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + piece["reasoning_content"]
    if "tool_calls" in piece:
        turn["tool_calls"] = turn.get("tool_calls", []) + piece["tool_calls"]


def _escaped(value: Any, escape: Escape) -> Any:  # noqa: ANN401 - any JSON value
    """Return the same JSON value with every string in it escaped, keys too."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(key): _escaped(item, escape) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item, escape) for item in value]
    return value

"""Law 1 through every dialect: whatever is sampled, the next prompt begins with those very ids.

A small harness per dialect keeps a history as its provider's clients do: it echoes what it was
given (arguments re-serialised, ids as issued), answers the calls, and asks on.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.base import ReplyHead
from bridle.prompting.canonical import (
    AtomKind,
    AtomMemo,
    answer_atoms,
    canonical,
    messages_after,
)
from bridle.prompting.conversation import Conversation, PlacementKind
from bridle.prompting.prompt import PromptIds
from bridle.prompting.renderer import load_renderer
from bridle.types import JSON, FinishReason, Usage

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}


class ChatHarness:
    """OpenAI Chat, as a JavaScript client keeps it: arguments compact, no content where empty."""

    path = "/v1/chat/completions"
    history: list[JSON]

    def __init__(self):
        self.history = [{"role": "system", "content": "s"}, {"role": "user", "content": "go"}]

    def body(self):
        function = {"name": "bash", "description": "Run.", "parameters": SCHEMA}
        tools = [{"type": "function", "function": function}]
        return {"model": "m", "messages": self.history, "tools": tools}

    def take(self, reply, more):
        message = reply["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        echo = {"role": "assistant", "content": message["content"] or None}
        if calls:
            echo["tool_calls"] = [
                {**c, "function": {**c["function"], "arguments": self.again(c)}} for c in calls
            ]
        self.history.append(echo)
        for one in calls:
            self.history.append({"role": "tool", "tool_call_id": one["id"], "content": more})
        self.history.append({"role": "user", "content": more})

    def again(self, one):
        text = one["function"]["arguments"]
        return json.dumps(json.loads(text), separators=(",", ":"))


class MessagesHarness(ChatHarness):
    """Anthropic Messages: blocks come back as they were, results and words in one user message."""

    path = "/v1/messages"

    def __init__(self):
        self.history = [{"role": "user", "content": "go"}]

    def body(self):
        tools = [{"name": "bash", "description": "Run.", "input_schema": SCHEMA}]
        return {
            "model": "m",
            "max_tokens": 10,
            "system": "s",
            "messages": self.history,
            "tools": tools,
        }

    def take(self, reply, more):
        blocks = reply["content"]
        if blocks:
            self.history.append({"role": "assistant", "content": blocks})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": more}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        text = {"type": "text", "text": more, "cache_control": {"type": "ephemeral"}}
        self.history.append({"role": "user", "content": [*results, text]})


class ResponsesHarness(ChatHarness):
    """OpenAI Responses without a store: every output item comes back."""

    path = "/v1/responses"

    def __init__(self):
        self.history = [{"role": "user", "content": "go"}]

    def body(self):
        tools = [{"type": "function", "name": "bash", "description": "Run.", "parameters": SCHEMA}]
        return {"model": "m", "instructions": "s", "input": self.history, "tools": tools}

    def take(self, reply, more):
        for item in reply["output"]:
            self.history.append(item)
        for item in reply["output"]:
            if item["type"] == "function_call":
                answer = {"type": "function_call_output", "call_id": item["call_id"]}
                self.history.append({**answer, "output": more})
        self.history.append({"role": "user", "content": [{"type": "input_text", "text": more}]})


class GoogleHarness(ChatHarness):
    """Google: the content comes back, thoughts left out as Gemini CLI does."""

    path = "/v1beta/models/m:generateContent"

    def __init__(self):
        self.history = [{"role": "user", "parts": [{"text": "go"}]}]

    def body(self):
        tools = [{"functionDeclarations": [{"name": "bash", "parameters": SCHEMA}]}]
        return {
            "systemInstruction": {"parts": [{"text": "s"}]},
            "contents": self.history,
            "tools": tools,
        }

    def take(self, reply, more):
        parts = [
            part
            for part in reply["candidates"][0]["content"].get("parts", [])
            if not part.get("thought")
        ]
        if parts:
            self.history.append({"role": "model", "parts": parts})
        answers = [
            {
                "functionResponse": {
                    **{k: v for k, v in part["functionCall"].items() if k in {"id", "name"}},
                    "response": {"output": more},
                }
            }
            for part in parts
            if "functionCall" in part
        ]
        self.history.append({"role": "user", "parts": [*answers, {"text": more}]})


HARNESSES = [ChatHarness, MessagesHarness, ResponsesHarness, GoogleHarness]

words = st.text(max_size=8)
calls = st.builds(
    lambda command, spaces: (
        f'<tool_call>\n{{"name":{spaces}"bash", "arguments": {spaces}{json.dumps(command)}}}'
        "\n</tool_call>"
    ),
    st.dictionaries(st.sampled_from(["command", "n", "é"]), words, max_size=2),
    st.sampled_from(["", " ", "\n  "]),
)
turns = st.builds(
    lambda thought, text, made, end: (
        (f"<think>\n{thought}\n</think>\n\n" if thought else "") + text + "\n".join(made) + end
    ),
    st.sampled_from(["", "hm", "so\n\nthen"]),
    words.filter(lambda text: "<" not in text),
    st.lists(calls, max_size=2),
    st.sampled_from(["<|im_end|>", "<|im_end|>", "", "<|endoftext|>"]),
)


class Session:
    """A gateway's work on calls, without sockets and stores."""

    def __init__(self, renderer, route):
        self.renderer, self.route, self.wire = renderer, route, DIALECTS[route.dialect]
        self.conversation, self.memo, self.spans = Conversation(), AtomMemo(), {}
        self.prompts = {}

    def ask(self, name, harness, sampled):
        """One exchange: its reply, its prompt, where it was placed, whether it says nothing."""
        request = self.wire.parse(self.route, json.dumps(harness.body()).encode(), self.spans)
        key = canonical(request, self.memo)
        placement = self.conversation.place(request, key)
        if placement.extend:
            before, output = self.prompts[placement.parent]
            new = messages_after(request.messages, placement.new_from)
            suffix = self.renderer.extend(before, output, new, request.tools, thinking=None)
            prompt = before.extend(output, suffix)
        else:
            ids = self.renderer.render(request.messages, request.tools, thinking=None)
            prompt = PromptIds.root(ids)
        self.conversation.begin(name, key)
        reply = self.renderer.parse(
            sampled,
            tools=request.tools,
            prompt_tail=prompt.tail(64),
            finish=FinishReason.STOP,
            stop_text=None,
        )
        body = self.wire.reply_json(request, ReplyHead(name * 24, "m", 1), reply, Usage(1, 1))
        shown = self.wire.reply_messages(body)
        issued = [c.id for m in shown for c in m.tool_calls if c.id] + [
            value for m in shown for value in m.issued_ids
        ]
        answer = answer_atoms(shown, request.tools)
        self.conversation.commit(name, key, answer, issued)
        self.prompts[name] = (prompt, sampled)
        silent = all(atom.kind is AtomKind.EVIDENCE for atom in answer)
        return json.loads(body), prompt, placement, silent


def check_prompts(renderer, encode, harness, sampled):
    """Each prompt begins with the one before and with what was sampled under it."""
    made = harness()
    route = recognise("POST", made.path, "", {})
    assert route is not None
    session = Session(renderer, route)
    path: list[int] = []
    after_silence = False
    for number, text in enumerate(sampled):
        output = encode(text)
        reply, prompt, placement, silent = session.ask(str(number), made, output)
        whole = prompt.array().tolist()
        if number and not after_silence:
            assert placement.kind is PlacementKind.CHILD
            assert placement.extend
            assert whole[: len(path)] == path
        path = whole + output.tolist()
        after_silence = silent
        made.take(reply, f"result {number}")


@pytest.mark.parametrize("harness", HARNESSES)
@given(sampled=st.lists(turns, min_size=2, max_size=5))
def test_each_prompt_begins_with_all_that_was_sampled_before(renderer, encode, harness, sampled):
    check_prompts(renderer, encode, harness, sampled)


@pytest.fixture(scope="module")
def qwen35(look_alike, tmp_path_factory):
    """A renderer of the family qwen3.5: its calls are XML, and its prompts open the thinking."""
    folder = tmp_path_factory.mktemp("qwen3.5")
    look_alike("qwen3.5")[0].fast.save_pretrained(folder)
    return load_renderer(str(folder), family="qwen3.5")


plain_words = words.filter(lambda text: "<" not in text)
xml_calls = st.dictionaries(st.sampled_from(["command", "n", "é"]), plain_words, max_size=2).map(
    lambda command: (
        "<tool_call>\n<function=bash>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in command.items())
        + "</function>\n</tool_call>"
    )
)
xml_turns = st.builds(
    lambda thought, text, made, end: f"{thought}\n</think>\n\n{text}" + "\n".join(made) + end,
    st.sampled_from(["", "hm", "so\n\nthen"]),
    plain_words,
    st.lists(xml_calls, max_size=2),
    st.sampled_from(["<|im_end|>", "<|im_end|>", "", "<|endoftext|>"]),
)


@pytest.mark.parametrize("harness", HARNESSES)
@given(sampled=st.lists(xml_turns, min_size=2, max_size=5))
def test_each_prompt_begins_with_all_sampled_before_with_opened_thinking_and_xml_calls(
    qwen35, harness, sampled
):
    def encode(text):
        return np.array(qwen35.tokenizer.encode(text), np.int32)

    check_prompts(qwen35, encode, harness, sampled)

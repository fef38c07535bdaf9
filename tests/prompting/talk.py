"""Short words for messages, and a session that plays exchanges against a `Conversation`."""

import json
from dataclasses import replace

from bridle.dialects.json_reader import content_digest
from bridle.prompting.canonical import AtomMemo, answer_atoms, canonical, joined_atoms
from bridle.prompting.conversation import Conversation
from bridle.types import (
    DeliveryState,
    Dialect,
    MediaPart,
    Message,
    ModelRequest,
    Role,
    Sampling,
    TextPart,
    ToolCall,
    ToolSpec,
)

BASH = ToolSpec("bash", "Run a command.", {"properties": {"command": {"type": "string"}}})
EDIT = ToolSpec("edit", "Edit.", {"properties": {"path": {}, "all": {"default": False}}})


def parts(*texts):
    return tuple(TextPart(text) if isinstance(text, str) else text for text in texts)


def system(*texts):
    return Message(Role.SYSTEM, parts(*texts))


def user(*texts):
    return Message(Role.USER, parts(*texts))


def call(call_id, arguments="{}", name="bash", **more):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(call_id, name, text, **more)


def said(*texts, calls=(), reasoning=None, issued=()):
    return Message(
        Role.ASSISTANT, parts(*texts), reasoning, tool_calls=tuple(calls), issued_ids=tuple(issued)
    )


def result(call_id, *texts, name=None):
    return Message(Role.TOOL, parts(*texts), tool_call_id=call_id, name=name)


def image(digest, media_type="image/png"):
    return MediaPart(media_type, digest, "data:")


def request(*messages, tools=(), dialect=Dialect.OPENAI_CHAT, spans=True, head=0, thinking=None):
    """A request with one span per message after the first `head`, as most dialects give it."""
    bodies = tuple(repr(message).encode() for message in messages[head:])
    made = ModelRequest(
        dialect, "m", messages, tuple(tools), Sampling(), stream=False, thinking=thinking
    )
    if not spans:
        return made
    return replace(
        made,
        message_spans=bodies,
        span_digests=tuple(map(content_digest, bodies)),
        span_lengths=(1,) * len(bodies),
        head_messages=head,
        tools_span=repr(tools).encode() if tools else None,
    )


class Talk:
    """One session's conversation; every request is normalised with its memo."""

    def __init__(self, dialect=Dialect.OPENAI_CHAT, **settings):
        self.conversation = Conversation(**settings)
        self.dialect = dialect
        self.memo = AtomMemo()

    def canonical(self, *messages, tools=()):
        return canonical(request(*messages, tools=tools, dialect=self.dialect), self.memo)

    def place(self, *messages, tools=(), template_args=None):
        asked = request(*messages, tools=tools, dialect=self.dialect)
        return self.conversation.place(
            asked, canonical(asked, self.memo), template_args=template_args
        )

    def begin(self, name, *messages, tools=()):
        self.place(*messages, tools=tools)
        self.conversation.begin(name, self.canonical(*messages, tools=tools))

    def commit(
        self,
        name,
        messages,
        answer,
        *,
        tools=(),
        template_args=None,
        state="delivered",
        begun=None,
        tokens=0,
    ):
        """`answer`: one assistant message or several; its ids are the ones that we issued.

        `begun` is the text of the last of `messages` where that is a prefill.
        """
        shown = answer if isinstance(answer, tuple) else (answer,)
        issued = [c.id for m in shown for c in m.tool_calls if c.id] + [
            i for m in shown for i in m.issued_ids
        ]
        self.conversation.commit(
            name,
            self.canonical(*messages, tools=tools),
            answer_atoms(shown, tools),
            issued,
            joined=joined_atoms(replace(request(*messages, tools=tools), prefill=begun), shown),
            template_args=template_args,
            tokens=tokens,
        )
        if state:
            self.conversation.mark(name, DeliveryState(state))

    def exchange(self, name, messages, answer, **more):
        """Place, begin, commit and deliver one exchange."""
        self.begin(name, *messages, tools=more.get("tools", ()))
        self.commit(name, messages, answer, **more)

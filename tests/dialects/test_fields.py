import json
from typing import Any

import pytest
from tests.dialects.exchange import parse
from tests.dialects.golden import FOLDERS, GOLDEN, PATHS

from bridle.dialects import DIALECTS, recognise
from bridle.dialects.base import Route, RouteKind
from bridle.dialects.fields import members, table, unknown_betas
from bridle.dialects.google import CONFIG_FIELDS
from bridle.dialects.ids import signature
from bridle.dialects.media import block_name
from bridle.dialects.openai_chat import OpenAIChat
from bridle.dialects.openai_responses import TEXT_FIELDS
from bridle.errors import RequestError
from bridle.types import Dialect

BODIES: dict[Dialect, dict[str, Any]] = {
    Dialect.ANTHROPIC: {"model": "m", "messages": [{"role": "user", "content": "go"}]},
    Dialect.OPENAI_CHAT: {"model": "m", "messages": [{"role": "user", "content": "go"}]},
    Dialect.OPENAI_RESPONSES: {"model": "m", "input": "go"},
    Dialect.GOOGLE: {"contents": [{"parts": [{"text": "go"}]}]},
}


def treatment(dialect, **fields):
    """Return what of a request with these fields nobody sees to."""
    extra = parse(dialect, BODIES[dialect] | fields).extra
    return extra.get("unenforced", []), extra.get("unknown", [])


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_field_and_block_that_real_clients_send_is_known_to_its_dialect(folder):
    place = GOLDEN / folder
    dialect = Dialect(folder.split("/")[0])
    path = json.loads((place / "turn.json").read_text()).get("path", PATHS.get(dialect))
    route = recognise("POST", path.partition("?")[0], "", {})
    assert route is not None
    request = DIALECTS[dialect].parse(route, (place / "request.json").read_bytes(), {})
    assert request.extra.get("unknown", []) == []
    names = {name for message in request.messages for name in message.unknown}
    foreign = {"redacted_thinking.data", "parts.thoughtSignature"}
    assert names <= foreign, "another provider's, in a made-up turn"
    blocks = {block_name(part) for message in request.messages for part in message.content}
    assert blocks <= {None} or "media" in folder, "those folders hold blocks that we made up"


@pytest.mark.parametrize("dialect", BODIES)
def test_an_unknown_request_field_is_accepted_and_reported(dialect):
    assert treatment(dialect, frobnicate=True, nothing=None) == ([], ["frobnicate"])


def test_an_unknown_field_of_google_s_configuration_is_named_with_its_place():
    config = {"top_k": 3, "frob_nicate": 1, "speechConfig": {"a": 1}}
    assert treatment(Dialect.GOOGLE, generation_config=config) == (
        ["generationConfig.speechConfig"],
        ["generationConfig.frobNicate"],
    )


@pytest.mark.parametrize(
    ("dialect", "field", "value"),
    [
        (Dialect.ANTHROPIC, "mcp_servers", [{"type": "url", "url": "https://example.org"}]),
        (Dialect.ANTHROPIC, "container", "container_1"),
        (Dialect.OPENAI_CHAT, "documents", [{"text": "a"}]),
        (Dialect.OPENAI_RESPONSES, "conversation", "conv_1"),
        (Dialect.OPENAI_RESPONSES, "prompt", {"id": "pmpt_1"}),
        (Dialect.OPENAI_RESPONSES, "generate", False),
        (Dialect.GOOGLE, "cachedContent", "cachedContents/1"),
    ],
)
def test_what_only_the_provider_can_serve_is_refused_by_name(dialect, field, value):
    with pytest.raises(RequestError, match=field) as refused:
        treatment(dialect, **{field: value})
    assert refused.value.param == field
    assert treatment(dialect, **{field: None}) == ([], [])


KEEP = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
CLEAR = {"edits": [{"type": "clear_tool_uses_20250919"}]}


@pytest.mark.parametrize(
    ("dialect", "fields", "unenforced"),
    [
        (Dialect.ANTHROPIC, {"context_management": KEEP}, []),
        (Dialect.ANTHROPIC, {"context_management": CLEAR}, ["context_management"]),
        (
            Dialect.ANTHROPIC,
            {"output_config": {"format": {"type": "grammar"}}},
            ["output_config.format"],
        ),
        (Dialect.OPENAI_RESPONSES, {"truncation": "disabled", "generate": True}, []),
        (Dialect.OPENAI_RESPONSES, {"truncation": "auto"}, ["truncation"]),
        (Dialect.OPENAI_RESPONSES, {"text": {"format": {"type": "grammar"}}}, ["text.format"]),
        (Dialect.OPENAI_RESPONSES, {"text": {"verbosity": "low"}}, ["text.verbosity"]),
        (Dialect.OPENAI_RESPONSES, {"text": {"verbosity": "medium"}}, []),
        (Dialect.OPENAI_CHAT, {"verbosity": "high"}, ["verbosity"]),
        (Dialect.OPENAI_CHAT, {"web_search_options": {}}, ["web_search_options"]),
        (Dialect.OPENAI_CHAT, {"web_search_options": None}, []),
        (Dialect.OPENAI_CHAT, {"guided_json": {}, "top_a": 0, "length_penalty": 1.0}, []),
        (
            Dialect.OPENAI_CHAT,
            {"length_penalty": 2, "typical_p": 0.1, "guided_regex": "a"},
            ["length_penalty", "typical_p", "guided_regex"],
        ),
        (Dialect.OPENAI_CHAT, {"response_format": {"type": "grammar"}}, ["response_format"]),
        (
            Dialect.GOOGLE,
            {"generationConfig": {"responseMimeType": "text/x.enum"}},
            ["generationConfig.responseMimeType"],
        ),
        (Dialect.GOOGLE, {"generationConfig": {"responseModalities": ["TEXT"]}}, []),
    ],
)
def test_unenforced_fields_are_named(dialect, fields, unenforced):
    assert treatment(dialect, **fields) == (unenforced, [])


def inside(dialect, *items):
    """The names of what in these messages is not known."""
    field = {Dialect.OPENAI_RESPONSES: "input", Dialect.GOOGLE: "contents"}.get(dialect, "messages")
    read = parse(dialect, BODIES[dialect] | {field: list(items)}).messages
    return [name for message in read for name in message.unknown]


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("dialect", "item", "unknown"),
    [
        (
            Dialect.ANTHROPIC,
            {
                "role": "user",
                "content": [{"type": "text", "text": "a", "mood": 1, "cache_control": {"a": 1}}],
            },
            ["text.mood"],
        ),
        (Dialect.OPENAI_CHAT, {"role": "user", "content": "a", "mood": "blue"}, ["message.mood"]),
        (
            Dialect.OPENAI_CHAT,
            {"role": "assistant", "tool_calls": [CALL | {"extra_content": {"sign": "a"}}]},
            ["function.extra_content"],
        ),
        (
            Dialect.OPENAI_RESPONSES,
            {"type": "function_call_output", "call_id": "c1", "output": "a", "mood": 1},
            ["function_call_output.mood"],
        ),
        (
            Dialect.OPENAI_RESPONSES,
            {"role": "user", "content": [{"type": "input_text", "text": "a", "mood": 1}]},
            ["input_text.mood"],
        ),
        (
            Dialect.GOOGLE,
            {"parts": [{"inline_data": {"mime_type": "image/png", "data": "YQ==", "mood": 1}}]},
            ["inlineData.mood"],
        ),
        (
            Dialect.GOOGLE,
            {"parts": [{"text": "a", "videoMetadata": {"fps": 1}}]},
            ["parts.videoMetadata"],
        ),
    ],
)
def test_an_unknown_field_inside_a_message_is_named(dialect, item, unknown):
    assert inside(dialect, item) == unknown


def called(mark):
    """A model's turn with a call that bears a signature."""
    call = {"functionCall": {"name": "look", "args": {}}, "thoughtSignature": mark}
    return {"role": "model", "parts": [call]}


@pytest.mark.parametrize(
    ("dialect", "item", "unknown"),
    [
        (
            Dialect.OPENAI_RESPONSES,
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAB"},
            ["reasoning.encrypted_content"],
        ),
        (
            Dialect.OPENAI_RESPONSES,
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "Hm."}],
                "encrypted_content": "gAAAAB",
            },
            [],
        ),
        (
            Dialect.OPENAI_RESPONSES,
            {"type": "reasoning", "summary": [], "encrypted_content": signature("0" * 24, 0)},
            [],
        ),
        (
            Dialect.ANTHROPIC,
            {
                "role": "assistant",
                "content": [{"type": "redacted_thinking", "data": "EmwKA"}, {"type": "text"}],
            },
            ["redacted_thinking.data"],
        ),
        (
            Dialect.ANTHROPIC,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "", "signature": "EmwKA"}],
            },
            ["thinking.signature"],
        ),
        (Dialect.GOOGLE, called("Q2hlY2sgdGhl-W1"), ["parts.thoughtSignature"]),
        (Dialect.GOOGLE, called(signature("0" * 24, 0)), []),
        (Dialect.GOOGLE, called("skip_thought_signature_validator"), []),
        (Dialect.GOOGLE, called("c2tpcF90aG91Z2h0X3NpZ25hdHVyZV92YWxpZGF0b3I="), []),
        (
            Dialect.GOOGLE,
            {
                "role": "model",
                "parts": [{"text": "Hm.", "thought": True, "thoughtSignature": "QQ"}],
            },
            [],
        ),
    ],
)
def test_reasoning_that_only_another_provider_can_read_is_named(dialect, item, unknown):
    assert inside(dialect, item) == unknown


def test_field_tables_hold_only_identifiers():
    for fields in (*(wire.fields for wire in DIALECTS.values()), CONFIG_FIELDS, TEXT_FIELDS):
        assert all(name.isidentifier() for name in fields)


class Moody(OpenAIChat):
    """Chat Completions with a field of a request and one of a message beside it."""

    fields = OpenAIChat.fields | table(harmless="mood")
    members = members("", message="role content tone")


def test_the_fields_that_a_dialect_knows_stand_in_its_own_class():
    body = {
        "model": "m",
        "mood": "good",
        "manner": "mild",
        "messages": [{"role": "user", "content": "go", "tone": "low", "pitch": "high"}],
    }
    request = Moody().parse(
        Route(Dialect.OPENAI_CHAT, RouteKind.GENERATE), json.dumps(body).encode(), {}
    )
    assert request.extra["unknown"] == ["manner"]
    assert request.messages[0].unknown == ("message.pitch",)


def test_betas_are_known_by_their_names_without_dates():
    headers = {
        "anthropic-beta": "claude-code-20250219, interleaved-thinking-2025-05-14,odd-2030-01-01",
        "openai-beta": "responses=experimental",
    }
    assert unknown_betas(headers) == ("odd-2030-01-01", "responses=experimental")
    assert unknown_betas({"openai-beta": "responses_websockets=2026-02-06"}) == ()
    assert unknown_betas({}) == ()

import json

import pytest
from tests.dialects.exchange import parse

from bridle.harness_rules import HARNESS_RULES, KIND_RULES, KindRule, kind_of
from bridle.types import Dialect, Kind

TOOL = {"type": "function", "function": {"name": "f"}}


def chat(system="You are an agent.", user="go", tools=(TOOL,), **fields):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": "m", "messages": messages, **fields}
    return parse(Dialect.OPENAI_CHAT, {**body, "tools": list(tools)})


def messages(**fields):
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return parse(Dialect.ANTHROPIC, {**body, **fields})


def responses(text):
    body = {"model": "m", "input": text, "reasoning": {"effort": "low", "summary": "auto"}}
    return parse(Dialect.OPENAI_RESPONSES, body)


def schema(*names):
    return {
        "type": "json_schema",
        "json_schema": {"schema": {"properties": {name: {} for name in names}}},
    }


def google(**fields):
    contents = [{"role": "user", "parts": [{"text": "hi"}]}]
    return parse(Dialect.GOOGLE, {"contents": contents, **fields})


def google_router():
    """One JSON call, as Gemini CLI asks for a model."""
    form = {"type": "OBJECT", "properties": {"model_choice": {"type": "STRING"}}}
    config = {"responseMimeType": "application/json", "responseJsonSchema": form}
    return google(generationConfig=config)


def google_search():
    """A search as a request of its own, as Gemini CLI makes it."""
    return google(tools=[{"googleSearch": {}}])


def test_a_call_without_marks_is_an_agent_call():
    for request in (
        chat(),
        chat(tools=()),
        messages(),
        chat(tools=(), response_format=schema("a")),
        chat(system="You also write Git commit messages."),
    ):
        assert kind_of({}, request) == (Kind.AGENT, None)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-claude-code-agent-id": "a1"},
        {"x-openai-subagent": "collab_spawn"},
        {"x-codex-parent-thread-id": "t"},
        {"x-parent-session-id": "s"},
        {"x-interaction-type": "conversation-subagent"},
    ],
)
def test_a_subagent_header_makes_the_call_a_subagent_call(headers):
    assert kind_of(headers, chat()) == (Kind.SUBAGENT, "subagent_header")


@pytest.mark.parametrize(
    ("mark", "kind"),
    [
        (" cc_is_subagent=true;", Kind.SUBAGENT),
        (" cc_is_subagent=false;", Kind.AGENT),
        ("", Kind.AGENT),
    ],
)
def test_subagent_flag_in_claude_code_s_billing_block_decides_the_kind(mark, kind):
    block = {"type": "text", "text": f"x-anthropic-billing-header: v=1;{mark}"}
    assert kind_of({}, messages(system=[block]))[0] is kind


@pytest.mark.parametrize(
    "request_",
    [
        chat(user="This is a CONTEXT CHECKPOINT COMPACTION."),
        chat(user="CRITICAL: Respond with TEXT ONLY. Summarise."),
        chat(user="Please create a detailed summary of all."),
        chat(system="Write <state_snapshot> tags.", tools=()),
        chat(user="End with <state_snapshot>.", tools=()),
        chat(system="You are tasked with summarizing conversations.", tools=()),
        chat(system="Be a context summarization agent.", tools=()),
        chat(system="Write a context-aware state summary.", tools=()),
        chat(system="Summarize the provided coding session.", tools=()),
        chat(user="Be the component that summarizes; <state_snapshot>."),
        chat(user="Be a summarization agent creating a context checkpoint.", tools=()),
        parse(
            Dialect.OPENAI_RESPONSES,
            {
                "model": "m",
                "input": [{"role": "user", "content": "x"}, {"type": "compaction_trigger"}],
            },
        ),
    ],
)
def test_a_request_for_a_context_summary_is_a_compaction_call(request_):
    headers = {"x-openai-subagent": "collab_spawn"}
    assert kind_of(headers, request_, "codex")[0] is Kind.COMPACTION


@pytest.mark.parametrize(
    "request_",
    [
        chat(system="A context summarization agent may follow you."),
        chat(user="<state_snapshot>what was done</state_snapshot> Go on."),
    ],
)
def test_a_conversation_that_mentions_summaries_is_no_compaction(request_):
    assert kind_of({}, request_, "gemini_cli") == (Kind.AGENT, None)


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}, Kind.COMPACTION),
        ({"x-openai-subagent": "compact"}, Kind.COMPACTION),
        ({"x-codex-turn-metadata": json.dumps({"request_kind": "turn"})}, Kind.AGENT),
        ({"x-codex-turn-metadata": json.dumps({"request_kind": 7})}, Kind.AGENT),
        ({"x-codex-turn-metadata": "[1]"}, Kind.AGENT),
        ({"x-codex-turn-metadata": "no json"}, Kind.AGENT),
        ({"x-openai-subagent": "review"}, Kind.AGENT),
    ],
)
def test_codex_turn_metadata_decides_the_kind(headers, kind):
    assert kind_of(headers, chat())[0] is kind


@pytest.mark.parametrize(
    ("request_", "rule"),
    [
        (chat(tools=(), response_format=schema("title")), "title"),
        (chat(system="You are a title generator.", tools=()), "title"),
        (chat(tools=(), response_format=schema("reasoning", "model_choice")), "router"),
        (chat(tools=(), response_format=schema("reasoning", "next_speaker")), "router"),
        (google_router(), "router"),
        (chat(system="You are the managed memory extraction agent of a tool."), "memory"),
        (chat(user="You do a managed memory dream."), "memory"),
        (chat(system="You write short Git commit messages.", tools=()), "commit_message"),
        (messages(max_tokens=1), "quota_probe"),
        (chat(system="Generate concise conversation titles.", tools=()), "conversation_name"),
        (responses("Please say 'hello, world'"), "summaries_probe"),
    ],
)
def test_a_side_call_is_recognised_for_the_harnesses_that_make_it_only(request_, rule):
    senders = [
        name for name, row in HARNESS_RULES.items() if rule in {one.name for one in row.kinds}
    ]
    assert senders
    for harness in senders:
        assert kind_of({}, request_, harness) == (Kind.SIDE, rule)
    for other in (None, "mini_swe_agent", "my_module:MyAgent"):
        assert kind_of({"user-agent": "OpenAI/Python 2.1"}, request_, other)[0] is Kind.AGENT


def test_a_user_agent_names_the_harness_where_the_session_does_not():
    title = chat(system="You are a title generator.", tools=())
    for agent, kind in (
        ("claude-cli/2.1.0 (external, cli)", Kind.SIDE),
        ("opencode/1.0", Kind.SIDE),
        ("OpenAI/JS 5.20.1", Kind.AGENT),
    ):
        assert kind_of({"user-agent": agent}, title, "command")[0] is kind


@pytest.mark.parametrize(
    ("agent", "request_"),
    [
        ("GeminiCLI/0.61.0", google_search()),
        (
            "claude-cli/2.1.332 (external, cli)",
            messages(tools=[{"type": "web_search_20250305", "name": "web_search"}]),
        ),
    ],
)
def test_a_search_request_is_a_side_call_of_claude_code_and_gemini_cli_only(agent, request_):
    assert kind_of({"user-agent": agent}, request_) == (Kind.SIDE, "search")
    assert kind_of({"user-agent": "python-httpx/1"}, request_) == (Kind.AGENT, None)


DECLARED = {
    "system_contains": ("You name conversations", "You are an agent"),
    "last_user_contains": ("name this", "nothing of it"),
    "model": ("small-*", "large-*"),
    "user_agent": ("myagent/", "other/"),
}


def test_a_declared_kind_rule_applies_only_if_all_of_its_conditions_match():
    request = chat(system="You name conversations.", user="Please name this: x", model="small-1")
    headers = {"user-agent": "MyAgent/1.0"}
    marks = {name: fits for name, (fits, _) in DECLARED.items()}
    names = KindRule.declared("names", Kind.SIDE, **marks)
    assert kind_of(headers, request, "command", (names,)) == (Kind.SIDE, "names")
    for name, (_, other) in DECLARED.items():
        one_off = KindRule.declared("names", Kind.SIDE, **{**marks, name: other})
        assert kind_of(headers, request, "command", (one_off,)) == (Kind.AGENT, None)
        alone = KindRule.declared("alone", Kind.SIDE, **{name: marks[name]})
        assert kind_of(headers, request, "command", (alone,)) == (Kind.SIDE, "alone")


def test_a_declared_kind_rule_takes_precedence_over_packaged_rules():
    title = chat(tools=(), response_format=schema("title"))
    assert kind_of({}, title, "opencode")[0] is Kind.SIDE
    kept = KindRule.declared("kept", Kind.AGENT, model="*")
    assert kind_of({}, title, "opencode", (kept,)) == (Kind.AGENT, "kept")


@pytest.mark.parametrize("harness", ["command", "function", "mini_swe_agent", None])
@pytest.mark.parametrize(
    "task",
    [
        chat(system="You write short Git commit messages.", tools=()),
        chat(system="Generate concise conversation titles.", tools=()),
        chat(tools=(), response_format=schema("title")),
        responses("Please say 'hello, world'"),
    ],
)
def test_a_task_that_looks_like_another_harness_side_call_is_an_agent_call(task, harness):
    assert kind_of({"user-agent": "OpenAI/Python 2.1"}, task, harness) == (Kind.AGENT, None)


def test_text_in_a_tool_result_does_not_decide_the_kind():
    body = {
        "model": "m",
        "messages": [
            {"role": "tool", "tool_call_id": "1", "content": "CONTEXT CHECKPOINT COMPACTION"}
        ],
    }
    assert kind_of({}, parse(Dialect.OPENAI_CHAT, body)) == (Kind.AGENT, None)


def test_kind_rule_names_are_unique_and_every_rule_is_used_by_a_harness():
    assert len({rule.name for rule in KIND_RULES}) == len(KIND_RULES)
    named = {rule for row in HARNESS_RULES.values() for rule in row.kinds}
    assert named == set(KIND_RULES)


def test_only_harnesses_with_summary_texts_have_the_summary_request_rule():
    for row in HARNESS_RULES.values():
        asks = bool(row.summary_requests or row.summary_prompts)
        asks = asks or row is HARNESS_RULES["copilot"]
        assert asks == ("summary_request" in {rule.name for rule in row.kinds})

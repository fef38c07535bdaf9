import asyncio
import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.engines.base import CutError, Engine, GenerateRequest, Versioned
from bridle.engines.ids import ArrayIds, TextIds
from bridle.errors import ConfigError, ContextOverflowError, EngineError
from bridle.scripted.engine import ScriptedEngine, find_shell, scripted_logprobs, shell_arguments
from bridle.scripted.script import spell_call
from bridle.scripted.tokenizer import load_tokenizer
from bridle.testing import scripted_engine
from bridle.types import FinishReason, Sampling, VersionSpan

TOKENIZER = load_tokenizer(None)
USER = {"role": "user", "content": "hi"}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}},
                       "required": ["command"]},
    },
}  # fmt: skip


def call(messages=(USER,), tools=None, *, bare=True, held="", **fields):
    """A request; `bare` = ids only, as over a token route."""
    arguments = fields.pop("arguments", {})
    text = TOKENIZER.render(list(messages), tools, arguments=arguments) + held
    fields.setdefault("sampling", Sampling(temperature=1.0))
    fields.setdefault("request_id", "r")
    shown = {} if bare else {"messages": list(messages), "tools": tools}
    return GenerateRequest(prompt=ArrayIds(TOKENIZER.encode(text)), **shown, **fields)


def letters(text):
    """Ids of a text, letter by letter: not how the tokenizer cuts it."""
    return [int(TOKENIZER.encode(letter)[0]) for letter in text]


def bash(command):
    return spell_call("bash", {"command": command})


async def play(engine, request):
    return [chunk async for chunk in engine.generate(request)]


async def text_of(engine, request):
    chunks = await play(engine, request)
    return TOKENIZER.decode(np.concatenate([chunk.output_ids for chunk in chunks]))


async def test_a_scripted_turn_is_sampled_in_the_model_family_s_format_with_its_end_token():
    engine = scripted_engine(
        [
            {
                "reasoning": "hm",
                "content": "Hi.",
                "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
            }
        ]
    )
    (chunk,) = await play(engine, call())
    assert TOKENIZER.decode(chunk.output_ids) == (
        "<think>\nhm\n</think>\n\nHi.\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )
    assert chunk.finish_reason is FinishReason.STOP
    assert chunk.output_ids.dtype == np.int32
    assert chunk.versions == (VersionSpan(0, 0, len(chunk.output_ids)),)
    assert json.loads(chunk.prompt_ids_json) == call().prompt.array().tolist()


@pytest.mark.parametrize("bare", [True, False])
async def test_prompts_with_and_without_messages_select_the_same_scripted_turn(bare):
    engine = scripted_engine(
        [{"content": "first"}, {"shell": ["ls", "pwd"]}, {"content": "end"}],
        conversations=[{"when": {"user_contains": "title", "system_contains": "kind",
                                 "tools_include": ["bash"]}, "turns": [{"content": "A title"}]}],
    )  # fmt: skip
    system, ask = {"role": "system", "content": "be kind"}, {"role": "user", "content": "a title?"}
    answer, result = {"role": "assistant", "content": "x"}, {"role": "tool", "content": "title"}
    cases = [
        (([USER], None), "first<|im_end|>"),
        (([USER, answer, result], [BASH]), f"{bash('ls')}\n{bash('pwd')}<|im_end|>"),
        (([USER, answer, result, answer], [BASH]), "end<|im_end|>"),
        (([USER, answer, result, answer, result, answer], [BASH]), "end<|im_end|>"),
        (([system, ask], [BASH]), "A title<|im_end|>"),
        (([system, ask], None), "first<|im_end|>"),
    ]  # fmt: skip
    for (messages, tools), expected in cases:
        assert await text_of(engine, call(messages, tools, bare=bare)) == expected


async def test_a_conversation_is_selected_by_the_requested_model():
    engine = scripted_engine(
        [{"content": "a"}], conversations=[{"when": {"model": "x"}, "turns": [{"content": "b"}]}]
    )
    assert await text_of(engine, call(model="x")) == "b<|im_end|>"
    assert await text_of(engine, call()) == "a<|im_end|>"


async def test_a_shell_turn_without_a_shell_tool_fails_with_the_request_s_tools():
    edit = {"type": "function", "function": {"name": "edit", "parameters": {}}}
    with pytest.raises(EngineError, match=r"none of the request's tools.*\['edit'\]"):
        await play(scripted_engine([{"shell": ["ls"]}]), call(tools=[edit]))


async def test_raw_text_and_scripted_token_ids_are_sampled_unchanged():
    engine = scripted_engine([{"raw": "<tool_call>\n{broken"}])
    assert await text_of(engine, call()) == "<tool_call>\n{broken<|im_end|>"
    forced = letters("the end")
    assert forced != TOKENIZER.encode("the end").tolist()
    (chunk,) = await play(scripted_engine([{"token_ids": forced, "content": "the end"}]), call())
    assert chunk.output_ids.tolist() == [*forced, TOKENIZER.end_id]
    ended = [*forced, TOKENIZER.end_id]
    (chunk,) = await play(scripted_engine([{"token_ids": ended}]), call())
    assert chunk.output_ids.tolist() == ended


async def test_a_scripted_reply_with_finish_length_has_no_end_token():
    (chunk,) = await play(scripted_engine([{"content": "half", "finish": "length"}]), call())
    assert (TOKENIZER.decode(chunk.output_ids), chunk.finish_reason) == (
        "half",
        FinishReason.LENGTH,
    )


async def test_an_empty_scripted_turn_is_an_end_token():
    (chunk,) = await play(scripted_engine([{}]), call())
    assert chunk.output_ids.tolist() == [TOKENIZER.end_id]
    (chunk,) = await play(scripted_engine([{"finish": "length"}]), call())
    assert (len(chunk.output_ids), chunk.versions) == (0, ())


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_scripted_logprobs_are_negative_and_depend_on_the_token_id_only(ids):
    whole = scripted_logprobs(np.array(ids, dtype=np.int32))
    assert whole.dtype == np.float32
    assert (whole < 0).all()
    assert (whole > -5).all()
    for one, value in zip(ids, whole, strict=True):
        assert scripted_logprobs(np.array([one], dtype=np.int32))[0] == value
        assert value == np.float32(-(1 / 64 + 4 * ((one * 2_654_435_761 % 2**32) / 2**32)))


async def test_chunks_of_a_stream_join_to_the_whole_reply():
    engine = scripted_engine([{"content": "one two three four five six seven eight nine ten"}])
    (whole,) = await play(engine, call())
    pieces = await play(engine, call(stream=True))
    assert len(pieces) > 1
    assert np.array_equal(np.concatenate([p.output_ids for p in pieces]), whole.output_ids)
    assert np.array_equal(np.concatenate([p.logprobs for p in pieces]), whole.logprobs)
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].versions == whole.versions
    assert [p.prompt_ids_json is None for p in pieces] == [False] + [True] * (len(pieces) - 1)


# ---- limits


async def test_a_turn_with_pace_s_streams_one_token_per_chunk():
    engine = scripted_engine([{"content": "one two", "pace_s": 0.001}])
    pieces = await play(engine, call(stream=True))
    assert {len(piece.output_ids) for piece in pieces} == {1}
    (whole,) = await play(engine, call())
    assert np.array_equal(np.concatenate([p.output_ids for p in pieces]), whole.output_ids)


async def test_max_tokens_ends_a_scripted_reply_with_finish_reason_length():
    engine = scripted_engine([{"content": "one two three"}])
    (chunk,) = await play(engine, call(sampling=Sampling(max_tokens=2)))
    assert (len(chunk.output_ids), chunk.finish_reason) == (2, FinishReason.LENGTH)
    whole = len((await play(engine, call()))[0].output_ids)
    (chunk,) = await play(engine, call(sampling=Sampling(max_tokens=whole)))
    assert chunk.finish_reason is FinishReason.STOP


async def test_the_context_length_cuts_a_reply_and_refuses_a_longer_prompt():
    prompt = len(call().prompt)
    engine = scripted_engine([{"content": "one two three"}], context_length=prompt + 16)
    long = call([{"role": "user", "content": "x" * 3000}])
    with pytest.raises(ContextOverflowError) as caught:
        await play(engine, long)
    assert caught.value.prompt_tokens == len(long.prompt)
    tight = scripted_engine([{"content": "w " * 50}], context_length=prompt + 16)
    (chunk,) = await play(tight, call())
    assert (len(chunk.output_ids), chunk.finish_reason) == (16, FinishReason.LENGTH)


@given(st.sampled_from(["three", "wo th", " ", "five", "o", "one two"]))
async def test_a_stop_string_ends_the_reply_at_the_token_that_completes_it(stop):
    engine = scripted_engine([{"content": "one two three four"}])
    (chunk,) = await play(engine, call(sampling=Sampling(stop=("never", stop))))
    text = TOKENIZER.decode(chunk.output_ids)
    if stop == "five":
        assert (chunk.stop_text, text) == (None, "one two three four<|im_end|>")
    else:
        assert chunk.stop_text == stop
        assert chunk.finish_reason is FinishReason.STOP
        assert stop in text
        assert stop not in TOKENIZER.decode(chunk.output_ids[:-1])


async def test_a_stop_token_ends_a_scripted_reply():
    ids = TOKENIZER.encode("one two three").tolist()
    (chunk,) = await play(
        scripted_engine([{"content": "one two three"}]),
        call(sampling=Sampling(stop_token_ids=(ids[2], TOKENIZER.end_id))),
    )
    assert chunk.output_ids.tolist() == ids[:3]
    assert (chunk.finish_reason, chunk.stop_text) == (FinishReason.STOP, None)


# ---- what the prompt holds already


@pytest.mark.parametrize("turn", [
    {"reasoning": "think hard", "content": "Answer."}, {"raw": "exact text here"},
    {"content": "to the end", "finish": "length"}, {"token_ids": [5, 6, 7, 8, 9]},
])  # fmt: skip
async def test_a_prompt_with_sampled_tokens_continues_the_scripted_reply_at_that_token(turn):
    engine = scripted_engine([turn])
    (whole,) = await play(engine, call())
    for count in range(len(whole.output_ids)):
        begun = np.concatenate([call().prompt.array(), whole.output_ids[:count]])
        request = GenerateRequest("r", ArrayIds(begun), Sampling())
        (rest,) = await play(engine, request)
        assert rest.output_ids.tolist() == whole.output_ids[count:].tolist()


async def test_a_reply_prefix_tokenised_differently_is_continued_by_its_text():
    engine = scripted_engine([{"content": "the end"}])
    begun = np.append(call().prompt.array(), letters("the"))
    (rest,) = await play(engine, GenerateRequest("r", ArrayIds(begun), Sampling()))
    assert TOKENIZER.decode(rest.output_ids) == " end<|im_end|>"


async def test_a_prefix_that_is_not_in_the_script_restarts_the_reply():
    engine = scripted_engine([{"content": "abcd"}])
    assert await text_of(engine, call(held="zzz")) == "abcd<|im_end|>"


async def test_scripted_reasoning_is_left_out_with_enable_thinking_false():
    engine = scripted_engine([{"reasoning": "hm", "content": "Hi."}])
    off = call(arguments={"enable_thinking": False})
    assert await text_of(engine, off) == "Hi.<|im_end|>"


async def test_a_think_block_opened_by_the_prompt_is_continued_and_closed():
    thinking = scripted_engine([{"reasoning": "hm", "content": "Hi."}])
    assert await text_of(thinking, call(held="<think>\n")) == "hm\n</think>\n\nHi.<|im_end|>"
    plain = scripted_engine([{"content": "Hi."}])
    assert await text_of(plain, call(held="<think>\n")) == "\n</think>\n\nHi.<|im_end|>"


# ---- faults, delays, aborts


@pytest.mark.parametrize(("fault", "retryable"), [(500, True), (429, True), (400, False)])
async def test_a_scripted_fault_has_its_http_status_and_retryability(fault, retryable):
    with pytest.raises(EngineError) as caught:
        await play(scripted_engine([{"fault": fault}]), call())
    assert (caught.value.status, caught.value.retryable) == (fault, retryable)


async def test_a_scripted_cut_streams_a_part_of_the_reply_and_raises():
    engine = scripted_engine([{"content": "one two three four", "fault": "cut"}])
    for stream in (False, True):
        got, error = [], None
        try:
            async for chunk in engine.generate(call(stream=stream)):
                got.append(chunk)  # noqa: PERF401 - what came before the error is looked at
        except CutError as caught:
            error = caught
        assert error is not None
        assert all(chunk.finish_reason is None for chunk in got)
        assert TOKENIZER.decode(np.concatenate([c.output_ids for c in got])).startswith("one")


@pytest.mark.parametrize("fault", ["cut", 500])
async def test_a_scripted_fault_is_raised_after_fault_after_tokens(fault):
    engine = scripted_engine([{"content": "word " * 20, "fault": fault, "fault_after": 12}])
    for stream, sizes in ((False, [12]), (True, [8, 4])):
        got = []
        with pytest.raises(EngineError, match=r"scripted fault|cuts this reply"):  # noqa: PT012
            async for chunk in engine.generate(call(stream=stream)):
                got.append(chunk)  # noqa: PERF401 - what came before the error is looked at
        assert [len(chunk.output_ids) for chunk in got] == sizes
        assert all(chunk.finish_reason is None for chunk in got)


async def later(work):
    await asyncio.sleep(0.01)
    await work


async def test_an_abort_ends_the_delay_before_a_late_fault():
    engine = scripted_engine(
        [{"content": "word " * 20, "fault": 500, "fault_after": 8, "delay_s": 60}]
    )
    got = []
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        async for chunk in engine.generate(call(request_id="x", stream=True)):
            got.append(chunk)
            if len(got) == 1:
                group.create_task(later(engine.abort("x")))
    assert [len(chunk.output_ids) for chunk in got] == [8, 0]
    assert got[-1].finish_reason is FinishReason.ABORT
    assert got[-1].versions == (VersionSpan(0, 0, 8),)


async def test_a_fault_with_fault_times_is_counted_per_prompt():
    engine = scripted_engine([{"content": "ok", "fault": 500, "fault_times": 2}])
    other = call([{"role": "user", "content": "other"}])
    for request in (call(), call(), other):
        with pytest.raises(EngineError):
            await play(engine, request)
    assert await text_of(engine, call()) == "ok<|im_end|>"
    with pytest.raises(EngineError):
        await play(engine, other)
    assert await text_of(engine, other) == "ok<|im_end|>"


async def test_delay_s_delays_the_first_token():
    engine = scripted_engine([{"content": "ok", "delay_s": 0.05}])
    began = time.monotonic()
    await play(engine, call())
    assert time.monotonic() - began >= 0.05


async def test_an_abort_ends_a_delayed_call_without_tokens():
    engine = scripted_engine([{"content": "ok", "delay_s": 60, "fault": 500}])
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        task = group.create_task(play(engine, call(request_id="x")))
        await asyncio.sleep(0)
        await engine.abort("unknown")
        await engine.abort("x")
    (chunk,) = task.result()
    assert (chunk.finish_reason, len(chunk.output_ids)) == (FinishReason.ABORT, 0)


async def test_an_abort_in_mid_stream_keeps_the_sampled_tokens():
    engine = scripted_engine([{"content": "word " * 50}])
    got = []
    async for chunk in engine.generate(call(request_id="x", stream=True)):
        got.append(chunk)
        await engine.abort("x")
    assert [len(chunk.output_ids) for chunk in got] == [8, 0]
    assert got[-1].finish_reason is FinishReason.ABORT
    assert got[-1].versions == (VersionSpan(0, 0, 8),)


async def test_closing_the_scripted_engine_aborts_its_calls():
    engine = scripted_engine([{"delay_s": 60}])
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        task = group.create_task(play(engine, call()))
        await asyncio.sleep(0)
        await engine.aclose()
    assert task.result()[-1].finish_reason is FinishReason.ABORT


async def test_version_spans_show_a_version_change_in_mid_stream():
    engine = scripted_engine([{"content": "word " * 8}])
    await engine.set_version(3)
    spans: tuple[VersionSpan, ...] = ()
    async for chunk in engine.generate(call(stream=True)):
        await engine.set_version(4)
        spans = chunk.versions
    assert [(span.version, span.start) for span in spans] == [(3, 0), (4, 8)]
    assert (await engine.start()).version == 4


# ---- what it says of itself


async def test_an_engine_probe_is_answered_also_by_a_script_of_faults():
    engine = scripted_engine([{"fault": 500}])
    request = call(request_id="probe-1", sampling=Sampling(max_tokens=2))
    (chunk,) = await play(engine, request)
    assert len(chunk.output_ids) == 2


async def test_the_scripted_engine_reports_its_info_and_supports_versions():
    engine: Engine = scripted_engine([{}], model="m", context_length=99)
    info = await engine.start()
    assert (info.model, info.context_length, info.token_in) == ("m", 99, True)
    assert info.eos_token_ids == (TOKENIZER.end_id,)
    assert isinstance(engine, Versioned)
    await engine.health()
    await engine.aclose()


async def test_prompt_ids_outside_the_vocabulary_are_refused():
    engine = scripted_engine([{}])
    for text, says in ((b"[5,99999]", r"prompt\[1\]: 99999"), (b"[-5]", "no token id")):
        with pytest.raises(EngineError, match=says) as caught:
            await play(engine, GenerateRequest("r", TextIds(text), Sampling()))
        assert caught.value.status == 400


def test_scripted_token_ids_beyond_the_vocabulary_are_refused_at_start(tmp_path):
    path = tmp_path / "script.json"
    path.write_text('{"conversations": [{"turns": [{}, {"token_ids": [1, 999999]}]}]}')
    with pytest.raises(ConfigError, match=r"turns\.1\.token_ids\.1: token id 999999 is beyond"):
        ScriptedEngine.open(str(path))


def test_the_engine_s_cache_of_encoded_texts_is_bounded():
    engine = scripted_engine([{}])
    for number in range(1_100):
        engine._encode(f"text {number}")
    assert len(engine._encoded) <= 1_000


# ---- the harness's own shell tool

TEXT = {"type": "string"}


def tool(name, properties, required=(), **more):
    schema = {"type": "object", "properties": properties, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def arguments(one, command="ls -l"):
    found = find_shell([one])
    assert found is not None
    return shell_arguments(found, command)


FLAG = {"type": "boolean"}
RISK = {"type": "string", "enum": ["LOW", "HIGH"]}
TEXTS = {"type": "array", "items": TEXT}
NUMBER = {"type": "integer"}
ONE = {"type": "object", "properties": {"command": TEXT, "n": NUMBER}, "required": ["command", "n"]}
ODD = {
    "command": TEXT,
    "timeout_ms": NUMBER,
    "wait": {"type": "number", "minimum": 3},
    "timeout": {"type": "integer", "description": "in seconds"},
    "env": {"type": "array"},
    "mode": {"const": "sync"},
    "level": {"default": 7},
    "box": {"type": "object", "properties": {"on": FLAG}, "required": ["on"]},
}
READ = tool("read_file", {"path": TEXT}, ["path"])


@pytest.mark.parametrize(
    ("shell", "expected"),
    [
        # mini-swe-agent, pi: one string.
        (tool("bash", {"command": TEXT, "timeout": NUMBER}, ["command"]), {"command": "ls -l"}),
        # Claude Code: a description beside it.
        (tool("Bash", {"command": TEXT, "description": TEXT}, ["command", "description"]),
         {"command": "ls -l", "description": "Run a command"}),
        # Qwen Code: a required flag.
        (tool("run_shell_command", {"command": TEXT, "is_background": FLAG},
              ["command", "is_background"]),
         {"command": "ls -l", "is_background": False}),
        # Codex, present and older.
        (tool("exec_command", {"cmd": TEXT, "workdir": TEXT}, ["cmd", "workdir"]),
         {"cmd": "ls -l", "workdir": "."}),
        (tool("shell", {"command": TEXTS}, ["command"]), {"command": ["bash", "-lc", "ls -l"]}),
        # Cline: a list of whole commands.
        (tool("run_commands", {"commands": TEXTS}, ["commands"]), {"commands": ["ls -l"]}),
        # OpenHands: a risk to choose.
        (tool("terminal", {"command": TEXT, "security_risk": RISK}, ["command", "security_risk"]),
         {"command": "ls -l", "security_risk": "LOW"}),
        (tool("shell", {"command": {"anyOf": [{"type": "null"}, TEXT]}}, ["command"]),
         {"command": "ls -l"}),
        (tool("shell", {"command": {"type": ["null", "string"]}}, ["command"]),
         {"command": "ls -l"}),
        (tool("sh", {"commands": {"type": "array", "items": {"$ref": "#/$defs/One"}}}, ["commands"],
              **{"$defs": {"One": ONE}}),
         {"commands": [{"command": "ls -l", "n": 0}]}),
        (tool("bash", ODD, list(ODD)),
         {"command": "ls -l", "timeout_ms": 120_000, "wait": 3, "timeout": 120, "env": [],
          "mode": "sync", "level": 7, "box": {"on": False}}),
    ],
)  # fmt: skip
def test_a_shell_turn_calls_the_harness_s_shell_tool_with_arguments_of_its_schema(shell, expected):
    assert find_shell([READ, shell]) == shell["function"]
    assert arguments(shell) == expected


def test_a_shell_tool_is_found_by_exact_name_then_similar_name_then_schema():
    by_schema = tool("do_it", {"command": TEXT}, ["command"])
    telling = tool("my_shell_thing", {"command": TEXT})
    exact = tool("Bash", {"command": TEXT})
    assert find_shell([by_schema, telling, exact]) == exact["function"]
    assert find_shell([by_schema, telling]) == telling["function"]
    assert find_shell([by_schema]) == by_schema["function"]


def test_a_tool_without_a_command_parameter_is_no_shell_tool():
    output = tool("BashOutput", {"bash_id": TEXT}, ["bash_id"])
    kill = tool("shell", {"command": {"type": "integer"}})
    optional = tool("deploy", {"command": TEXT})
    assert find_shell([READ, output, kill, optional]) is None
    assert find_shell([]) is None
    assert find_shell([{"type": "web_search"}, {"function": {"name": 3}}]) is None
    assert find_shell([{"name": "bash", "parameters": "none"}]) is None


def test_a_shell_tool_is_found_without_the_function_wrapper():
    flat = {"name": "bash", "input_schema": {"properties": {"command": TEXT}}}
    assert arguments(flat) == {"command": "ls -l"}


def test_a_schema_reference_that_does_not_resolve_is_treated_as_a_string():
    assert arguments(tool("bash", {"command": {"$ref": "#/$defs/Gone"}}, ["command"])) == {
        "command": "ls -l"
    }

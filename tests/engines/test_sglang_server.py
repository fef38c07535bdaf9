"""SGLang's shape as a running SGLang 0.5.23 answered it (see the module)."""

import json

import aiohttp
import pytest
from tests.engines.recording import RecordingEngine
from tests.engines.sglang_server import SglangServer
from tests.scripted.api import BASH, PROMPT, USER, Api

from bridle.testing import scripted_engine

TURN = {"reasoning": "hm", "content": "Hello, world.",
        "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}  # fmt: skip


def ask(**fields):
    sampling = {"max_new_tokens": 99, **fields.pop("sampling", {})}
    return {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling, **fields}


class Updating(RecordingEngine):
    """An engine that takes weights."""

    version = 0

    async def start(self):
        from dataclasses import replace

        return replace(await super().start(), version=self.version)

    async def update_weights(self, source, version):
        self.loaded, self.version = source, version


@pytest.fixture
async def served():
    """Makes servers with a plain HTTP client."""
    opened = []

    async def make(engine=None, **options):
        server = SglangServer(engine or scripted_engine([TURN]), **options)
        await server.__aenter__()
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        opened.append((server, session))
        return Api(server, session)

    yield make
    for server, session in opened:
        await session.close()
        await server.__aexit__()


async def test_a_whole_reply_has_sglangs_fields(served):
    api = await served()
    body = await api.json("/generate", ask(rid="r", return_prompt_token_ids=True))
    assert list(body) == ["text", "output_ids", "meta_info", "prompt_token_ids"]
    assert body["prompt_token_ids"] == PROMPT
    meta = body["meta_info"]
    assert {"id": "r", "prompt_tokens": len(PROMPT), "weight_version": "default",
            "input_token_logprobs": [], "cached_tokens": 0}.items() <= meta.items()  # fmt: skip
    ids = body["output_ids"]
    assert [one for _, one, _ in meta["output_token_logprobs"]] == ids
    assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == len(ids)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": len(ids)}]
    assert meta["finish_reason"] == {"type": "stop", "matched": ids[-1]}
    assert body["text"].endswith("</tool_call>")


async def test_the_reply_has_no_field_that_was_not_requested(served):
    api = await served()
    body = await api.json("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 3}})
    assert list(body) == ["text", "output_ids", "meta_info"]
    assert "output_token_logprobs" not in body["meta_info"]
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


@pytest.mark.parametrize("incremental", [False, True])
async def test_streams_are_cumulative_or_incremental_as_configured(served, incremental):
    api = await served(incremental=incremental)
    parts = await api.events("/generate", ask(stream=True))
    last = parts[-1]["meta_info"]
    counts = [part["meta_info"]["completion_tokens"] for part in parts]
    sizes = [len(part["output_ids"]) for part in parts]
    assert counts == sorted(counts)
    assert (sum(sizes) if incremental else sizes[-1]) == last["completion_tokens"]
    assert [len(p["meta_info"]["output_token_logprobs"]) for p in parts] == sizes
    assert last["finish_reason"]["type"] == "stop"
    assert all(part["meta_info"]["finish_reason"] is None for part in parts[:-1])


async def test_stream_interval_reduces_the_number_of_stream_pieces(served):
    api = await served()
    every = await api.events("/generate", ask())
    some = await api.events("/generate", ask(sampling={"stream_interval": 16}))
    assert len(some) < len(every)
    assert some[-1]["output_ids"] == every[-1]["output_ids"]


async def test_a_stop_string_is_trimmed_from_the_text_alone(served):
    api = await served(scripted_engine([{"raw": "one two three"}]))
    body = await api.json("/generate", ask(sampling={"stop": "two"}))
    assert body["text"] == "one "
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "two"}
    kept = await api.json("/generate", ask(sampling={"stop": "two", "no_stop_trim": True}))
    assert kept["text"].startswith("one two")
    assert kept["output_ids"] == body["output_ids"]


async def test_input_token_logprobs_have_the_prompt_s_ids(served):
    api = await served()
    body = await api.json("/generate", ask(logprob_start_len=0))
    assert [one for _, one, _ in body["meta_info"]["input_token_logprobs"]] == PROMPT


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (ask(sampling={"bogus": 1}), "unknown field `bogus`"),
        (ask(sampling={"logit_bias": {"99999": 1.0}}), "keys in [0, 2047], got 99999"),
        (ask(sampling={"top_p": 2.0}), "top_p must be in (0, 1]"),
        ({"sampling_params": {}}, "should be provided"),
        ({**ask(), "input_ids": []}, "cannot be empty"),
        ({**ask(), "input_ids": "x"}, "not a JSON array"),
        (b"{broken", ""),
    ],
)
async def test_an_invalid_generate_request_is_a_400_with_the_reason(served, body, says):
    api = await served()
    status, message = await api.error("/generate", body)
    assert status == 400
    assert says in message


async def test_a_stream_reports_its_failure_in_an_event(served):
    api = await served(scripted_engine([{"fault": 429}], context_length=200))
    for body, code in ((ask(), 429), (ask(sampling={"max_new_tokens": 9999}), 400)):
        (part,) = await api.events("/generate", body)
        assert part["error"]["code"] == code


async def test_chat_takes_ids_and_parses_what_was_sampled(served):
    engine = RecordingEngine(scripted_engine([TURN]))
    api = await served(engine)
    body = {"messages": USER, "tools": [BASH], "input_ids": PROMPT, "logprobs": True,
            "return_token_ids": True, "return_meta_info": True, "max_tokens": 99}  # fmt: skip
    reply = await api.json("/v1/chat/completions", body)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "Hello, world."
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "bash"
    assert choice["finish_reason"] == "tool_calls"
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["meta_info"]["output_token_logprobs"]) == len(choice["response_token_ids"])
    plain = await api.json("/v1/chat/completions", {"messages": USER, "max_tokens": 5})
    assert set(plain["choices"][0]) == {"index", "message", "finish_reason", "matched_stop"}
    assert engine.requests[-1].prompt.array().tolist() == PROMPT
    status, message = await api.error("/v1/chat/completions", {**body, "stream": True})
    assert (status, "not supported with streaming" in message) == (400, True)


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"a": 1}}}, {"json_schema": {"a": 1}}),
        ({"type": "json_schema", "json_schema": None}, {"json_schema": {}}),
        ({"type": "json_object"}, {"json_schema": {"type": "object"}}),
        ({"type": "text"}, None),
        (None, None),
    ],
)
async def test_chat_formats_are_grammars(served, given, grammar):
    engine = RecordingEngine(scripted_engine([TURN]))
    api = await served(engine)
    body = {"messages": USER, "max_tokens": 5, "response_format": given}
    await api.json("/v1/chat/completions", body)
    assert engine.requests[-1].grammar == grammar


async def test_info_routes_report_the_model_weight_version_and_context_length(served):
    api = await served(scripted_engine([TURN], model="m", context_length=500), incremental=True)
    about = await api.json("/model_info")
    assert about["weight_version"] == "default"
    assert about["model_path"] == about["tokenizer_path"]
    assert (await api.json("/server_info"))["incremental_streaming_output"] is True
    assert (await api.json("/v1/models"))["data"][0]["max_model_len"] == 500
    assert (await api.json("/tokenize", {"messages": USER}))["tokens"] == PROMPT
    async with api.session.get(api.url + "/health") as response:
        assert response.status == 200


async def test_weights_get_versions_by_either_route(served, tmp_path):
    engine = Updating(scripted_engine([TURN]))
    api = await served(engine)
    for body in (
        {"model_path": str(tmp_path), "weight_version": "7"},
        {"model_path": str(tmp_path)},
    ):
        assert (await api.json("/update_weights_from_disk", body))["success"]
        assert (engine.loaded, engine.version) == (str(tmp_path), 7)
    assert (await api.json("/model_info"))["weight_version"] == "7"
    status, read = await api.post("/update_weights_from_disk", {"model_path": "/nowhere"})
    assert (status, json.loads(read)["success"]) == (400, False)
    assert (await api.post("/update_weight_version", {"new_version": "9"}))[0] == 501
    named = await served()
    result = await named.json("/update_weight_version", {"new_version": "9"})
    assert result == {"success": True, "new_version": "9"}
    reply = await named.json("/generate", ask())
    assert reply["meta_info"]["weight_versions"][0]["version"] == "9"


async def test_abort_pause_and_continue_routes_answer_200_and_unknown_modes_400(served):
    api = await served()
    assert (await api.post("/abort_request", {"rid": "none"}))[0] == 200
    assert (await api.post("/abort_request", {}))[0] == 200
    assert (await api.post("/abort_request", {"abort_all": True}))[0] == 200
    assert (await api.error("/pause_generation", {"mode": "never"}))[0] == 400
    for body in (b"", {"mode": "retract"}):
        assert (await api.post("/pause_generation", body))[0] == 200
    assert (await api.post("/continue_generation", {}))[0] == 200
    assert (await api.json("/generate", ask()))["output_ids"]

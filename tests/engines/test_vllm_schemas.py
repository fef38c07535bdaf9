import msgspec
import pytest

from bridle.engines import vllm_schemas
from bridle.types import FinishReason, Sampling


def test_openai_sampling_fields_are_read_into_sampling():
    body = (
        b'{"messages":[],"temperature":0.5,"top_p":0.9,"top_k":5,"max_tokens":7,"min_tokens":1,'
        b'"stop":["a","b"],"stop_token_ids":[3],"seed":1,"presence_penalty":0.1,'
        b'"frequency_penalty":0.2,"repetition_penalty":1.1,"min_p":0.3,"logit_bias":{"5":-1},"unknown":{"kept":"out"}}'
    )
    read = msgspec.json.decode(body, type=vllm_schemas.ChatRequest)
    assert read.sampling(read.max_tokens) == Sampling(
        0.5, 0.9, 5, 7, 1, ("a", "b"), (3,), 1, 0.1, 0.2, 1.1, 0.3, {"5": -1}
    )
    assert not read.usage_wanted


def test_a_single_stop_string_is_one_stop_string():
    read = msgspec.json.decode(b'{"messages":[],"stop":"ab"}', type=vllm_schemas.ChatRequest)
    assert read.sampling(None).stop == ("ab",)


@pytest.mark.parametrize(("raw", "absent"), [
    ("", True), (',"tools": null', True), (',"tools":[]', False), (',"tools":[1,2]', False),
    (',"tools":0', False),
])  # fmt: skip
def test_null_counts_as_not_sent(raw, absent):
    body = b'{"messages":[]' + raw.encode() + b"}"
    read = msgspec.json.decode(body, type=vllm_schemas.ChatRequest)
    assert (read.tools in vllm_schemas.ABSENT) is absent


def test_include_usage_in_stream_options_requests_usage():
    body = b'{"messages":[],"stream_options":{"include_usage":true}}'
    assert msgspec.json.decode(body, type=vllm_schemas.ChatRequest).usage_wanted


def test_every_finish_reason_has_a_vllm_name():
    assert set(vllm_schemas.FINISH.values()) == set(FinishReason)

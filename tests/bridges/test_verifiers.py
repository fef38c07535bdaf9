"""Records of verifiers' traces; with the real package in the suite `train`."""

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.bridges.absent import absent
from tests.bridges.by_hand import DONE, RESULT, rows, session, trace

from bridle.bridges.traces import trace_record, verifiers_trace


def path_of(record, leaf):
    found = []
    while leaf is not None:
        found.insert(0, record["nodes"][leaf])
        leaf = found[0]["parent"]
    return found


def leaves(record):
    parents = {node["parent"] for node in record["nodes"]}
    return [at for at in range(len(record["nodes"])) if at not in parents]


def check(record, traces):
    ends = leaves(record)
    assert len(ends) == len(traces)
    for leaf, one in zip(ends, traces, strict=True):
        nodes = path_of(record, leaf)
        ids = [token for node in nodes for token in node["token_ids"]]
        mask = [flag for node in nodes for flag in node["mask"]]
        assert ids == [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
        assert mask == [False] * len(one.prompt_ids) + (one.loss_mask == 1).tolist()
        for node in nodes:
            assert len(node.get("logprobs", [])) == sum(node["mask"])


def test_a_verifiers_branch_has_the_token_ids_and_mask_of_its_trace():
    partly = trace("t1", loss_mask=np.array([1, 0, 0, 0, 1, 1, 1], np.uint8))
    odd = trace("t2", response_messages=[DONE, RESULT, DONE, RESULT, DONE])
    traces = [trace(), partly, odd]
    check(trace_record(session("s", 1.0, *traces)), traces)


def test_a_verifiers_record_has_messages_and_tools_in_verifiers_form():
    record = trace_record(session("s", 1.0, trace()))
    roles = [node["message"]["role"] for node in record["nodes"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert record["nodes"][0]["tools"][0]["name"] == "bash"
    assert record["nodes"][2]["message"]["tool_calls"] == [
        {"id": "c1", "name": "bash", "arguments": '{"a": 1}'}
    ]
    assert record["rewards"] == {"bridle": {"score": 1.0}}
    ids = [node["token_ids"] for node in record["nodes"]]
    assert ids == [[], [1, 2, 3], [4, 5], [6, 7], [8, 9, 10]]


def test_verifiers_nodes_have_the_routed_experts_of_their_tokens():
    routed = trace(routed_experts=rows())
    record = trace_record(session("s", 1.0, routed, trace("t1")), experts=True)
    branch, other = (path_of(record, leaf) for leaf in leaves(record))
    result = [node["routed_experts"] for node in branch if node["token_ids"]]
    assert [len(one) for one in result] == [len(n["token_ids"]) for n in branch if n["token_ids"]]
    assert np.array_equal(np.concatenate(result), rows()[[*range(9), 8]])
    assert result[0].dtype == np.uint8
    assert not any("routed_experts" in node for node in other)
    partial = session("s", 1.0, trace(routed_experts=rows(known=5)))
    for record in (trace_record(partial, experts=True), trace_record(session("s", 1.0, routed))):
        assert not any("routed_experts" in node for node in record["nodes"])
    wide = trace_record(session("s", 1.0, trace(routed_experts=rows() + 250)), experts=True)
    assert wide["nodes"][-1]["routed_experts"].dtype == np.uint16


def test_a_verifiers_record_of_a_failed_session_has_its_error():
    parts = {"role": "assistant", "content": [{"type": "text", "text": "So."}]}
    one = trace(
        prompt_messages=[{"role": "developer", "content": "Hm."}],
        response_messages=[{**DONE}, parts, RESULT, DONE],
        tools=None,
    )
    record = trace_record(session("s", None, one, status="TIMEOUT", error="late"))
    assert (record["ok"], record["is_timeout"], record["rewards"]) == (
        False,
        True,
        {"bridle": None},
    )
    assert record["errors"] == [{"type": "TIMEOUT", "message": "late"}]
    assert record["nodes"][0]["message"]["role"] == "system"
    assert record["nodes"][2]["message"]["content"] == "So."
    check(record, [one])


@pytest.mark.train
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_the_verifiers_package_reads_branches_equal_to_the_traces():
    with absent("prime_sandboxes", "tomli_w", "math_verify"):
        read = verifiers_trace(session("s", 0.5, trace(routed_experts=rows()), trace("t1")))
    assert np.array_equal(read.branches[0].routed_experts[:9], rows()[:9])
    assert read.branches[1].routed_experts is None
    assert read.reward == 0.5
    assert len(read.branches) == 2
    for branch, one in zip(read.branches, [trace(), trace("t1")], strict=True):
        assert branch.token_ids == [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
        assert branch.sampled_mask == [False] * 3 + (one.loss_mask == 1).tolist()
        assert branch.logprobs[3:] == one.response_logprobs.tolist()


def test_verifiers_records_warn_about_traces_with_their_own_rewards():
    rewarded = session("s", 1.0, trace(), trace("t1", reward=0.5))
    with capture_logs() as logs:
        trace_record(rewarded)
        trace_record(session("u", 1.0, trace()))
    (result,) = logs
    assert (result["event"], result["session"]) == ("trace_rewards_left_out", "s")

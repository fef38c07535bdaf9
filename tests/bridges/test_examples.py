"""Traces and conversations of text become examples, with what filters ask of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.capture.made import MadeSession

from bridle.bridges.examples import examples_of
from bridle.trajectory import rebuild
from bridle.types import DeliveryState, FinishReason, Kind, LogprobMode

TEXT = {"output": 0, "logprob_mode": LogprobMode.NONE}


def session(turns=2, reward=1.0, **fields):
    made = MadeSession(**fields)
    for turn in range(turns):
        made.call(f"x{turn - 1}" if turn else None)
    made.end(reward)
    return made


def test_a_trace_is_an_example_with_its_messages_and_tokens():
    capture = session().capture()
    trajectory = rebuild(capture)
    (example,) = examples_of(trajectory, capture)
    (trace,) = trajectory.traces
    assert (example.trace, example.trace_id, example.reward) == (trace, trace.trace_id, 1.0)
    assert (example.turns, example.trained, example.task_id) == (2, 10, "task-1")
    assert example.tokens == len(trace.prompt_ids) + len(trace.response_ids)
    assert [m["role"] for m in example.prompt_messages] == ["system", "user"]
    assert [m["role"] for m in example.response_messages] == ["assistant", "user", "assistant"]


def test_the_reward_of_an_example_is_that_of_its_trace_where_it_has_one():
    trajectory = rebuild(session().capture())
    (trace,) = trajectory.traces
    for own, reward in ((None, 1.0), (0.0, 0.0)):
        with_own = replace(trajectory, traces=(replace(trace, reward=own),))
        assert examples_of(with_own)[0].reward == reward


def test_each_conversation_of_text_is_an_example_without_ids():
    made = MadeSession()
    made.call(**TEXT)
    made.call("x0", tools=[{"type": "function", "function": {"name": "bash"}}], **TEXT)
    made.call(**TEXT, kind=Kind.SUBAGENT)
    made.call(**TEXT, kind=Kind.SIDE)
    made.call(**TEXT, state=DeliveryState.ABANDONED)
    made.call(**TEXT, extra={"other_model": "judge"})
    made.call(**TEXT, finish_reason=FinishReason.ABORT)
    made.end(1.0)
    capture = made.capture()
    main, agent = examples_of(rebuild(capture), capture)
    assert [m["role"] for m in main.prompt_messages] == ["system", "user"]
    assert [m["role"] for m in main.response_messages] == ["assistant", "user", "assistant"]
    assert [m["role"] for m in agent.messages] == ["system", "user", "assistant"]
    assert (main.trace, main.tokens, main.trained, main.turns) == (None, None, 0, 2)
    assert [tool["function"]["name"] for tool in main.tools or ()] == ["bash"]
    assert main.trace_id != agent.trace_id
    assert examples_of(rebuild(capture)) == []


def test_a_session_with_token_ids_gives_no_text_examples():
    made = MadeSession()
    made.call()
    made.call(**TEXT)
    made.end(1.0)
    capture = made.capture()
    (example,) = examples_of(rebuild(capture), capture)
    assert example.trace is not None


@pytest.mark.parametrize("texts", [False, True])
def test_example_digests_are_equal_when_the_sampled_replies_are_equal(texts):
    def one(seed, ids=(1, 2, 3), said="done", new=4):
        made = MadeSession(f"s{seed}", seed=seed)
        reply = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        fields = TEXT if texts else {"output": ids}
        made.call(new=new, reply=json.dumps(reply).encode(), **fields)
        made.end(1.0)
        capture = made.capture()
        return examples_of(rebuild(capture), capture)[0].digest

    assert one(0) == one(1, new=6)
    assert one(0) != one(1, ids=(1, 2, 4), said="else")


def test_repetition_is_the_share_of_token_n_grams_seen_before():
    def of(ids):
        made = MadeSession()
        made.call(output=ids)
        made.end(1.0)
        return examples_of(rebuild(made.capture()))[0].repetition

    assert of(np.arange(40)) == 0
    assert of([7] * 47) == pytest.approx(39 / 40)
    assert of([1, 2, 3]) == 0


def test_repetition_is_counted_over_words_in_examples_without_token_ids():
    made = MadeSession()
    function = {"name": "bash", "arguments": "ls " * 30}
    call = {"id": "c", "type": "function", "function": function}
    message = {"role": "assistant", "content": [{"type": "text", "text": "so"}]}
    reply = {"choices": [{"message": {**message, "content": "so", "tool_calls": [call]}}]}
    made.call(reply=json.dumps(reply).encode(), **TEXT)
    made.end(1.0)
    capture = made.capture()
    (example,) = examples_of(rebuild(capture), capture)
    assert example.repetition > 0.8

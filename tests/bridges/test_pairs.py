"""The best of a group beside its worst, from one prompt."""

import dataclasses
import json

import pytest
from tests.capture.made import MadeSession

from bridle.bridges.examples import examples_of, sibling_pairs, write_pairs
from bridle.trajectory import rebuild
from bridle.types import LogprobMode

ASK = {"role": "user", "content": "Fix it."}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def example(name, reward, *, task="t", ask=ASK, turns=1, text=False, tools=None):
    made = MadeSession(name, seed=sum(map(ord, name)))
    made.record = dataclasses.replace(made.record, task_id=task)
    fields = {"output": 0, "logprob_mode": LogprobMode.NONE} if text else {}
    fields |= {} if tools is None else {"tools": tools}
    ids = {} if text else {"new": [1, 2, 3]}
    for turn in range(turns):
        made.call(f"x{turn - 1}" if turn else None, first_message=ask, **fields, **ids)
    made.end(reward)
    capture = made.capture()
    return examples_of(rebuild(capture), capture)[0]


def written(tmp_path, examples, **settings):
    counts = write_pairs(tmp_path / "p.jsonl", examples, **settings)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert counts.pairs == len(lines)
    return counts, lines


def test_a_preference_pair_has_the_best_and_worst_session_of_one_prompt(tmp_path):
    good, bad = example("good", 1.0), example("bad", 0.0, turns=2)
    _, (line,) = written(tmp_path, [example("mid", 0.5), bad, good])
    assert (line["chosen_session"], line["rejected_session"]) == ("good", "bad")
    assert line["prompt"][-1] == ASK
    assert line["chosen"] == [*good.response_messages]
    assert line["rejected"] == [*bad.response_messages]
    assert line["prompt_ids"] == [1, 2, 3]
    assert line["chosen_ids"] == good.trace.response_ids.tolist()
    assert line["rejected_mask"] == bad.trace.loss_mask.tolist()
    assert (line["chosen_reward"], line["rejected_reward"], line["task_id"]) == (1.0, 0.0, "t")


def test_further_pairs_need_a_reward_difference_of_the_margin(tmp_path):
    group = [example(f"s{n}", reward) for n, reward in enumerate([1.0, 0.75, 0.5, 0.25, 0.0])]
    for margin, pairs in ((0.5, [(1.0, 0.0), (0.75, 0.25)]), (0.6, [(1.0, 0.0)])):
        _, lines = written(tmp_path, group, per_task=5, margin=margin)
        assert [(line["chosen_reward"], line["rejected_reward"]) for line in lines] == pairs
    assert len(written(tmp_path, group)[1]) == 1


def test_equal_rewards_different_prompts_and_unknown_rewards_give_no_pair(tmp_path):
    other = {"role": "user", "content": "Fix that."}
    counts, lines = written(
        tmp_path,
        [
            *(example("a", 1.0), example("b", 1.0)),
            *(example("c", 1.0, task="u"), example("d", 0.0, task="u", ask=other)),
            *(example("e", 1.0, task="v"), example("f", None, task="v")),
            *(example("g", 1.0, task="w"), example("h", 0.0, task="w", tools=[TOOL])),
        ],
    )
    assert lines == []
    assert counts.left_out == {"flat": 2, "prompt_differs": 2}


@pytest.mark.parametrize("text", [False, True])
def test_a_pair_uses_the_longest_conversation_of_a_session(tmp_path, text):
    small, large = example("s", 1.0, text=text), example("s", 1.0, turns=3, text=text)
    _, (line,) = written(tmp_path, [small, large, small, example("bad", 0.0, text=text)])
    assert line["chosen"] == [*large.response_messages]
    assert ("prompt_ids" in line) == (not text)


def test_a_continued_reply_is_chosen_over_a_rejected_reply_to_the_same_request(tmp_path):
    made = MadeSession("s")
    first = made.call(None)
    made.call(None, new=first.suffix_ids)
    made.call("x1")
    made.call(None)
    made.end()
    _, (line,) = written(tmp_path, [], siblings=sibling_pairs(made.capture()))
    assert [message["content"].split(":")[0] for message in line["chosen"]] == ["x1"]
    assert [message["content"].split(":")[0] for message in line["rejected"]] == ["x0"]
    assert line["prompt"][-1]["role"] == "user"
    assert line["chosen_session"] == line["rejected_session"] == "s"


@pytest.mark.parametrize("other", [0, 1])
def test_a_reply_of_another_model_is_in_no_sibling_pair(other):
    made = MadeSession("s")
    extra = {"extra": {"other_model": "judge"}}
    first = made.call(None, **(extra if other == 0 else {}))
    made.call(None, new=first.suffix_ids, **(extra if other == 1 else {}))
    made.call("x1")
    made.end()
    assert [*sibling_pairs(made.capture())] == []


def test_repeated_replies_of_which_none_is_continued_give_no_pair():
    made = MadeSession("s")
    first = made.call(None)
    made.call(None, new=first.suffix_ids)
    assert [*sibling_pairs(made.capture())] == []

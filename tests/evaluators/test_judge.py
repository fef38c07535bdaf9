import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from tests.evaluators.made import evaluation, trace

from bridle.errors import ConfigError, EvaluatorError
from bridle.evaluators.base import ModelAccess
from bridle.evaluators.judge import JudgeEvaluator, cut, parse_answer

GOOD = '{"reason": "fine", "score": 0.75}'


class Model:
    """A model server that gives its answers in turn; the last repeats. `asked` keeps requests."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []
        self.keys = []
        self.times = []

    async def complete(self, request):
        self.asked.append(await request.json())
        self.keys.append(request.headers["Authorization"])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.times.append(time.monotonic())
        if answer == 429:
            return web.Response(status=answer, headers={"Retry-After": "1"})
        if isinstance(answer, int):
            return web.Response(status=answer, text="no such model")
        if isinstance(answer, dict):
            return web.json_response(answer)
        return web.json_response({"choices": [{"message": {"content": answer}}]})

    @asynccontextmanager
    async def open(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield ModelAccess("s-1.judge", f"{site.name}/v1", "key-1")
        finally:
            await runner.cleanup()


TRACES = (
    trace(("user", "do it"), ("assistant", "done")),
    trace(("user", "sub"), ("assistant", "part"), ("user", "more"), ("assistant", "end")),
)


async def judged(tmp_path, *answers, traces=TRACES, **config):
    """Return what a judge that answers so makes of a session; and the model."""
    model = Model(*answers)
    named = {"rubric": "Was it done?", "model": "grader", "on_failure": "error"}
    async with evaluation(tmp_path) as context:
        trajectory = replace(context.trajectory, traces=traces)
        context = replace(context, trajectory=trajectory, open_model=model.open)  # noqa: PLW2901
        found = await JudgeEvaluator.from_config({**named, **config}).evaluate(context)
    return found, model


async def test_judge_scores_a_whole_session_with_one_question(tmp_path):
    found, model = await judged(tmp_path, GOOD, coefficient=2)
    assert (found.reward, found.trace_rewards) == (1.5, None)
    assert found.metadata == {
        "answers": [{"reason": "fine", "score": 0.75}],
        "judge": "s-1.judge",
    }
    (asked,) = model.asked
    assert (asked["model"], model.keys) == ("grader", ["Bearer key-1"])
    system, user = (message["content"] for message in asked["messages"])
    assert "Was it done?" in system
    assert "do it" in user
    assert '"more"' in user
    mark = user.splitlines()[0]
    assert user.splitlines()[-1] == mark
    assert mark not in system


async def test_judge_in_process_mode_scores_each_trace_with_its_own_question(tmp_path):
    answers = '{"score": 1}', '```json\n{"score": 0}\n```'
    found, model = await judged(tmp_path, *answers, mode="process", coefficient=0.5)
    assert (found.reward, found.trace_rewards) == (0.25, (0.5, 0.0))
    assert len(model.asked) == 2


def turns_of(*trained, starts=(0, 2, 4)):
    """A trace of three turns, of which the named ones train; tool results stand between them."""
    said = [("user", "fix it")]
    for number in range(3):
        said += [("assistant", f"reply {number}"), ("tool", f"result {number}")]
    mask = np.array([number in trained for number in range(3) for _ in "ab"], np.uint8)
    return replace(
        trace(*said),
        response_ids=np.arange(6, dtype=np.int32),
        loss_mask=mask,
        response_logprobs=np.zeros(6, np.float32),
        versions=np.zeros(6, np.int32),
        reasons=np.zeros(6, np.uint8),
        exchange_ids=("e-0", "e-1", "e-2"),
        turn_ends=(2, 4, 6),
        turn_messages=starts,
    )


async def test_judge_in_turns_mode_scores_all_trained_turns_of_a_trace_with_one_question(tmp_path):
    traces = turns_of(0, 1, 2), replace(turns_of(2), exchange_ids=("e-0", "e-1", "e-9"))
    answers = '{"scores": [1, 0, 0.5]}', '{"scores": [0.5]}'
    found, model = await judged(tmp_path, *answers, traces=traces, mode="turns", coefficient=2)

    assert found.turn_rewards == {"e-0": 0.5, "e-1": 0, "e-2": 0.25, "e-9": 0.25}
    assert found.reward == sum(found.turn_rewards.values()) == 1
    first, second = (asked["messages"][1]["content"] for asked in model.asked)
    mark = first.splitlines()[0][2:-2]
    for number in range(3):
        turn = first.partition(f"<<{mark} turn {number + 1}>>\n")[2].partition(f"\n<<{mark}>>")[0]
        assert f"reply {number}" in turn
        assert "result" not in turn
    assert all(f"result {number}" in first for number in range(3))
    assert "exactly 3 numbers" in model.asked[0]["messages"][0]["content"]
    assert second.count(" turn ") == 1
    assert mark not in second
    assert all(f"{said} {number}" in second for said in ("reply", "result") for number in range(3))


async def test_prompt_of_the_judge_keeps_every_turn_of_a_long_session_and_shortens_the_rest(
    tmp_path,
):
    long = replace(turns_of(0, 1, 2), prompt_messages=[{"role": "user", "content": "x" * 90_000}])
    answer = '{"scores": [0, 0, 1]}'
    _, model = await judged(tmp_path, answer, traces=(long,), mode="turns", max_chars=2000)
    shown = model.asked[0]["messages"][1]["content"]
    assert len(shown) < 3000
    assert all(f"reply {number}" in shown for number in range(3))


async def test_prompt_of_the_judge_shortens_a_long_session_in_its_middle(tmp_path):
    long = trace(("user", "first" + "x" * 90_000), ("assistant", "last"))
    _, model = await judged(tmp_path, GOOD, traces=(long,), max_chars=2000)
    shown = model.asked[0]["messages"][1]["content"]
    assert len(shown) < 3000
    assert "first" in shown
    assert "last" in shown
    assert "characters left out" in shown


@pytest.mark.parametrize(
    "answer", ['{"scores": [1, 1]}', '{"scores": [1, 1, 2]}', GOOD, "[1, 1, 1]"]
)
async def test_a_judge_answer_without_a_score_for_each_turn_is_an_evaluator_error(tmp_path, answer):
    with pytest.raises(EvaluatorError, match="no JSON object with 3 scores from 0 to 1"):
        await judged(tmp_path, answer, traces=(turns_of(0, 1, 2),), mode="turns")


@pytest.mark.parametrize(
    ("traces", "why"),
    [
        ((), "the session's traces have no turn"),
        ((turns_of(),), "no turn"),
        ((turns_of(0, starts=()),), "cannot tell the turns"),
    ],
)
async def test_judge_in_turns_mode_refuses_a_session_without_readable_turns(tmp_path, traces, why):
    with pytest.raises(EvaluatorError, match=why):
        await judged(tmp_path, GOOD, traces=traces, mode="turns")


async def test_judge_is_asked_again_after_an_unreadable_answer_or_http_503(tmp_path):
    found, model = await judged(tmp_path, "I think 1", 503, GOOD, attempts=3)
    assert found.reward == 0.75
    assert len(model.asked) == 3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            "good",
            r"grader' gave no score in 2 attempts: no JSON object with a score from 0 to 1: 'good'",
        ),
        (404, "HTTP 404: no such model"),
        ({"choices": []}, "something other than a chat completion"),
    ],
)
async def test_a_failing_judge_raises_or_gives_the_on_failure_reward(tmp_path, answer, why):
    with pytest.raises(EvaluatorError, match=why):
        await judged(tmp_path, answer)
    (tmp_path / "again").mkdir()
    found, _ = await judged(tmp_path / "again", answer, on_failure=0.5)
    assert found.reward == 0.5
    assert "judge_failed" in found.metadata


async def test_a_judge_that_closes_connections_or_a_missing_gateway_is_an_evaluator_error(tmp_path):
    class Silent(Model):
        async def complete(self, request):
            request.transport.close()
            return web.Response()

    async with evaluation(tmp_path) as context:
        given = {"rubric": "r", "model": "m", "on_failure": "error"}
        known = replace(context, trajectory=replace(context.trajectory, traces=TRACES))
        with pytest.raises(EvaluatorError, match="2 attempts"):
            await JudgeEvaluator.from_config(given).evaluate(
                replace(known, open_model=Silent("x").open)
            )
        with pytest.raises(EvaluatorError, match="through a gateway, and there is none here"):
            await JudgeEvaluator.from_config(given).evaluate(known)


async def test_a_judge_that_does_not_answer_in_time_is_an_evaluator_error(tmp_path):
    class Slow(Model):
        async def complete(self, request):
            await asyncio.sleep(1)  # the server's end waits for it
            return await super().complete(request)

    given = {"rubric": "r", "model": "m", "on_failure": "error", "timeout_s": 0.1}
    async with evaluation(tmp_path) as context:
        known = replace(context, trajectory=replace(context.trajectory, traces=TRACES))
        with pytest.raises(EvaluatorError, match=r"2 attempts: it did not answer within 0\.1 s"):
            await JudgeEvaluator.from_config(given).evaluate(
                replace(known, open_model=Slow(GOOD).open)
            )


async def test_judge_in_process_mode_refuses_a_session_without_traces(tmp_path):
    with pytest.raises(EvaluatorError, match="the session has no trace"):
        await judged(tmp_path, GOOD, traces=(), mode="process")


@pytest.mark.parametrize(
    "text",
    ["", "1", "[]", '{"score": "1"}', '{"score": true}', '{"score": 2}', '{"score": NaN}',
     'Sure: {"score": 1}', '{"score": 1} {"score": 0}'],
)  # fmt: skip
def test_a_judge_answer_must_be_one_json_object_with_a_score_in_range(text):
    with pytest.raises(EvaluatorError, match="no JSON object with a score"):
        parse_answer(text, 0, 1)


@pytest.mark.parametrize("scores", ["[1]", "[1, 0, 1]", "[1, 2]", "[1, null]", "1", "null"])
def test_a_judge_answer_on_turns_must_have_one_score_in_range_for_each(scores):
    assert parse_answer('{"scores": [1, 0]}', 0, 1, turns=2)["scores"] == [1, 0]
    with pytest.raises(EvaluatorError, match="no JSON object with 2 scores"):
        parse_answer(f'{{"scores": {scores}}}', 0, 1, turns=2)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "on_failure: Field required"),
        ({"on_failure": "zero"}, "on_failure"),
        ({"on_failure": 0, "low": 1, "high": 1}, "low = 1, must be less than high = 1"),
    ],
)
def test_judge_config_requires_on_failure_and_low_below_high(config, why):
    with pytest.raises(ConfigError, match=why):
        JudgeEvaluator.from_config({"rubric": "r", "model": "m", **config})


def test_text_beyond_the_limit_keeps_its_beginning_and_its_end():
    assert cut("short", 10) == "short"
    shown = cut("a" * 600 + "b" * 600, 1000)
    assert shown.startswith("a" * 500 + "\n[200 characters left out]")
    assert shown.endswith("b" * 500)
    assert json.dumps(shown)


async def test_judge_request_after_a_429_waits_for_the_retry_after_time(tmp_path):
    result, model = await judged(tmp_path, 429, GOOD)
    assert result.reward == 0.75
    first, second = model.times
    assert second - first >= 1

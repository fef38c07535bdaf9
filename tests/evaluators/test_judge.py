import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace

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


async def test_a_session_is_shown_whole_and_scored_once(tmp_path):
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


async def test_each_trace_is_scored_on_its_own(tmp_path):
    answers = '{"score": 1}', '```json\n{"score": 0}\n```'
    found, model = await judged(tmp_path, *answers, mode="process", coefficient=0.5)
    assert (found.reward, found.trace_rewards) == (0.25, (0.5, 0.0))
    assert len(model.asked) == 2


async def test_an_answer_that_cannot_be_read_is_asked_for_again(tmp_path):
    found, model = await judged(tmp_path, "I think 1", 503, GOOD, attempts=3)
    assert found.reward == 0.75
    assert len(model.asked) == 3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("good", r"grader' \(2 attempts\): no JSON object with a score from 0 to 1: 'good'"),
        (404, "HTTP 404: no such model"),
        ({"choices": []}, "no chat completion"),
    ],
)
async def test_a_judge_that_fails_means_what_the_task_says(tmp_path, answer, why):
    with pytest.raises(EvaluatorError, match=why):
        await judged(tmp_path, answer)
    (tmp_path / "again").mkdir()
    found, _ = await judged(tmp_path / "again", answer, on_failure=0.5)
    assert found.reward == 0.5
    assert "judge_failed" in found.metadata


async def test_a_judge_that_never_answers_times_out(tmp_path):
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
        with pytest.raises(EvaluatorError, match="there is no gateway here"):
            await JudgeEvaluator.from_config(given).evaluate(known)


async def test_a_session_without_a_trace_has_no_process_to_judge(tmp_path):
    with pytest.raises(EvaluatorError, match="no trace to judge"):
        await judged(tmp_path, GOOD, traces=(), mode="process")


@pytest.mark.parametrize(
    "text",
    ["", "1", "[]", '{"score": "1"}', '{"score": true}', '{"score": 2}', '{"score": NaN}',
     'Sure: {"score": 1}', '{"score": 1} {"score": 0}'],
)  # fmt: skip
def test_only_one_object_with_a_score_in_its_range_is_an_answer(text):
    with pytest.raises(EvaluatorError, match="no JSON object with a score"):
        parse_answer(text, 0, 1)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "on_failure: Field required"),
        ({"on_failure": "zero"}, "on_failure"),
        ({"on_failure": 0, "low": 1, "high": 1}, "low 1 must be less than high 1"),
    ],
)
def test_what_its_failure_means_must_be_said(config, why):
    with pytest.raises(ConfigError, match=why):
        JudgeEvaluator.from_config({"rubric": "r", "model": "m", **config})


def test_what_is_too_long_keeps_its_beginning_and_its_end():
    assert cut("short", 10) == "short"
    shown = cut("a" * 600 + "b" * 600, 1000)
    assert shown.startswith("a" * 500 + "\n[200 characters left out]")
    assert shown.endswith("b" * 500)
    assert json.dumps(shown)


async def test_a_busy_judge_is_asked_again_when_it_says(tmp_path):
    result, model = await judged(tmp_path, 429, GOOD)
    assert result.reward == 0.75
    first, second = model.times
    assert second - first >= 1

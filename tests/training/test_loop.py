"""The loop with groups that are played by the policy itself, without a gateway."""

import asyncio
import copy
import math
import threading
import time
from dataclasses import replace

import pytest
import torch
import transformers
from structlog.testing import capture_logs
from tests.training.made import VOCABULARY, group, session, tiny_model, trace

from bridle.config import builtin_tokenizer_dir
from bridle.errors import EngineError, TrainingError
from bridle.training.groups import HeldOutEvaluation, History
from bridle.training.grpo import Learner
from bridle.training.loop import Course, Loop, checkpoints, read_state, restore
from bridle.training.settings import GrpoSettings, LoopSettings

TOKENIZER = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_tokenizer_dir())
GOOD = torch.arange(VOCABULARY) % 3 == 0
"""The tokens that are worth something."""


class Player:
    """A source that samples one token per session from the weights it was given last.

    Group `n` is a function of `n` and of the weights when it begins.
    """

    def __init__(self, model, *, size=6, cursor=None):
        self.model = copy.deepcopy(model)
        self.version = 0
        self.size = size
        self.next = (cursor or {}).get("next", 0)
        self.most = 0
        self.keeps = []
        self._allowed = 0
        self._ready = []

    async def publish(self, learner):
        self.model.load_state_dict(learner.model.state_dict())
        self.version = learner.version

    def allow(self, groups):
        self._allowed += groups

    async def take(self):
        assert self._allowed > 0 or self._ready, "the loop waits for a group it did not allow"
        while self._allowed:
            self._allowed -= 1
            self._ready.append(self._play(self.next))
            self.next += 1
        self.most = max(self.most, len(self._ready))
        return self._ready.pop(0)

    def _play(self, number):
        prompt = [2, 3, 10 + number % 5]
        with torch.no_grad():
            logprobs = self.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        drawn = torch.Generator().manual_seed(number)
        ids = torch.multinomial(logprobs.exp(), self.size, replacement=True, generator=drawn)
        return group(
            *(
                session(
                    float(GOOD[one]),
                    trace(prompt, [one], logprobs=[logprobs[one]], version=self.version),
                )
                for one in ids.tolist()
            ),
            index=number,
            task_id=f"t{number % 5}",
        )

    async def evaluate(self):
        with torch.no_grad():
            chances = self.model(torch.tensor([[2, 3, 10]])).logits[0, -1].softmax(-1)
        return HeldOutEvaluation(float(chances[GOOD].sum()), 1, 0, {})

    def cursor(self):
        return {"next": self.next - len(self._ready)}

    async def kept(self):
        self.keeps.append(self.next)


def loop(folder, learner, source, state=None, **settings):
    given = {"steps": 6, "groups_per_step": 4, "max_lag": 0, "checkpoint_every": 3}
    return Loop(
        learner=learner,
        source=source,
        publish=source.publish,
        settings=LoopSettings.model_validate({**given, **settings}),
        tokenizer=TOKENIZER,
        checkpoints=folder,
        history=History.of((state or {}).get("history", {})),
        course=Course(**state["course"]) if state else Course(),
    )


def learner(**settings):
    """A tiny policy whose good token has a fair chance at the start."""
    model = tiny_model(3)
    return Learner(model, GrpoSettings.model_validate({"learning_rate": 2e-2, **settings}))


def weights(one):
    return torch.cat([p.detach().flatten() for p in one.model.parameters()])


async def test_the_training_loop_improves_a_policy_and_reports_each_step(tmp_path):
    policy = learner()
    answer = []
    made = loop(tmp_path, policy, Player(policy.model, size=12), steps=12, evaluate_every=5)
    made.tell = lambda course: answer.append((course.step, len(course.evaluations)))

    course = await made.run()

    evaluations = [(one["step"], one["reward"]) for one in course.evaluations]
    assert [step for step, _ in evaluations] == [0, 5, 10, 12]
    assert evaluations[0][1] < 0.6
    assert evaluations[-1][1] > 0.8
    assert [one["step"] for one in course.steps] == list(range(1, 13))
    assert answer[0] == (0, 1)
    assert len(answer) == 12 + 4
    updates = [one["update"] for one in course.steps if one["update"]]
    assert max(update["logprob_error"] for update in updates) < 1e-4
    assert all(update["lags"].keys() == {"0"} for update in updates)
    assert sum(record.sessions for record in made.history.records.values()) == 12 * 4 * 12


class Watched(Learner):
    """Notes the thread of each update."""

    def update(self, batch):
        self.threads = [*getattr(self, "threads", ()), threading.get_ident()]
        return super().update(batch)


async def test_all_updates_run_in_one_thread_outside_the_event_loop(tmp_path):
    policy = Watched(tiny_model(3), GrpoSettings(learning_rate=2e-2))
    made = loop(tmp_path, policy, Player(policy.model, size=12))
    made.tell = lambda _: asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.1)
    await made.run()
    first, *others = policy.threads
    assert len(others) > 1
    assert {*others} == {first}
    assert first != threading.get_ident()


ON_GPU = {"packing": "sequence", "dtype": "bfloat16", "gradient_checkpointing": True}
"""What the guide recommends there."""


@pytest.mark.parametrize("settings", [{}, ON_GPU], ids=["plain", "as on a GPU"])
async def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, settings):
    whole = learner(**settings)
    await loop(tmp_path / "whole", whole, Player(whole.model)).run()

    first = learner(**settings)
    await loop(tmp_path / "parts", first, Player(first.model), steps=3).run()
    [saved] = checkpoints(tmp_path / "parts")
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    second = Learner(model, first.settings)
    state = restore(second, saved)
    source = Player(second.model, cursor=state["cursor"])
    await source.publish(second)
    resumed = loop(tmp_path / "parts", second, source, state)
    course = await resumed.run()

    assert source.keeps == [24, 24]
    assert not torch.equal(weights(first), weights(whole))
    assert torch.equal(weights(second), weights(whole))
    assert [one["step"] for one in course.steps] == [1, 2, 3, 4, 5, 6]
    ends = [read_state(checkpoints(tmp_path / name)[-1]) for name in ("whole", "parts")]
    for end in ends:
        for one in end["course"]["steps"]:
            del one["waited_s"], one["published_s"]
            one["update"] = one["update"] and {**one["update"], "seconds": 0}
    ends[1]["course"]["evaluations"] = ends[0]["course"]["evaluations"]  # one more, at the stop
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("version", "message"),
    [(-1, "engine did not say which weights sampled"), (9, "the weights of another one")],
)
async def test_sessions_of_no_known_policy_version_end_the_training_with_an_error(
    tmp_path, version, message
):
    policy = learner()
    source = Player(policy.model)
    source.version = version
    with pytest.raises(TrainingError, match=message):
        await loop(tmp_path, policy, source).run()


@pytest.mark.parametrize("lag", [0, 1, 3])
async def test_rollouts_run_ahead_of_training_by_at_most_max_lag(tmp_path, lag):
    policy = learner(flat_groups="keep")
    source = Player(policy.model)
    course = await loop(tmp_path, policy, source, max_lag=lag, steps=8, checkpoint_every=0).run()

    lags = {int(one) for step in course.steps for one in step["update"]["lags"]}
    assert max(lags) == lag
    assert source.next == 8 * 4
    assert source.most == (1 + lag) * 4


async def test_flat_groups_are_replaced_with_setting_refill(tmp_path):
    policy = learner(flat_groups="refill")
    source = Player(policy.model, size=3)
    course = await loop(tmp_path, policy, source, steps=2).run()

    for step in course.steps:
        assert step["groups"] - step["flat"] == 4
        assert step["left_out"] == {}
    assert source.next == sum(step["groups"] for step in course.steps) > 8


class Fixed(Player):
    """Always the same group."""

    def __init__(self, model, one, **more):
        super().__init__(model, **more)
        self.one = one

    def _play(self, number):
        return group(*self.one, index=number)


FAILED = session(None, status="ERROR", error="the harness could not start")


async def test_training_whose_sessions_all_fail_ends_with_their_errors(tmp_path):
    policy = learner()
    source = Fixed(policy.model, [FAILED, FAILED])
    with pytest.raises(
        TrainingError, match=r"12 groups in a row .*24 sessions .*ERROR.*could not start"
    ):
        await loop(tmp_path, policy, source, patience=3).run()
    assert len(checkpoints(tmp_path)) == 1


@pytest.mark.parametrize("flat_groups", ["drop", "refill"])
async def test_training_on_solved_tasks_ends_without_an_error_and_without_updates(
    tmp_path, flat_groups
):
    policy = learner(flat_groups=flat_groups)
    before = weights(policy)
    solved = session(1.0, trace([2], [3]))
    source = Fixed(policy.model, [solved, solved])

    course = await loop(tmp_path, policy, source, steps=4, patience=2).run()

    assert [one["update"] for one in course.steps] == [None] * 4
    assert torch.equal(weights(policy), before)
    assert source.next == 4 * (4 if flat_groups == "drop" else 4 + 2 * 4)


async def test_a_nan_loss_ends_the_training_with_a_checkpoint_of_the_last_good_weights(tmp_path):
    policy = learner()
    before = weights(policy)
    broken = trace([2], [3], logprobs=[math.nan])
    source = Fixed(policy.model, [session(1.0, broken), session(0.0, trace([2], [4]))])

    with pytest.raises(TrainingError, match="not a number"):
        await loop(tmp_path, policy, source).run()

    [saved] = checkpoints(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), before)


async def test_groups_of_a_step_that_failed_are_begun_again_by_the_resumed_training(tmp_path):
    policy = learner(flat_groups="keep")
    source = Player(policy.model)
    update = policy.update

    def fails(batch):
        if policy.version == 2:
            raise TrainingError("the loss is not a number")
        return update(batch)

    policy.update = fails
    with pytest.raises(TrainingError, match="not a number"):
        await loop(tmp_path, policy, source, max_lag=1).run()

    [saved] = checkpoints(tmp_path)
    state = read_state(saved)
    assert (state["step"], state["cursor"]) == (2, {"next": 2 * 4})
    assert sum(one["groups"] for one in state["history"].values()) == 2 * 4


async def test_weights_that_the_engine_refuses_are_in_a_checkpoint_that_resumes(tmp_path):
    policy = learner(flat_groups="keep")
    source = Player(policy.model)
    made = loop(tmp_path, policy, source, checkpoint_every=0)

    async def publish(given):
        if given.version == 2:
            raise EngineError("the weights don't fit the model: 1 missing")
        await source.publish(given)

    made.publish = publish
    with pytest.raises(EngineError, match="don't fit"):
        await made.run()

    [saved] = checkpoints(tmp_path)
    state = read_state(saved)
    assert [one["step"] for one in state["course"]["steps"]] == [1, 2]
    assert (state["step"], state["version"], state["cursor"]) == (2, 2, {"next": 8})
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    second = Learner(model, policy.settings)
    state = restore(second, saved)
    source = Player(second.model, cursor=state["cursor"])
    await source.publish(second)
    course = await loop(tmp_path, second, source, state, steps=3).run()
    assert [one["step"] for one in course.steps] == [1, 2, 3]
    assert course.steps[-1]["update"]["logprob_error"] < 1e-4


async def test_groups_without_sessions_end_the_training_after_the_patience(tmp_path):
    policy = learner()
    source = Fixed(policy.model, [])
    with pytest.raises(TrainingError, match=r"16 groups in a row .*of 0 sessions"):
        await loop(tmp_path, policy, source, patience=4, steps=9).run()
    [saved] = checkpoints(tmp_path)
    assert [one["reward"] for one in read_state(saved)["course"]["steps"]] == [None] * 3


async def test_a_batch_has_its_groups_in_start_order(tmp_path):
    policy = learner()

    class Shuffled(Player):
        async def take(self):
            taken = await super().take()
            self._ready.reverse()
            return taken

    batches = []
    update = policy.update

    def noted(batch):
        batches.append([sample.trace.prompt_ids[-1] for sample in batch.samples])
        return update(batch)

    policy.update = noted
    await loop(tmp_path, policy, Shuffled(policy.model), steps=1).run()
    assert [int(ids) for ids in batches[0]] == sorted(int(ids) for ids in batches[0])


class Rejected(Player):
    """A source whose harnesses reject so many of 100 sampled tokens."""

    rejected = 0

    def _play(self, number):
        made = super()._play(number)
        stats = {
            "tokens_captured": 100,
            "rejected": {"exchanges": 1, "tokens": self.rejected},
        }
        sessions = [replace(one, metadata={"stats": stats}) for one in made.sessions]
        return replace(made, sessions=tuple(sessions))


@pytest.mark.parametrize(("rejected", "warns"), [(25, False), (26, True)])
async def test_a_share_of_rejected_replies_above_a_quarter_is_warned_of_once(
    tmp_path, rejected, warns
):
    policy = learner()
    player = Rejected(policy.model)
    player.rejected = rejected
    with capture_logs() as logs:
        await loop(tmp_path, policy, player, steps=2).run()
    answer = [one["share"] for one in logs if one["event"] == "many_rejected_replies"]
    assert answer == ([0.26] if warns else [])

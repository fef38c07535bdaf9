"""Calls go to the policy, or to another engine by name, glob or kind, which never trains."""

import tracemalloc

import pytest
from tests.gateway.house import Caller, house, renderer, scripted, user

from bridle.capture.records import no_ids, no_logprobs
from bridle.capture.sqlite import SqliteStore
from bridle.config import ModelSpec, SamplingPolicy
from bridle.engines.base import EngineInfo, GenerateChunk
from bridle.errors import ConfigError
from bridle.gateway.models import Models, OtherModel, check_models, make_policy
from bridle.trajectory import rebuild
from bridle.types import DeliveryState, FinishReason, Kind, LogprobMode, Reply, Sampling

INFO = EngineInfo("policy", 1000, LogprobMode.RAW, token_in=True, version=0)
GREEDY = SamplingPolicy.model_validate({"temperature": {"mode": "override", "value": 0}})


def table(*others):
    models = Models(make_policy(scripted({"content": "a"}), INFO, renderer(), lambda: 0))
    for other in others:
        models.add(other, INFO)
    return models


def judge(name="judge", **spec):
    return OtherModel(name, ModelSpec(**spec), engine=scripted({"content": "b"}))


@pytest.mark.parametrize(
    ("model", "kind", "answers"),
    [
        ("anything", Kind.AGENT, None),
        ("judge", Kind.AGENT, "judge"),
        ("grader", Kind.AGENT, "judge"),
        ("gpt-4o-mini", Kind.AGENT, "*-mini"),
        ("gpt-4o-mini", Kind.SIDE, "*-mini"),
        ("special-mini", Kind.AGENT, "exact"),
        ("anything", Kind.SIDE, "sides"),
        ("anything", Kind.COMPACTION, None),
        ("GPT-4O-MINI", Kind.AGENT, None),
    ],
)
def test_exact_names_come_before_globs_before_kinds_before_the_policy(model, kind, answers):
    models = table(
        judge("*-mini"),
        judge("judge", match=("grader",)),
        judge("exact", match=("special-mini",)),
        judge("sides", kinds=("side",)),
    )
    for _ in range(2):
        assert models.find(model, kind).other == answers


def test_many_names_are_not_remembered_for_ever():
    models = table(judge("*-mini"))
    tracemalloc.start()
    try:
        for number in range(8000):
            name = f"{number}{'x' * 1000}-mini"
            assert models.find(name, Kind.AGENT).other == "*-mini"
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()


def test_another_model_samples_as_requested_and_a_policy_alias_as_configured():
    models = table(judge(), OtherModel("greedy", ModelSpec(sampling=GREEDY)))
    other, greedy = models.find("judge", Kind.AGENT), models.find("greedy", Kind.AGENT)
    asked = Sampling(temperature=0.3, top_p=0.5, seed=4)
    assert other.plan is not None
    effective = other.plan.effective(asked, budget=9, stop_token_ids=(), salt="s")
    assert (effective.temperature, effective.top_p, effective.seed) == (0.3, 0.5, 4)
    # The policy under another name: its tokens are the policy's, so they go on and train.
    assert greedy.other is None
    assert greedy.sampler is models.policy.sampler
    assert greedy.plan is not None
    assert greedy.plan.effective(asked, budget=9, stop_token_ids=(), salt="s").temperature == 0
    assert models.policy.plan is None


def test_a_recorded_model_name_finds_its_engine_or_else_the_policy():
    models = table(judge())
    assert models.of("judge").other == "judge"
    assert models.of(None) is models.policy
    assert models.of("gone") is models.policy


def test_only_exact_names_are_listed_and_each_once():
    models = table(judge("*-mini"), judge("judge", match=("grader", "x[1]")), judge("policy"))
    assert models.names() == ["policy", "judge", "grader"]


@pytest.mark.parametrize(
    ("models", "named"),
    [
        ([judge("a"), judge("b", match=("a",))], "'a' is already a name of 'a'"),
        ([OtherModel("idle", ModelSpec())], "models.idle: give"),
        ([judge("policy")], "models.policy: this name is the policy's own"),
    ],
)
def test_a_model_table_with_a_duplicate_idle_or_reserved_entry_is_a_config_error(models, named):
    with pytest.raises(ConfigError, match=named):
        check_models(models)
    check_models([judge("a"), judge("b")])


# ---- through a whole gateway


class TextOnly:
    """An engine that takes messages and gives text, as hosted models do."""

    def __init__(self):
        self.asked = []

    async def start(self):
        return EngineInfo("hosted", 500, LogprobMode.NONE, token_in=False, version=0)

    async def generate(self, request):
        self.asked.append(request)
        reply = Reply("fine", None, (), FinishReason.STOP)
        yield GenerateChunk(no_ids(), no_logprobs(), FinishReason.STOP, reply=reply)

    async def abort(self, request_id):
        pass

    async def health(self):
        pass

    async def aclose(self):
        pass


def other_says(text, name="judge", **spec):
    return OtherModel(name, ModelSpec(**spec), engine=scripted({"content": text}))


async def test_a_judge_answers_is_captured_and_never_trains():
    async with house({"content": "policy"}, models=[other_says("verdict")]) as home:
        caller = await home.session()
        assert (await caller.ask([user("a")]))["content"] == "policy"
        assert (await caller.ask([user("b")], model="judge"))["content"] == "verdict"
        policy, judged = caller.exchanges
        assert "other_model" not in policy.extra
        assert judged.extra["other_model"] == "judge"
        trajectory = rebuild(home.store.read(caller.session_id))
        stats = trajectory.metadata["stats"]
        assert stats["tokens_trained"] == len(policy.output_ids)
        assert stats["tokens_excluded"] == {"other_model": len(judged.output_ids)}


async def test_no_prompt_extends_the_tokens_of_another_engine():
    async with house({"content": "policy"}, models=[other_says("other", "sub-*")]) as home:
        caller = await home.session()
        said = [user("a")]
        for model in ("m", "sub-1", "sub-2", "m"):
            said += [await caller.ask(said, model=model), user("go on")]
        assert [e.root_reason for e in caller.exchanges] == [
            "first",
            "other_model",
            None,
            "other_model",
        ]
        # What continues what is known all the same.
        ids = [e.exchange_id for e in caller.exchanges]
        assert [e.continues for e in caller.exchanges] == [None, *ids[:3]]


async def test_the_same_messages_to_another_engine_are_no_retry():
    async with house({"content": "policy"}, models=[other_says("other")]) as home:
        caller = await home.session()
        retry = {"x-stainless-retry-count": "1"}
        first = await caller.ask([user("a")])
        second = await caller.ask([user("a")], retry, model="judge")
        assert (first["content"], second["content"]) == ("policy", "other")
        assert caller.delivery(0) is DeliveryState.DELIVERED


async def test_side_calls_are_routed_to_the_model_configured_for_their_kind():
    async with house(
        {"content": "policy"}, models=[other_says("side", "sides", kinds=("side",))]
    ) as home:
        caller = await home.session()
        body = {"model": "claude-x", "max_tokens": 1, "messages": [user("quota")]}
        url = home.gateway.url + "/v1/messages"
        headers = {**caller.headers, "User-Agent": "claude-cli/2.1.0 (external, cli)"}
        async with home.client.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200
        (exchange,) = caller.exchanges
        assert exchange.kind is Kind.SIDE
        assert exchange.extra["other_model"] == "sides"


async def test_a_policy_alias_samples_with_its_own_settings_and_extends_the_policy_s_tokens():
    greedy = OtherModel("greedy", ModelSpec(sampling=GREEDY))
    async with house({"content": "policy"}, models=[greedy]) as home:
        caller = await home.session()
        first = await caller.ask([user("a")])
        await caller.ask([user("a"), first, user("b")], model="greedy")
        assert [e.sampling.temperature for e in caller.exchanges] == [1.0, 0]
        assert caller.exchanges[1].parent_id == caller.exchanges[0].exchange_id


async def test_a_hosted_model_gets_messages_and_gives_text():
    engine = TextOnly()
    hosted = OtherModel("gpt-*", ModelSpec(model="gpt-4o"), engine=engine)
    async with house({"content": "policy"}, models=[hosted]) as home:
        caller = await home.session()
        assert (await caller.ask([user("a")], model="gpt-4o-mini"))["content"] == "fine"
        assert engine.asked[0].messages == [{"role": "user", "content": "a"}]
        assert engine.asked[0].model == "gpt-4o"
        (exchange,) = caller.exchanges
        assert (len(exchange.output_ids), exchange.logprob_mode) == (0, LogprobMode.NONE)


async def test_models_are_listed_and_have_their_own_metrics():
    async with house({"content": "a"}, models=[other_says("b"), other_says("c", "x-*")]) as home:
        caller = await home.session()
        url = home.gateway.url + "/v1/models"
        async with home.client.get(url, headers=caller.headers) as answer:
            listed = [one["id"] for one in (await answer.json())["data"]]
        assert listed == ["scripted", "judge"]
        _, text = await home.control("GET", "/metrics")
        assert 'bridle_replica_up{model="judge",replica="engine"} 1.0' in text


async def test_a_session_continues_after_a_restart_with_or_without_its_second_model(tmp_path):
    async with await SqliteStore.open(tmp_path / "c.sqlite") as store:
        async with house({"content": "p"}, store=store, models=[other_says("o")]) as home:
            caller = await home.session("s1")
            said = [user("a"), await caller.ask([user("a")], model="judge"), user("b")]
        for models, reason in (([other_says("o")], None), ([], "other_model")):
            async with house({"content": "p"}, store=store, models=models) as home:
                again = Caller(home, caller.handle)
                again.url = f"{home.gateway.url}/s/s1/v1/chat/completions"
                await again.ask(said, model="judge")
                assert again.exchanges[-1].root_reason == reason

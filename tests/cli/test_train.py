"""`bridle train` from flags and files, with a model that knows nothing: all of it but success."""

import io
import json
import sys

import pytest
from examples.demo.lookups import lookups
from examples.demo.policy import lookup_task
from tests.cli.models import untrained
from tests.training.mixture import save_mixture

from bridle.bridges.parquet import read_logprobs
from bridle.cli.terminal import console
from bridle.cli.train import load_settings, numbers_line, show_course, show_transfer
from bridle.errors import ConfigError
from bridle.training.loop import Course, checkpoints, read_state

ANTHROPIC_AGENT = """
import json, os, sys, urllib.request
body = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
    json.dumps(body).encode(),
    {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "content-type": "application/json"},
)
with urllib.request.urlopen(request) as answer:
    blocks = json.load(answer)["content"]
open("answer.txt", "w").write("".join(block.get("text", "") for block in blocks))
"""
"""A second small harness: one question in another dialect, without a tool."""


@pytest.fixture
def lookup_file(tmp_path):
    """Two lookups as a task file."""
    path = tmp_path / "lookups.jsonl"
    made = [lookup_task(task, tmp_path / "files") for task in lookups(2, seed=5)]
    path.write_text("".join(task.model_dump_json() + "\n" for task in made))
    return path


def config(folder, text):
    path = folder / "train.toml"
    path.write_text(text)
    return path


def test_flags_override_the_train_file_and_the_file_overrides_defaults(tmp_path):
    path = config(
        tmp_path,
        'model = "m"\ntasks = "t"\nsamples = 4\n[grpo]\nkl = 0.1\n[loop]\nsteps = 3\nmax_lag = 0\n',
    )
    flags = {"model": None, "samples": 6, "loop": {"steps": 5}, "grpo": {"learning_rate": None}}

    settings = load_settings(path, flags)

    assert (settings.model, settings.samples, settings.grpo.kl) == ("m", 6, 0.1)
    assert (settings.loop.steps, settings.loop.max_lag) == (5, 0)
    assert settings.grpo.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('tasks = "t"', "model"),
        ('model = "m"\ntasks = "t"\n[grpo]\nlearnig_rate = 1', "learnig_rate"),
        ('model = "m"\ntasks = "t"\ngrpo = 3', "grpo"),
    ],
)
def test_an_invalid_train_file_is_refused_with_the_file_and_the_key(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        load_settings(config(tmp_path, text), {"grpo": {"learning_rate": None}})
    assert "train.toml" in str(raised.value)


def test_train_without_a_model_is_refused(say, tmp_path):
    said = say("train", "--tasks", tmp_path, "--out", tmp_path / "out")
    assert said.code == 2
    assert "model" in said.err


@pytest.mark.timeout(180)
def test_a_training_runs_and_resumes_where_it_ended(say, lookup_file, tmp_path):
    model = untrained(tmp_path / "model")
    (tmp_path / "agent.py").write_text(ANTHROPIC_AGENT)
    command = f"{sys.executable} {tmp_path / 'agent.py'} {{instruction}}"
    other = config(
        tmp_path, f'[evaluate_with.other]\nharness = "command"\ncommand = {json.dumps(command)}\n'
    )
    flags = [
        *("train", other, "--model", model, "--tasks", lookup_file, "--held-out", lookup_file),
        *("--out", tmp_path / "out", "--samples", 2, "--groups", 1, "--max-lag", 0, "--json"),
        *("--learning-rate", "1e-3"),
    ]

    first = say(*flags, "--steps", 1)
    again = say(*flags, "--steps", 2)
    more = say(*flags, "--steps", 2, "--resume")

    assert (first.code, more.code) == (0, 0), first.err + more.err
    assert again.code == 2
    assert "--resume" in again.err
    assert [one["step"] for one in first.json["steps"]] == [1]
    assert [one["step"] for one in more.json["steps"]] == [1, 2]
    assert [one["sessions"] for one in more.json["steps"]] == [2, 2]
    assert [one["step"] for one in more.json["evaluations"]] == [0, 1, 2]
    others = [one["others"] for one in more.json["evaluations"]]
    assert [{name: one["sessions"] for name, one in of.items()} for of in others] == [
        {"other": 2}
    ] * 3
    assert (tmp_path / "out" / "checkpoints" / "step-000002" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "out" / "course.json").read_text()) == {
        "steps": more.json["steps"],
        "evaluations": more.json["evaluations"],
    }
    runs = sorted(path.name for path in (tmp_path / "out" / "rollouts").iterdir())
    assert runs == ["000", "001"]
    summary = json.loads((tmp_path / "out" / "rollouts" / "000" / "summary.json").read_text())
    played = [one for one in summary["sessions"] if one["task_id"].startswith("other:")]
    assert [(one["status"], one["exchanges"]) for one in played] == [("COMPLETED", 1)] * 4


@pytest.mark.timeout(180)
def test_resume_and_certify_keep_the_expert_routing_setting_of_the_first_training(
    say, lookup_file, tmp_path
):
    model, out = save_mixture(tmp_path / "model", ties=True), tmp_path / "out"
    path = config(tmp_path, '[grpo]\nreplay_experts = false\nflat_groups = "keep"\n')
    flags = ("train", path, "--model", model, "--tasks", lookup_file, "--out", out, "--samples", 2)

    for more in (("--steps", 1), ("--steps", 2, "--resume")):
        assert (said := say(*flags, "--groups", 1, "--json", *more)).code == 0, said.err

    saved = checkpoints(out / "checkpoints")
    assert [read_state(one)["replay_experts"] for one in saved] == [False, False]
    found = []
    for one in (saved[0], model):
        file = tmp_path / "l.parquet"
        say("certify", out / "rollouts" / "001", "--model", one, "--write", file)
        found.append(read_logprobs(file)[1].experts)
    assert found == ["routed", "replayed"]


@pytest.mark.timeout(180)
def test_a_lora_training_resumes_only_with_its_own_lora_settings(say, lookup_file, tmp_path):
    model, out = untrained(tmp_path / "model"), tmp_path / "out"
    path = config(tmp_path, "[lora]\nrank = 2\n")
    flags = [
        *("train", "--model", model, "--tasks", lookup_file, "--held-out", lookup_file),
        *("--out", out, "--samples", 2, "--groups", 1, "--json"),
    ]

    first = say(*flags, path, "--lora", "--steps", 1)
    full = say(*flags, "--steps", 2, "--resume")
    wider = say(*flags, "--lora", "--steps", 2, "--resume")
    more = say(*flags, path, "--steps", 2, "--resume")

    assert (first.code, full.code, wider.code, more.code) == (0, 2, 2, 0), first.err + more.err
    assert "holds a training of an adapter: give --lora" in full.err
    assert "'rank': 2" in wider.err
    saved = out / "checkpoints" / "step-000002"
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 2
    assert not (saved / "model.safetensors").exists()
    assert [one["step"] for one in more.json["evaluations"]] == [0, 1, 2]


def test_success_rate_with_each_harness_is_printed_as_a_table():
    course = Course(
        evaluations=[
            {"step": 0, "reward": 0.25, "sessions": 8, "others": {"b": {"reward": 0.5}}},
            {
                "step": 4,
                "reward": 0.75,
                "sessions": 8,
                "others": {"b": {"reward": 0.5, "sessions": 8}, "c": {"sessions": 8}},
            },
        ]
    )
    written, before = io.StringIO(), console.file
    console.file = written
    try:
        show_transfer(course)
        show_transfer(Course(evaluations=[{"step": 0, "reward": 0.5, "sessions": 1}]))
    finally:
        console.file = before
    rows = [line.split() for line in written.getvalue().splitlines() if "\u2502" in line]
    assert [[word for word in row if word != "\u2502"] for row in rows] == [
        ["the", "trained", "one", "25.0%", "75.0%", "+50.0%", "8"],
        ["b", "50.0%", "50.0%", "+0.0%", "8"],
        ["c", "8"],
    ]


def test_held_out_rewards_are_printed_with_their_95_percent_intervals():
    """Courses of earlier versions have none."""
    held = [{"step": n, "reward": n / 4, "sessions": 8} for n in (1, 3)]
    written, before = io.StringIO(), console.file
    console.file = written
    try:
        show_course(Course(evaluations=held))
        without = written.getvalue()
        show_course(Course(evaluations=[one | {"half_width": 0.125} for one in held]))
    finally:
        console.file = before
    assert "held-out tasks: 25.0% at step 1, 75.0% at step 3 (8 sessions)" in without
    assert "interval" not in without
    assert "95% intervals of these, in points: ± 12.5 and ± 12.5" in written.getvalue()


def test_training_summary_sums_tokens_and_takes_the_largest_logprob_difference():
    update = {"tokens": 5, "logprob_error": 1e-6}
    course = Course(
        steps=[
            {"sessions": 4, "update": update},
            {"sessions": 4, "update": None, "left_out": {"stale": 2, "unversioned": 1}},
            {"sessions": 4, "update": {"tokens": 7, "logprob_error": None}},
        ]
    )
    assert numbers_line(course) == (
        "2 updates from 12 sessions and 12 tokens that trained; trainer and rollout logprobs "
        "differ by at most 1.0e-06; left out: 2 sessions older than max_lag; left out: 1 sessions "
        "without a policy version from the engine"
    )

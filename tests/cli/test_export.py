"""`bridle rebuild`, `export` and `generate`: trajectory files and data sets."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from contextlib import contextmanager
from queue import Queue

import pytest
from examples.demo.tasks import demo_script, demo_tasks, write_task
from tests.capture.made import MadeSession

from bridle.bridges.examples import Rules
from bridle.bridges.parquet import read_trajectories
from bridle.capture.sqlite import SqliteStore
from bridle.cli.export import _counts, _missing
from bridle.config import FieldPolicy, SamplingPolicy, Task
from bridle.datasets.jsonl import load_tasks
from bridle.engines import open_engine
from bridle.scripted.server import EngineServer


@pytest.fixture
def export(say, finished_run, tmp_path):
    """Export the finished run in a form: what was said, and the lines."""

    def call(form, *options):
        out = tmp_path / f"{form}.out"
        said = say("export", finished_run, "--format", form, "--out", out, *options, "--json")
        text = "" if form == "parquet" or said.code else out.read_text()
        return said, [json.loads(line) for line in text.splitlines()]

    return call


def test_every_export_format_holds_every_session(say, finished_run, tmp_path, export):
    lines = say("export", finished_run, "--format", "jsonl", "--out", tmp_path / "t.jsonl")
    parquet, _ = export("parquet")
    sft, examples = export("sft")
    atif, documents = export("atif")

    assert lines.code == 0
    assert "3 of 3 tasks have accepted sessions" in lines.out
    assert (tmp_path / "t.jsonl").read_bytes() == (finished_run / "trajectories.jsonl").read_bytes()
    assert parquet.json["traces"] == len(read_trajectories(tmp_path / "parquet.out")) == 3
    assert sft.json["examples"] == 3
    assert [m["role"] for m in examples[0]["messages"]] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert atif.json["documents"] == len(documents) == 3
    assert sft.json["statistics"]["accepted"] == 3
    assert sft.json["statistics"]["sources"]["tasks / command"]["turns_mean"] == 2


def test_a_file_that_exists_is_refused_and_left_as_it_is(say, finished_run):
    facts = finished_run / "capture.sqlite"
    before = facts.read_bytes()
    said = say("export", finished_run, "--format", "jsonl", "--out", facts)
    assert said.code == 2
    assert "capture.sqlite exists already; name another file" in " ".join(said.err.split())
    assert facts.read_bytes() == before


def test_export_filters_leave_sessions_out_and_count_them(export):
    sft, examples = export("sft", "--min-reward", 1.5)
    parquet, _ = export("parquet", "--turns", "3:")
    lines, kept = export("jsonl", "--turns", ":2", "--unique", "--keep", 1, "--finish", "stop")

    assert (sft.json["examples"], sft.json["rejected"], examples) == (0, 3, [])
    assert sft.json["statistics"]["rejected"] == {"reward": 3}
    assert parquet.json["traces"] == 0
    assert (len(kept), lines.json["statistics"]["accepted"]) == (3, 3)


def test_rejected_sessions_are_reported_with_their_reason(say, finished_run, tmp_path):
    said = say(
        "export", finished_run, "--format", "sft", "--out", tmp_path / "s.jsonl",
        "--max-repetition", 0, "--max-tokens", 1,
    )  # fmt: skip
    assert "rejected: length 3" in said.out


def test_groups_with_equal_rewards_give_no_preference_pairs(export):
    said, lines = export("pairs")
    assert (said.json["pairs"], said.json["left_out"], lines) == (0, {"flat": 3}, [])


def test_a_malformed_turns_range_is_refused(export):
    for wrong in ("3", "a:"):
        said, _ = export("sft", "--turns", wrong)
        assert said.code == 2
        assert "is not MIN:MAX" in said.err


def test_a_turns_range_that_no_session_is_in_is_refused(export):
    said, _ = export("sft", "--turns", "5:2")
    assert said.code == 2
    assert "--turns '5:2': MIN is greater than MAX" in said.err


def test_rebuild_with_the_same_builder_writes_identical_files(say, finished_run, tmp_path):
    said = say("rebuild", finished_run, "--out", tmp_path)

    assert said.code == 0
    for name in ("trajectories.jsonl", "trajectories.parquet"):
        assert (tmp_path / name).read_bytes() == (finished_run / name).read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_rebuild_with_per_request_needs_only_the_capture_file_and_gives_a_trace_per_exchange(
    say, finished_run, tmp_path
):
    said = say(
        "rebuild", finished_run / "capture.sqlite", "--builder", "per_request", "--out", tmp_path,
        "--json",
    )  # fmt: skip

    assert said.json["traces"] == said.json["exchanges"] == 6


def test_rebuild_refuses_an_unknown_builder_with_the_known_ones(say, finished_run):
    said = say("rebuild", finished_run, "--builder", "magic")

    assert said.code == 2
    assert "'magic'" in said.err
    assert "prefix_merging" in said.err


def test_rebuild_combines_the_captures_of_all_gateway_workers(say, finished_run, tmp_path):
    for number in range(2):
        (tmp_path / f"worker-{number}").mkdir()
        shutil.copy(finished_run / "capture.sqlite", tmp_path / f"worker-{number}")

    said = say("rebuild", tmp_path, "--json")

    assert (said.json["sessions"], said.json["exchanges"]) == (6, 12)
    once = (finished_run / "trajectories.jsonl").read_bytes()
    assert (tmp_path / "rebuilt" / "trajectories.jsonl").read_bytes() == once * 2


@pytest.fixture
def generate(say, finished_run, tmp_path):
    """Generate from the three lookups, whose second is never answered rightly."""
    folder = finished_run.parent
    script = json.loads((folder / "script.json").read_text())
    script["conversations"][1]["turns"] = [{"content": "No idea."}]
    (tmp_path / "script.json").write_text(json.dumps(script))

    def call(*options):
        return say(
            "generate", folder / "tasks.jsonl", "--engine", f"scripted:{tmp_path / 'script.json'}",
            "--out", tmp_path / "data", *options,
        )  # fmt: skip

    return call


def lines(tmp_path):
    return [
        json.loads(line) for line in (tmp_path / "data" / "data.jsonl").read_text().split("\n")[:-1]
    ]


def test_generate_runs_tasks_filters_sessions_and_writes_statistics(generate, tmp_path):
    said = generate("--json")

    assert said.code == 0
    assert (said.json["examples"], said.json["rounds"]) == (2, 1)
    assert len(lines(tmp_path)) == 2
    parsed = json.loads((tmp_path / "data" / "statistics.json").read_text())
    assert (parsed["attempted"], parsed["accepted"], parsed["tasks_accepted"]) == (3, 2, 2)
    assert parsed["rejected"] == {"reward": 1}


def test_generate_does_not_run_finished_sessions_again(generate, tmp_path):
    first = generate("--first", 1, "--json")
    rest = generate("--json")
    again = generate("--format", "parquet", "--json")

    assert [said.json["rounds"] for said in (first, rest, again)] == [1, 2, 2]
    assert [said.json["sessions"] for said in (first, rest, again)] == [1, 3, 3]
    run = json.loads((tmp_path / "data" / "rounds" / "001" / "run.json").read_text())
    assert len(run["config"]["tasks"]) == 2
    assert (tmp_path / "data" / "data.parquet").is_file()


def test_generate_with_keep_samples_a_task_until_enough_sessions_are_accepted(generate, tmp_path):
    said = generate("--keep", 1, "--samples", 3, "--runtime", "local", "--first", 2, "--json")
    statistics = said.json["statistics"]
    assert (statistics["attempted"], statistics["accepted"]) == (1 + 3, 1)
    assert said.json["rounds"] == 3


def test_generate_with_another_harness_does_not_use_the_command_of_the_task(generate):
    assert generate("--harness", "command").code == 2


@contextmanager
def hosted(script):
    """A server of chat completions in a thread; its URL."""
    started: Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def serve():
        end = asyncio.Event()
        engine = open_engine(f"scripted:{script}")
        async with EngineServer(engine, host="127.0.0.1", port=0) as server:
            started.put((server.url, asyncio.get_running_loop(), end))
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, loop, end = started.get(timeout=15)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


def test_a_hosted_model_gives_examples_with_messages_and_no_token_ids(say, finished_run, tmp_path):
    with hosted(finished_run.parent / "script.json") as url:
        said = say(
            "generate", finished_run.parent / "tasks.jsonl", "--first", 1, "--json",
            "--engine", f"openai:{url}/v1#any", "--tokenizer", "builtin", "--allow-untokenized",
            "--out", tmp_path / "data",
        )  # fmt: skip
    assert said.code == 0, said.err
    assert (said.json["examples"], said.json["texts"]) == (1, 1)
    (line,) = lines(tmp_path)
    assert [message["role"] for message in line["messages"]] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert line["messages"][1]["tool_calls"][0]["function"]["name"] == "cat"
    assert (line["input_ids"], line["loss_mask"]) == (None, None)


def test_generate_exits_with_code_1_if_no_session_is_accepted(generate):
    said = generate("--min-reward", 2, "--first", 1)
    assert said.code == 1
    assert "rejected: reward 1" in said.out


def test_a_rejected_reply_is_left_out_of_the_data_set(say, finished_run, tmp_path):
    async def play():
        made = MadeSession(metadata={"harness": "command"})
        first = made.call()
        made.call(new=first.suffix_ids)
        made.end(reward=1.0)
        async with await SqliteStore.open(rounds / "capture.sqlite") as store:
            await made.write(store)

    rounds = tmp_path / "data" / "rounds" / "000"
    rounds.mkdir(parents=True)
    asyncio.run(play())
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "task-1", "instruction": "go"}')
    said = say(
        "generate", tmp_path / "tasks.jsonl", "--out", tmp_path / "data", "--json",
        "--engine", f"scripted:{finished_run.parent / 'script.json'}",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert said.json["statistics"]["examples_left_out"] == {"rejected": 1}
    assert (said.json["examples"], len(lines(tmp_path))) == (1, 1)


async def test_generate_repeats_sessions_that_were_killed_or_failed_in_infrastructure(tmp_path):
    async def played(name, **ended):
        made = MadeSession(name)
        made.call()
        if ended:
            made.end(**ended)
        folder = tmp_path / "rounds" / name
        folder.mkdir(parents=True)
        async with await SqliteStore.open(folder / "capture.sqlite") as store:
            await made.write(store)

    tasks = [Task(task_id="task-1", instruction="go"), Task(task_id="task-2", instruction="go")]

    def wanted(rules):
        return {
            t.task_id: t.num_samples for t in _missing(tasks, rules, 4, *_counts(tmp_path, rules))
        }

    assert wanted(Rules()) == {"task-1": 4, "task-2": 4}
    await played("a", reward=None, status="ERROR", cause="infrastructure")
    await played("b")
    await played("c", reward=1.0)
    await played("d", reward=None, status="ERROR", cause="harness_crash")
    assert wanted(Rules()) == {"task-1": 2, "task-2": 4}
    assert wanted(Rules(keep=1)) == {"task-2": 1}


@pytest.mark.train
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_sft_on_generated_sessions_teaches_the_demo_model_at_least_two_demo_tasks(say, tmp_path):
    from examples.demo.recipe import make_demo_model

    from bridle.training.sft import SftSettings
    from datasets import load_dataset

    chosen = [task for task in demo_tasks() if task.task_id.startswith(("find", "sum"))][:3]
    for task in chosen:
        write_task(task, tmp_path / "tasks")
    (tmp_path / "script.json").write_text(json.dumps(demo_script(chosen)))
    made = say(
        "generate", tmp_path / "tasks", "--harness", "mini_swe_agent", "--runtime", "local",
        "--engine", f"scripted:{tmp_path / 'script.json'}", "--out", tmp_path / "data", "--json",
    )  # fmt: skip
    assert (made.code, made.json["examples"]) == (0, 3), made.err

    rows = load_dataset(
        "json", data_files=made.json["file"], split="train", cache_dir=str(tmp_path / "cache")
    )
    roles = [message["role"] for message in rows[0]["messages"]]
    assert roles[:4] == ["system", "user", "assistant", "tool"]
    assert json.loads(rows[0]["tools"])
    rows.select_columns(["input_ids", "loss_mask"]).to_parquet(str(tmp_path / "set.parquet"))
    settings = SftSettings(epochs=48, batch_tokens=2048, learning_rate=1.5e-3, threads=1)
    model = make_demo_model(
        tmp_path / "set.parquet",
        tmp_path / "model",
        short=settings.model_copy(update={"max_steps": 1}),
        whole=settings.model_copy(update={"share_prefix": True}),
    )
    with (tmp_path / "likeliest.jsonl").open("w") as file:
        likeliest = SamplingPolicy(temperature=FieldPolicy(mode="override", value=0.0))
        for one in load_tasks(tmp_path / "tasks"):
            file.write(one.model_copy(update={"sampling": likeliest}).model_dump_json() + "\n")

    after = say(
        "run", tmp_path / "likeliest.jsonl", "--harness", "mini_swe_agent", "--runtime", "local",
        "--engine", f"embedded:{model}", "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    rewards = [line["reward"] for line in after.json["sessions"]]
    assert sum(rewards) >= 2, rewards

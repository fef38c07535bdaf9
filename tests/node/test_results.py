import json

import pytest
from tests.capture.made import MadeSession
from tests.conformance.memory import MemoryStore
from tests.node.house import task

from bridle.capture.records import Outcome, SessionRecord
from bridle.config import AgentSpec, Task
from bridle.errors import ConfigError, StoreError
from bridle.harnesses import open_harness
from bridle.node.base import Events, Installing
from bridle.node.results import RunFolder, result_from, summarise, uncaptured_result
from bridle.prompting.renderer import load_renderer
from bridle.prompting.texts import tokenizer_record
from bridle.trajectory import rebuild
from bridle.trajectory.result import trajectory_bytes
from bridle.types import Cause, SessionStatus

KEPT = {
    "harness": "pi",
    "harness_version": "1",
    "sample_index": 2,
    "task_metadata": {"a": 1},
    "runtime": "docker",
    "contains": True,
}
ENDED = {"timing": {"run": 1.5}, "exit_code": 0, "signal": None, "logs": {"stdout": "x.log"}}


async def captured(*session_ids, ended=None):
    """A store with sessions without calls; those in `ended` (all) have completed."""
    store = MemoryStore()
    for session_id in session_ids:
        await store.open_session(SessionRecord(session_id, 1.0, "t", KEPT))
        if ended is None or session_id in ended:
            outcome = Outcome(
                session_id, "COMPLETED", 2.0, 0.5, metadata={**ENDED, "evaluation": {"b": 2}}
            )
            await store.close_session(outcome)
    return store


async def test_every_field_of_a_session_result_is_read_from_capture():
    result = result_from((await captured("s")).read("s"))
    assert (result.session_id, result.task_id, result.sample_index) == ("s", "t", 2)
    assert (result.status, result.cause, result.reward) == ("COMPLETED", None, 0.5)
    assert (result.harness, result.harness_version) == ("pi", "1")
    assert (result.runtime, result.contains) == ("docker", True)
    for given in (result.json(), result.summary()):
        assert (given["runtime"], given["contains"]) == ("docker", True)
    assert (result.timing, result.exit_code, result.logs) == ({"run": 1.5}, 0, {"stdout": "x.log"})
    assert result.metadata == {"a": 1, "evaluation": {"b": 2}}


async def test_a_session_without_an_outcome_has_status_running():
    result = result_from((await captured("s", ended=())).read("s"))
    assert (result.status, result.cause, result.reward) == (SessionStatus.RUNNING, None, None)
    assert result.summary()["status"] == "RUNNING"


async def test_a_result_and_its_summary_are_plain_json():
    result = result_from((await captured("s")).read("s"))
    whole = json.loads(json.dumps(result.json()))
    assert whole["trajectory"]["session_id"] == "s"
    polars = {"session_id", "task_id", "status", "trajectory", "timing", "node_id", "error"}
    assert whole.keys() >= polars | {"metadata", "reward"}
    assert (whole["status"], whole["harness"], whole["cause"]) == ("COMPLETED", "pi", None)
    line = json.loads(json.dumps(result.summary()))
    assert (line["tokens_captured"], line["merge_ratio"], line["traces"]) == (0, None, 0)


def test_a_session_missing_from_capture_has_a_result_with_its_outcome():
    outcome = Outcome("s", "ERROR", 2.0, None, cause="infrastructure", error="disk full")
    harness = open_harness(AgentSpec(harness="command", command="true"))
    result = uncaptured_result(task(), 3, harness, outcome)
    assert (result.cause, result.error, result.sample_index) == (
        Cause.INFRASTRUCTURE,
        "disk full",
        3,
    )
    assert result.harness == "command"


def test_a_break_has_both_texts_decoded_by_the_sessions_tokenizer():
    encode = load_renderer("builtin").tokenizer.encode
    made = MadeSession(metadata={**KEPT, "tokenizer": tokenizer_record("builtin")}, texts=False)
    made.call(new=encode("Count the red files."), output=encode(" Two."))
    edited = encode("Count the green files.")
    made.call(None, continues="x0", root_reason="history_edited", new=edited)

    (found,) = result_from(made.capture()).trajectory.metadata["stats"]["breaks"]

    assert found["position"] == 3
    assert found["texts"] == [" red files. Two.", " green files."]


def test_listeners_get_events_only_inside_their_block():
    events, one, two = Events(), [], []
    line = Installing("pi", "ready")
    events.tell(line)
    with events.listening(one.append):
        with events.listening(two.append):
            events.tell(line)
        events.tell(line)
    events.tell(line)
    assert (one, two) == ([line, line], [line])


def rebuilt(store):
    """The trajectories file as `bridle rebuild` writes it."""
    captures = [store.read(session.session_id) for session in store.sessions()]
    return b"".join(trajectory_bytes(rebuild(capture)) + b"\n" for capture in captures)


async def test_a_run_folder_records_the_configuration(tmp_path):
    with RunFolder.create(tmp_path / "runs" / "one", config={"engine": "x"}) as folder:
        facts = json.loads((folder.path / "run.json").read_text())
    assert facts["config"] == {"engine": "x"}
    assert facts["bridle"]
    assert folder.session_folder("s").parent == folder.path / "sessions"
    assert folder.capture.name == "capture.sqlite"
    assert folder.trajectories_parquet.name == "trajectories.parquet"
    folder.close()


async def test_appended_results_are_in_trajectories_jsonl_at_once(tmp_path):
    store = await captured("a", "b")
    with RunFolder.create(tmp_path / "run", config={}) as folder:
        folder.append(result_from(store.read("b")))
        assert json.loads(folder.trajectories.read_text())["session_id"] == "b"
        folder.append(result_from(store.read("a")))
        assert len(folder.trajectories.read_bytes().splitlines()) == 2


async def test_trajectories_jsonl_of_a_finished_run_equals_a_rebuild_byte_for_byte(tmp_path):
    store = await captured("a", "b", "killed", ended=("a", "b"))
    with RunFolder.create(tmp_path / "run", config={}) as folder:
        for session_id in ("b", "a"):
            folder.append(result_from(store.read(session_id)))
        summary = folder.finish(store)
        assert folder.trajectories.read_bytes() == rebuilt(store)
        assert folder.finish(store) == summary
        assert folder.trajectories.read_bytes() == rebuilt(store)
    assert [entry["session_id"] for entry in summary["sessions"]] == ["a", "b", "killed"]
    assert [entry["status"] for entry in summary["sessions"]] == ["COMPLETED"] * 2 + ["RUNNING"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


async def test_a_partial_line_of_a_failed_write_is_removed(tmp_path):
    store = await captured("a")
    with RunFolder.create(tmp_path / "run", config={}) as folder:
        folder.trajectories.write_bytes(b'{"torn')
        folder.append(result_from(store.read("a")))
        assert folder.trajectories.read_bytes() == rebuilt(store)


async def test_an_unwritable_file_is_a_store_error(tmp_path):
    store = await captured("a")
    with RunFolder.create(tmp_path / "run", config={}) as folder:
        folder.trajectories.mkdir()
        with pytest.raises(StoreError, match=r"trajectories\.jsonl: cannot write"):
            folder.append(result_from(store.read("a")))
        with pytest.raises(StoreError, match="cannot write"):
            folder.finish(store)


@pytest.mark.parametrize("name", ["run.json", "capture.sqlite", "trajectories.jsonl"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match="holds a run already; give another folder"):
        RunFolder.create(tmp_path, config={})


def test_a_folder_in_use_is_refused(tmp_path):
    with RunFolder.create(tmp_path, config={}) as folder:
        (folder.path / "run.json").unlink()
        with pytest.raises(ConfigError, match="in use by process"):
            RunFolder.create(tmp_path, config={})
    RunFolder.create(tmp_path, config={}).close()


def test_a_run_folder_below_a_file_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used as a run folder"):
        RunFolder.create(tmp_path / "file" / "run", config={})


def entry(status, reward, **more):
    numbers = {"exchanges": 2, "traces": 1, "tokens_captured": 9, "tokens_trained": 5}
    return {
        "status": status,
        "reward": reward,
        "cause": None,
        "tokens_excluded": {},
        **numbers,
        **more,
    }


def test_the_totals_count_every_session_and_only_known_rewards():
    sessions = [
        entry("COMPLETED", 1.0, tokens_excluded={"cut": 4}),
        entry("COMPLETED", 0.0, tokens_excluded={"cut": 2, "kind": 2}),
        entry("ERROR", None, cause="evaluator", exchanges=None, tokens_excluded=None),
    ]
    totals = summarise(sessions)["totals"]
    assert totals == {
        "sessions": 3,
        "status": {"COMPLETED": 2, "ERROR": 1},
        "cause": {"evaluator": 1},
        "scored": 2,
        "reward_mean": 0.5,
        "exchanges": 4,
        "traces": 3,
        "tokens_captured": 27,
        "tokens_trained": 15,
        "tokens_excluded": {"cut": 6, "kind": 2},
    }
    assert summarise([])["totals"]["reward_mean"] is None


async def test_a_folder_with_a_captured_session_is_never_discarded(tmp_path):
    from bridle.capture.records import SessionRecord
    from bridle.capture.sqlite import SqliteStore

    with RunFolder.create(tmp_path / "run", config={}) as folder:
        async with await SqliteStore.open(folder.capture) as store:
            await store.open_session(SessionRecord("s", 1.0))
        folder.discard_if_unused()

        assert folder.capture.exists()


async def test_a_folder_without_a_session_can_be_used_again(tmp_path):
    with RunFolder.create(tmp_path / "run", config={}) as folder:
        folder.discard_if_unused()

    RunFolder.create(tmp_path / "run", config={}).close()


async def test_an_uncaptured_session_is_in_the_summary_of_the_finished_run(tmp_path):
    store = await captured("a")
    lost = Outcome("lost", SessionStatus.ERROR, 2.0, None, cause=Cause.INFRASTRUCTURE, error="full")
    task = Task(task_id="t", instruction="x")
    harness = open_harness(AgentSpec(harness="empty"))
    with RunFolder.create(tmp_path / "run", config={}) as folder:
        folder.append(uncaptured_result(task, 0, harness, lost))
        folder.append(result_from(store.read("a")))
        summary = folder.finish(store)
        assert folder.finish(store) == summary
        assert [entry["session_id"] for entry in summary["sessions"]] == ["a", "lost"]
        assert len(folder.trajectories.read_bytes().splitlines()) == 2

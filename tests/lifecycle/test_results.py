import json

from tests.capture.made import MadeSession
from tests.lifecycle.house import task

from bridle.capture.records import Outcome, SessionRecord
from bridle.capture.store import MemoryStore
from bridle.config import AgentSpec
from bridle.harnesses import open_harness
from bridle.lifecycle.results import result_from, unrecorded
from bridle.prompting.renderer import load_renderer
from bridle.prompting.texts import tokenizer_record
from bridle.types import Cause, SessionStatus

KEPT = {"harness": "pi", "harness_version": "1", "sample_index": 2, "task_metadata": {"a": 1}}
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


async def test_everything_in_a_result_is_read_from_capture():
    result = result_from((await captured("s")).read("s"))
    assert (result.session_id, result.task_id, result.sample_index) == ("s", "t", 2)
    assert (result.status, result.cause, result.reward) == ("COMPLETED", None, 0.5)
    assert (result.harness, result.harness_version) == ("pi", "1")
    assert (result.timing, result.exit_code, result.logs) == ({"run": 1.5}, 0, {"stdout": "x.log"})
    assert result.metadata == {"a": 1, "evaluation": {"b": 2}}


async def test_a_killed_session_is_still_running():
    result = result_from((await captured("s", ended=())).read("s"))
    assert (result.status, result.cause, result.reward) == (SessionStatus.RUNNING, None, None)
    assert result.summary()["status"] == "RUNNING"


async def test_a_result_and_its_summary_are_plain_json():
    result = result_from((await captured("s")).read("s"))
    whole = json.loads(json.dumps(result.json()))
    assert whole["trajectory"]["session_id"] == "s"
    assert (whole["status"], whole["harness"], whole["cause"]) == ("COMPLETED", "pi", None)
    line = json.loads(json.dumps(result.summary()))
    assert (line["tokens_captured"], line["merge_ratio"], line["traces"]) == (0, None, 0)


def test_a_session_that_capture_does_not_hold_has_a_result_too():
    outcome = Outcome("s", "ERROR", 2.0, None, cause="infrastructure", error="disk full")
    harness = open_harness(AgentSpec(harness="command", command="true"))
    result = unrecorded(task(), 3, harness, outcome)
    assert (result.cause, result.error, result.sample_index) == (
        Cause.INFRASTRUCTURE,
        "disk full",
        3,
    )
    assert result.harness == "command"


def test_a_break_is_told_with_both_texts_by_the_sessions_own_tokenizer():
    encode = load_renderer("builtin").tokenizer.encode
    made = MadeSession(metadata={**KEPT, "tokenizer": tokenizer_record("builtin")}, texts=False)
    made.call(new=encode("Count the red files."), output=encode(" Two."))
    edited = encode("Count the green files.")
    made.call(None, continues="x0", root_reason="history_edited", new=edited)

    (found,) = result_from(made.capture()).trajectory.metadata["stats"]["breaks"]

    assert found["position"] == 3
    assert found["texts"] == [" red files. Two.", " green files."]

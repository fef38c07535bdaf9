from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.gateway.registry import SessionFacts
from bridle.node.results import (
    COMPLETED,
    ENGINE_CODES,
    Ending,
    Fault,
    blame,
    failed,
    judge,
    out_of_time,
    without_a_model,
)
from bridle.runtimes.base import ExecResult
from bridle.types import Cause, SessionStatus


def known(**changes):
    """Return the facts of a session that went well, with `changes`."""
    well = SessionFacts(
        session_id="s",
        calls=2,
        turns=2,
        delivered=2,
        failed_last=False,
        limit=None,
        tokens=9,
        last_error=None,
        last_error_code=None,
        sealed=True,
    )
    return replace(well, **changes)


def ended(exit_code=0, signal=None, stdout=b"", stderr=b""):
    return ExecResult(
        exit_code=exit_code,
        signal=signal,
        timed_out=False,
        stdout=stdout,
        stderr=stderr,
        truncated=False,
        duration_s=1.0,
    )


def facts_with(code, *, last=True):
    return known(failed_last=last, last_error="some error", last_error_code=code)


OVERFLOW = facts_with("context_length_exceeded")
BROKEN = facts_with("engine_error")
CRASH = Cause.HARNESS_CRASH
SPENT = known(limit="tokens", failed_last=True)


@pytest.mark.parametrize(
    ("result", "facts", "harness_cause", "status", "cause"),
    [
        (ended(), known(), None, "COMPLETED", None),
        (ended(), known(delivered=0, calls=0), None, "ERROR", Cause.HARNESS_NO_CALL),
        (ended(), known(delivered=0), None, "ERROR", Cause.HARNESS_NO_CALL),
        (ended(1), known(), CRASH, "ERROR", CRASH),
        (ended(None, 9), known(), CRASH, "ERROR", CRASH),
        (ended(), OVERFLOW, None, "ERROR", Cause.HARNESS_MODEL_ERROR),
        (ended(1), OVERFLOW, CRASH, "ERROR", CRASH),
        (ended(), BROKEN, None, "ERROR", Cause.INFRASTRUCTURE),
        (ended(1), BROKEN, Cause.HARNESS_CRASH, "ERROR", "infrastructure"),
        (ended(), facts_with("rate_limit"), None, "ERROR", Cause.INFRASTRUCTURE),
        (ended(None, 9), facts_with("session_busy"), CRASH, "ERROR", CRASH),
        (ended(), facts_with("engine_error", last=False), None, "COMPLETED", None),
        (ended(), known(limit="turns"), None, "TIMEOUT", Cause.LIMIT),
        (ended(1), SPENT, Cause.HARNESS_CRASH, "TIMEOUT", "limit"),
    ],
)  # fmt: skip
def test_exit_codes_limits_and_failed_calls_map_to_status_and_cause(
    result, facts, harness_cause, status, cause
):
    ending = judge(result, facts, harness_cause)
    assert (ending.status, ending.cause) == (status, cause)


def test_a_harness_that_needs_no_model_completes_with_exit_code_0_alone():
    silent = known(delivered=0, calls=0)
    assert without_a_model(judge(ended(), silent, None)) == COMPLETED
    assert without_a_model(judge(ended(1), silent, CRASH)).cause is CRASH


any_facts = st.builds(
    known,
    calls=st.integers(0, 3),
    delivered=st.integers(0, 3),
    failed_last=st.booleans(),
    limit=st.sampled_from([None, "turns"]),
    last_error=st.just("text"),
    last_error_code=st.sampled_from([None, *sorted(ENGINE_CODES), "not_found"]),
)


@given(any_facts, st.sampled_from([None, *Cause]), st.sampled_from([0, 1, None]))
def test_completed_needs_exit_0_a_delivered_turn_and_no_failed_last_call(facts, cause, code):
    ending = judge(ended(code, None if code is not None else 15), facts, cause)
    good = cause is None and facts.delivered > 0 and not facts.failed_last and facts.limit is None
    assert (ending == COMPLETED) == good
    assert (ending.error is None) == (ending == COMPLETED)


def test_a_reached_runtime_limit_is_the_cause_of_a_crash_but_not_of_a_clean_exit():
    over = judge(
        replace(ended(signal=9, exit_code=None), limit="memory"), known(), Cause.HARNESS_CRASH
    )
    assert (over.status, over.cause) == (SessionStatus.ERROR, Cause.LIMIT)
    assert (
        over.error == "the runtime's limit of memory was reached: the harness was ended by signal 9"
    )
    assert judge(replace(ended(), limit="processes"), known(), None) == COMPLETED


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (ended(2, stdout=b"out\n", stderr=b"a\nlast words \n\n"), "exited with code 2: last words"),
        (ended(2, stdout=b"only out\n"), "exited with code 2: only out"),
        (ended(2), "the harness exited with code 2"),
        (ended(None, 11, stderr=b"\xff" + b"x" * 1000), "was ended by signal 11: "),
    ],
)
def test_a_crash_is_reported_with_the_last_line_of_output(result, said):
    error = str(judge(result, known(), Cause.HARNESS_CRASH).error)
    assert said in error
    assert len(error) < 400


def test_a_timeout_says_whether_the_model_was_called():
    assert out_of_time(0.5, known(calls=0)).error == (
        "the agent's budget of 0.5 s ran out, without one model call"
    )
    assert str(out_of_time(600, known()).error).endswith("600 s ran out, after 2 model calls")


def test_only_a_completed_ending_has_no_cause():
    with pytest.raises(ValueError, match="ERROR cannot have cause None"):
        Ending(SessionStatus.ERROR)
    with pytest.raises(ValueError, match="COMPLETED cannot have cause"):
        Ending(SessionStatus.COMPLETED, Cause.LIMIT)
    assert failed(Cause.LIMIT, "x").status is SessionStatus.ERROR


def test_every_unsuccessful_status_and_cause_is_assigned_a_fault():
    ends, causes = (SessionStatus.ERROR, SessionStatus.TIMEOUT, SessionStatus.CANCELLED), [*Cause]
    result = {(status, cause): blame(status, cause) for status in ends for cause in causes}
    assert None not in result.values()
    assert set(result.values()) == set(Fault)
    assert blame(SessionStatus.COMPLETED, None) is None


def test_a_timeout_of_a_bridle_stage_is_an_infrastructure_fault_and_no_agent_timeout():
    error, timeout = SessionStatus.ERROR, SessionStatus.TIMEOUT
    assert blame(timeout, Cause.TIMEOUT) == blame(timeout, Cause.LIMIT) == Fault.TIMEOUT
    assert blame(error, Cause.TIMEOUT) == Fault.INFRASTRUCTURE
    assert blame(error, Cause.LIMIT) == Fault.HARNESS

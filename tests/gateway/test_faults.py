"""A harness gets the kind of a failure that it acts on, and nothing of the engine."""

import pytest

from bridle.engines.base import CutError, GarbledError
from bridle.errors import (
    BridleError,
    ContextOverflowError,
    EngineError,
    RenderError,
    RequestError,
    StoreError,
)
from bridle.gateway import faults


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError("secret", retryable=True, status=429), 429, "rate_limit"),
        (EngineError("secret", retryable=True), 503, "overloaded"),
        (EngineError("secret", status=500), 500, "engine_error"),
        (EngineError("secret", retryable=True, kind="engine_reset"), 503, "engine_reset"),
        (EngineError("secret", retryable=True, status=500, kind="engine_500"), 503, "engine_500"),
        (CutError("secret"), 503, "engine_cut"),
        (GarbledError("secret"), 503, "engine_garbled"),
        (ContextOverflowError(90, 80, 5), 400, "context_length_exceeded"),
        (StoreError("secret"), 503, "store_error"),
        (BridleError("secret"), 500, "engine_error"),
        (ValueError("secret"), 500, "engine_error"),
    ],
)
def test_an_error_behind_the_gateway_is_mapped_and_not_leaked(error, status, code):
    answer = faults.request_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert "secret" not in str(answer)


def test_transient_errors_have_retry_after_and_permanent_ones_do_not():
    for error in (EngineError("x", retryable=True), EngineError("x", status=429)):
        assert faults.request_error(error).retry_after_s == faults.RETRY_AFTER_S
    assert faults.request_error(EngineError("x")).retry_after_s is None
    assert faults.paused().retry_after_s is not None


def test_a_refusal_by_the_gateway_is_passed_on_unchanged():
    error = RequestError("no", status=404)
    assert faults.request_error(error) is error


def test_messages_that_cannot_be_rendered_are_a_400_with_the_reason():
    answer = faults.request_error(RenderError("two systems"))
    assert answer.status == 400
    assert "two systems" in str(answer)


def test_a_context_overflow_error_names_prompt_tokens_and_context_length():
    answer = faults.overflow(9_000, 8_192)
    assert "9000" in str(answer)
    assert "8192" in str(answer)
    assert (answer.prompt_tokens, answer.context_length) == (9_000, 8_192)


def test_a_dead_key_and_an_unknown_one_are_both_unauthorised():
    for error in (faults.unauthorized(), faults.session_ended()):
        assert (error.status, error.code) == (401, "authentication_error")


def test_a_logged_stack_trace_names_files_and_no_exception_values():
    secret = "bk-0123456789abcdef"
    with pytest.raises(KeyError) as raised:
        raise KeyError(secret)
    trace = faults.trace_of(raised.value)
    assert "test_faults.py" in trace
    assert secret not in trace

"""Serving until a signal."""

import gc
import os
import signal
import threading

from bridle.cli.serving import Stop, long_running, run_until_signal


def test_a_signal_sets_stop_and_what_was_opened_is_closed():
    seen = []

    async def serve(stop: Stop) -> None:
        try:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            await stop.wait()
            seen.append("stopped")
        finally:
            seen.append("closed")

    run_until_signal(serve)

    assert seen == ["stopped", "closed"]


def test_a_long_running_process_looks_for_garbage_less_often_and_as_before_afterwards():
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    with long_running():
        assert gc.get_threshold() > before
        assert gc.get_freeze_count() > frozen
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0

"""Serving until a signal."""

import os
import signal
import threading

from bridle.cli.serving import Stop, run_until_signal


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
